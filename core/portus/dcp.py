"""The public functions and classes for ``torch.distributed.checkpoint``. Needs torch.

``save``, ``async_save``, ``load`` and ``load_newest`` are whole calls. ``PortusStorageWriter`` and
``PortusStorageReader`` are for torch's own ``dcp.save`` and ``dcp.load``.
"""

from __future__ import annotations

from portus.reach.dcp.directory_reader import PortusStorageReader as PortusStorageReader
from portus.reach.dcp.directory_writer import PortusStorageWriter as PortusStorageWriter
from portus.reach.dcp.rank_files import FilesOfRank as FilesOfRank
from portus.reach.dcp.rank_files import LatestFile as LatestFile
from portus.reach.dcp.rank_files import RankFiles as RankFiles
from portus.reach.dcp.whole_calls import async_save as async_save
from portus.reach.dcp.whole_calls import load as load
from portus.reach.dcp.whole_calls import load_newest as load_newest
from portus.reach.dcp.whole_calls import save as save
from portus.reach.shards.directories import has_digests as has_digests

__all__ = [
    "FilesOfRank",
    "LatestFile",
    "PortusStorageReader",
    "PortusStorageWriter",
    "RankFiles",
    "async_save",
    "has_digests",
    "load",
    "load_newest",
    "save",
]
