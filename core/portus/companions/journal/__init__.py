"""The records that a run writes of itself, and reports from them. Pure: no I/O, clock or thread."""
