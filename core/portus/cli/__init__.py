"""The command `portus`. The only floor that prints."""
