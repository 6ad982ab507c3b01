"""The test kit: contracts for media, stores and adapters of your own, and what they run on."""
