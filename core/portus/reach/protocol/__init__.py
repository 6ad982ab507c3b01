"""What a client and a storage host say to each other, as a state table. No I/O."""
