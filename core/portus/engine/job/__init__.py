"""The settings of a run, and what it is told about its saves."""
