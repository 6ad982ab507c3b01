"""The storage host: pools served to clients. No torch."""
