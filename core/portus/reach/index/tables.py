"""What the models of a pool with protected tables are called. No torch: commands ask."""

from __future__ import annotations

from typing import Final

MODEL: Final = "embedding"
"""The tables, and the dense part of their training."""

MARKS: Final = "embedding marks"
"""Versions that stand for one batch each: checkpoints in other pools have their tables there."""
