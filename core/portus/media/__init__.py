"""What can be stored and persisted, and who may do it. Knows bytes, not tensors."""
