"""The models of a pool with protected tables, by name. No torch: commands ask for them."""

from __future__ import annotations

from typing import Final

MODEL: Final = "embedding"
"""The model of the tables, and of the dense part of their training."""

MARKS: Final = "embedding marks"
"""The model whose versions stand for one batch each: checkpoints in other pools name them."""
