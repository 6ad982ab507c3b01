"""The tables of a state that others saved: see ``client.loading.elsewhere``."""

from __future__ import annotations

from portus.client.loading.elsewhere import fill as fill
from portus.client.loading.elsewhere import marked as marked
from portus.client.state.elsewhere import Elsewhere as Elsewhere

__all__ = ["Elsewhere", "fill", "marked"]
