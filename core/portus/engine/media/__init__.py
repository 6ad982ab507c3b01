"""Media that bytes are stored to and persisted on. Knows bytes, not tensors."""
