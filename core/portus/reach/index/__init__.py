"""What a pool holds: models, their versions, and the extents of each."""
