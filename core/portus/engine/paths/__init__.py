"""Saves to paths, and loads from them: real files."""
