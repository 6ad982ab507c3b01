"""Answers to the requests of clients that were let in."""
