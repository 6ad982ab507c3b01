"""The layouts of a directory of shards: torch's own, and its ``HuggingFaceStorageWriter``'s.

In both ``.metadata`` is written last and makes the directory a checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from portus.engine.directory.system import medium_error
from portus.engine.directory.waiting import wait_for_drafts
from portus.engine.image.image import Image
from portus.errors import UsageError, printable
from portus.reach.formats.named_tensors import NamedTensors
from portus.reach.formats.safetensors import SAVE, SUFFIX, safetensors_image
from portus.reach.shards.directories import is_shard_of_portus
from portus.reach.shards.metadata_file import NAME
from portus.reach.shards.rank_contents import RankContents


class TensorShards(NamedTensors):
    """A rank's tensors as a safetensors file, as ``HuggingFaceStorageWriter`` writes it. It cannot
    have values that are not tensors, nor two parts of one tensor.

    Source: ``torch.distributed.checkpoint.hf_storage``: each tensor has its item's name, and the
    metadata of the header have its offsets in the whole tensor.
    """

    def __init__(self, items: Sequence[WriteItem], values: Sequence[torch.Tensor | bytes]) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for item, value in zip(items, values, strict=True):
            name = item.index.fqn
            if isinstance(value, bytes):
                raise UsageError(
                    f"{name}: expected a tensor, which is all that safetensors files have, found "
                    "another value. Leave it out, pass it in files=, or use layout='torch'"
                )
            if name in tensors:
                raise UsageError(
                    f"{name}: this rank has several parts of it, and a safetensors file has one "
                    "tensor of a name. Use layout='torch'"
                )
            tensors[name] = value.detach()
        super().__init__(tensors, _metadata(items))
        self._items: Final = items
        self.save = 0

    @staticmethod
    def file_name(rank: int, save: int) -> str:
        return f"shard-{rank + 1:05}-model-00001-of-00001{SUFFIX}"

    @staticmethod
    def clear(directory: str) -> None:
        """Remove the files of an incomplete save; refuse to save over a checkpoint. Readers of this
        layout take every file with its suffix."""
        wait_for_drafts(directory)
        try:
            names = [name for name in os.listdir(directory) if name.endswith(SUFFIX)]
            is_whole = os.path.exists(os.path.join(directory, NAME))
            # Only files that Portus began: other tools may have put safetensors there.
            left = [name for name in names if not is_whole and is_shard_of_portus(directory, name)]
            if len(left) < len(names):
                raise UsageError(
                    f"{printable(directory)}: expected a directory without safetensors files, "
                    f"found {len(names)}: a load from there takes all of them, also those of an "
                    "older checkpoint too. Save to another directory"
                )
            for name in left:
                os.unlink(os.path.join(directory, name))
        except FileNotFoundError:
            return
        except OSError as error:
            raise medium_error(error, directory) from error

    def image(self, path: str, note: bytes = b"") -> Image:
        return safetensors_image(self.named, {**self.metadata, SAVE: str(self.save)})

    @property
    def sizes(self) -> list[int]:
        size = {each.name: each.size for each in self.named}
        return [size[item.index.fqn] for item in self._items]

    def results(self, name: str) -> list[WriteResult]:
        """Return torch's results. Offsets are 0: the file itself has them."""
        return [
            WriteResult(item.index, size, _StorageInfo(name, 0, size))
            for item, size in zip(self._items, self.sizes, strict=True)
        ]


def _metadata(items: Sequence[WriteItem]) -> dict[str, str]:
    """Return the metadata of the header, as torch writes it."""
    begins: dict[str, dict[str, list[int]]] = {}
    for item in items:
        offsets = [] if item.tensor_data is None else list(item.tensor_data.chunk.offsets)
        begins[item.index.fqn] = {"saved_offsets": offsets}
    return {"DCP_SHARDING_INFO": json.dumps(begins), "DCP_VERSION": "1.0", "format": "pt"}


ShardContents = RankContents | TensorShards
"""The file of one rank, in one layout of directories."""

LAYOUTS: Final[dict[str, type[ShardContents]]] = {
    "torch": RankContents,
    "safetensors": TensorShards,
}
"""The layouts by their names in the public interface."""
