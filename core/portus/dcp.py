"""The public functions and classes for ``torch.distributed.checkpoint``. Needs torch.

``save``, ``async_save``, ``load`` and ``load_newest`` are whole calls. ``PortusStorageWriter`` and
``PortusStorageReader`` are for torch's own ``dcp.save`` and ``dcp.load``.
"""

from __future__ import annotations

from portus.reach.dcp.directory_reader import PortusStorageReader
from portus.reach.dcp.directory_writer import PortusStorageWriter
from portus.reach.dcp.rank_files import RankFiles
from portus.reach.dcp.whole_calls import async_save, load, load_newest, save
from portus.reach.shards.directories import has_digests

__all__ = [
    "PortusStorageReader",
    "PortusStorageWriter",
    "RankFiles",
    "async_save",
    "has_digests",
    "load",
    "load_newest",
    "save",
]
