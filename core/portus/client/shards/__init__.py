"""The parts of a sharded checkpoint: how they are cut, grouped, mirrored and read again."""
