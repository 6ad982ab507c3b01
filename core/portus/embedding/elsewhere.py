"""The name by which pickles of states know the class ``Elsewhere``: it stays."""

from __future__ import annotations

from portus.engine.state.elsewhere import Elsewhere as Elsewhere

__all__ = ["Elsewhere"]
