"""Bytes on the medium, as tables. Pure: no I/O, no clock, no thread."""
