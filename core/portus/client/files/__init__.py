"""Where pools are, pointers on disk, and the order of what happens at paths."""
