"""The conversation of a client and a storage host, as a state table. No I/O."""
