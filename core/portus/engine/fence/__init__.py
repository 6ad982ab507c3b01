"""Keeps writers from memory that a save still reads (V7): fence, guards, the snapshot."""
