"""Mutants of the core, and which tests kill them: ``make mutants``."""
