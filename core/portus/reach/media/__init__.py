"""Media of pools, and the locks of their writers and readers. Knows bytes, not tensors."""
