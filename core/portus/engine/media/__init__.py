"""What a file can be stored to, and persisted. Knows bytes, not tensors."""
