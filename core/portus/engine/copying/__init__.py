"""Bytes between memory and a medium of this machine: copied, hashed, and compared."""
