"""The checkpoints of one training, at paths that its framework chooses."""
