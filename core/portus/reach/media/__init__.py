"""Media of pools, and who may store to them. Knows bytes, not tensors."""
