"""Sharded saves: the writers that torch plans for, and whole saves and loads in one call."""
