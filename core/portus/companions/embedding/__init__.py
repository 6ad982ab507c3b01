"""Embedding tables that are their own checkpoint: what ``portus.embedding`` offers."""
