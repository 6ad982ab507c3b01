"""The module of the class ``Elsewhere`` for pickles of states, which name it: keep it."""

from __future__ import annotations

from portus.engine.state.walk import Elsewhere as Elsewhere

__all__ = ["Elsewhere"]
