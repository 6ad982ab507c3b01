"""A Portus pool as the storage of ``torch.distributed.checkpoint``: a part of the public face.

``dcp.save(state, checkpoint_id="step_100", storage_writer=PortusStorageWriter(pool))``, and
``dcp.load(state, storage_reader=PortusStorageReader(pool))``. Needs torch.
"""

from __future__ import annotations

from portus.client.dcp import PortusStorageWriter as PortusStorageWriter
from portus.client.dcp import groups as groups
from portus.client.shards.dcp_reader import PortusStorageReader as PortusStorageReader
from portus.client.shards.dcp_reader import load as load
from portus.index.groups import Group as Group

__all__ = ["Group", "PortusStorageReader", "PortusStorageWriter", "groups", "load"]
