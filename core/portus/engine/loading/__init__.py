"""Loads of committed versions, from here, a host or a mirror, as verified tensors (V4)."""
