"""Sharded saves: the writers that torch plans for, and functions for whole saves and loads."""
