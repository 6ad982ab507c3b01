"""The tables of a state that others saved: see ``reach.pools.elsewhere``."""

from __future__ import annotations

from portus.engine.state.elsewhere import Elsewhere as Elsewhere
from portus.reach.pools.elsewhere import fill as fill
from portus.reach.pools.elsewhere import marked_state as marked_state

__all__ = ["Elsewhere", "fill", "marked_state"]
