"""The settings of a run, and the reports of its saves."""
