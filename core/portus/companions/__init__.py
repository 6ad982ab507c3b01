"""Companions of a training: when to save, how to leave, data, journals; shelves and tables."""
