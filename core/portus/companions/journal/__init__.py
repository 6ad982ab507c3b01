"""What a run writes down of itself, and what follows from it. Pure: no I/O, clock or thread."""
