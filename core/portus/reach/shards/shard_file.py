"""Files of a directory of ``torch.distributed.checkpoint``, recognized by their names."""

from __future__ import annotations

import os

from portus.engine.image.integrity import ShardFile
from portus.engine.image.stored_file import Read
from portus.errors import printable
from portus.reach.shards.metadata_file import NAME as METADATA
from portus.reach.shards.metadata_file import read_pickle
from portus.reach.shards.rank_file import DISTCP, RANK_FILE, is_rank_file, read_rank_file


def shard_of(read: Read, size: int, path: str) -> ShardFile | None:
    """Return the known facts of the file at ``path``; None if its name is not a shard's. Raises
    ``CorruptionError``."""
    name = os.path.basename(path)
    if name == METADATA:
        _, is_verified = read_pickle(read, size, printable(path))
        return ShardFile(is_verified, lambda _: None)
    if not name.endswith(DISTCP):
        return None
    if not is_rank_file(read, size) and not RANK_FILE.fullmatch(name):
        return ShardFile(False, lambda _: None)
    return ShardFile(True, read_rank_file(read, size, printable(path)).verify)
