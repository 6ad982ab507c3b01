"""Where pools are, and pointers on disk."""
