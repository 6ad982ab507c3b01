"""``TensorShards``: one rank's part of a plan of torch, as the contents of a safetensors file.

Source: ``torch.distributed.checkpoint.hf_storage``: each tensor has its item's name, and the
metadata of the header have its offsets in the whole tensor.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from portus.engine.image.image import Image
from portus.errors import UsageError
from portus.reach.formats.named_tensors import NamedTensors
from portus.reach.formats.safetensors import SAVE, safetensors_image


class TensorShards(NamedTensors):
    """A rank's tensors as a safetensors file. Raises ``UsageError`` for what such a file cannot
    have: values that are not tensors, and two parts of one tensor."""

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

    def image(self, path: str, note: bytes = b"") -> Image:
        """Return the image: see ``FileContents``; there is no note."""
        return safetensors_image(self.named, {**self.metadata, SAVE: str(self.save)})

    @property
    def sizes(self) -> list[int]:
        """Return the sizes: see ``ShardContents``."""
        size = {each.name: each.size for each in self.named}
        return [size[item.index.fqn] for item in self._items]

    def results(self, name: str) -> list[WriteResult]:
        """Return the results: see ``ShardContents``. Offsets are 0: the file itself has them."""
        return [
            WriteResult(item.index, size, _StorageInfo(name, 0, size))
            for item, size in zip(self._items, self.sizes, strict=True)
        ]


def _metadata(items: Sequence[WriteItem]) -> dict[str, str]:
    """Return the metadata of the header, as torch writes it."""
    begins = {
        item.index.fqn: {"saved_offsets": [] if item.tensor_data is None else _begin(item)}
        for item in items
    }
    return {"DCP_SHARDING_INFO": json.dumps(begins), "DCP_VERSION": "1.0", "format": "pt"}


def _begin(item: WriteItem) -> list[int]:
    assert item.tensor_data is not None
    return list(item.tensor_data.chunk.offsets)
