"""The places of pools, and pointers on disk."""
