"""Embedding tables that are their own checkpoint: the implementation of ``portus.embedding``."""
