"""The tables of a state that others saved: see ``client.pools.elsewhere``."""

from __future__ import annotations

from portus.client.pools.elsewhere import fill as fill
from portus.client.pools.elsewhere import marked as marked
from portus.client.state.elsewhere import Elsewhere as Elsewhere

__all__ = ["Elsewhere", "fill", "marked"]
