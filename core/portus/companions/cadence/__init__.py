"""When to save: formulas and estimates over measured times. No clock, thread or I/O.

All times are seconds, all shares are of 1, an interval is whole steps.
"""
