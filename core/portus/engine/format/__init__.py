"""Digests, dtypes, and how records are declared. Pure: no I/O, no clock, no thread."""
