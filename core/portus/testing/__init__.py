"""The test kit: contracts and simulated crashes, for media, stores and adapters of your own."""
