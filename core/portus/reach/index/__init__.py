"""The index of a pool: models, their versions, and the extents of each."""
