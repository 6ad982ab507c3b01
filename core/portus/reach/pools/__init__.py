"""Checkpoint files in pools: on devices and storage hosts, where there are no files."""
