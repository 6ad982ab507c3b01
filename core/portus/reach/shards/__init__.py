"""Checkpoints of many ranks: directories of torch, what each rank saves there, and loads."""
