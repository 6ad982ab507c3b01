"""Checkpoints of many ranks: torch's directories, and each rank's files and loads."""
