"""From a committed version, here, on a host or in a mirror, back to tensors, verified (V4)."""
