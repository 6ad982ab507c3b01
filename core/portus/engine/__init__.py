"""The engine: a state becomes a file in a directory, and a state again. Needs no other ring."""
