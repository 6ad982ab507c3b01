"""Embedding tables that are their own checkpoint: after each batch, the changed rows are written
and made durable, and only these. A part of the public interface.

``tables = portus.embedding.protect(model, optimizer, pool="run.portus")``; then train.
"""

from __future__ import annotations

from portus.companions.embedding.protection import ProtectedTables as ProtectedTables
from portus.companions.embedding.protection import ResumePoint as ResumePoint
from portus.companions.embedding.protection import protect as protect
from portus.companions.embedding.tables import RowwiseAdagrad as RowwiseAdagrad
from portus.engine.state.walk import Elsewhere as Elsewhere
from portus.reach.pools.elsewhere import fill as fill

__all__ = ["Elsewhere", "ProtectedTables", "ResumePoint", "RowwiseAdagrad", "fill", "protect"]
