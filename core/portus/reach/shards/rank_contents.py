"""One rank's part of a plan of torch, as the contents of its file, in a directory of either layout:
torch's own, and its ``HuggingFaceStorageWriter``'s.

In both ``.metadata`` is written last and makes the directory a checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from portus.engine.directory.system import medium_error
from portus.engine.directory.waiting import wait_for_drafts
from portus.engine.image.image import Image
from portus.engine.state.contents import FileContents
from portus.engine.state.pickling import PickledState, pickle_state
from portus.errors import UsageError, printable
from portus.reach.formats.safetensors import SAVE, SUFFIX, safetensors_image
from portus.reach.formats.safetensors_file import NamedTensors
from portus.reach.shards.directories import is_shard_of_portus
from portus.reach.shards.rank_file import METADATA, Item, TensorItem, offsets_of, rank_image

_SCALARS: Final = frozenset({bool, int, float, str, type(None)})

_ARCHIVE: Final = "archive"
"""torch's name for the archive of a tensor that it saves to a stream."""


@dataclass(frozen=True, slots=True)
class _SavedTensor(TensorItem):
    """A tensor to save. is_copy: of a part of a larger storage."""

    pickled: PickledState
    is_copy: bool


class RankContents(FileContents):
    """A rank's part of a state: the items of a plan, and for each a tensor or bytes. Parts of
    larger storages are copied. ``save``: the number of the save; set it before the image."""

    def __init__(self, items: Sequence[WriteItem], values: Sequence[torch.Tensor | bytes]) -> None:
        self._planned: Final = items
        self._items: Final = [_item(*each) for each in zip(items, values, strict=True)]
        self.save = 0
        tensors = [each for each in self._items if isinstance(each, _SavedTensor)]
        self.tensors = [tensor for each in tensors for tensor in each.pickled.tensors]
        self.storages = [storage for each in tensors for storage in each.pickled.storages]
        self._owner: Final = [
            planned.index.fqn
            for planned, each in zip(items, self._items, strict=True)
            if isinstance(each, _SavedTensor)
            for _ in each.pickled.storages
        ]
        are_copies = [each.is_copy for each in tensors for _ in each.pickled.storages]
        self.owned_storages = frozenset(np.flatnonzero(are_copies).tolist())
        self.lengths = np.array([storage.nbytes() for storage in self.storages], np.int64)
        self.has_devices = any(each.pickled.has_devices for each in tensors)

    @staticmethod
    def file_name(rank: int, save: int) -> str:
        """Return the name of the file of a rank."""
        return f"__{rank}_{save}.distcp"

    @staticmethod
    def clear(directory: str) -> None:
        """Prepare a directory before any rank writes, on the rank that coordinates. Raise
        ``UsageError`` if no save may go there. Here files of other saves stay, since names have the
        number of the save."""

    def image(self, path: str, note: bytes = b"") -> Image:
        return rank_image(self._items, self.save)

    def describer(self) -> Callable[[int], str]:
        return self._owner.__getitem__

    @property
    def sizes(self) -> list[int]:
        """Return the bytes of each item in the file."""
        return list(map(len, self._items))

    def results(self, name: str) -> list[WriteResult]:
        """Return torch's results for the items in the file ``name``."""
        places = zip(self._planned, offsets_of(self._items), self.sizes, strict=True)
        return [
            WriteResult(planned.index, size, _StorageInfo(name, offset, size))
            for planned, offset, size in places
        ]


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
            is_whole = os.path.exists(os.path.join(directory, METADATA))
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


def resolve_items(items: Sequence[WriteItem], planner: SavePlanner) -> list[torch.Tensor | bytes]:
    """Return the values of items by ``planner``: tensors, and bytes of other values. Raise
    ``UsageError`` for a value that torch cannot save."""
    found: list[torch.Tensor | bytes] = []
    for each in items:
        with _naming(each):
            value = planner.resolve_data(each)
        found.append(value.getvalue() if isinstance(value, io.BytesIO) else value)
    return found


def in_bytes(items: Sequence[WriteItem], values: Sequence[Any]) -> list[torch.Tensor | bytes]:
    """Return tensors as they are, and the bytes of other values as torch's planner makes them.
    Raise ``UsageError`` for a value that torch cannot save."""
    known: dict[tuple[type, str], bytes] = {}
    found: list[torch.Tensor | bytes] = []
    for planned, value in zip(items, values, strict=True):
        if planned.type != WriteItemType.BYTE_IO:
            found.append(value)
            continue
        # Each parameter of a group has the same ones.
        key = (type(value), repr(value)) if type(value) in _SCALARS else None
        data = known.get(key) if key is not None else None
        if data is None:
            stream = io.BytesIO()
            with _naming(planned):
                torch.save(value, stream)
            data = stream.getvalue()
            if key is not None:
                known[key] = data
        found.append(data)
    return found


@contextlib.contextmanager
def _naming(planned: WriteItem) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise UsageError(
            f"{planned.index.fqn}: torch cannot save it: {type(error).__name__}: {error}"
        ) from error


def _item(planned: WriteItem, value: torch.Tensor | bytes) -> Item:
    if isinstance(value, bytes):
        return value
    tensor = value.detach()
    is_copy = tensor.layout is torch.strided and (
        tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    )
    # A view would bring the whole storage, of which other shards may be views, too.
    if is_copy:
        tensor = tensor.clone()
    try:
        pickled = _on_cpu(tensor)
    except UsageError as error:
        raise UsageError(f"{planned.index.fqn}: {error}") from error
    is_block = (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and len(pickled.storages) == 1
    )
    return _SavedTensor(pickled.image(_ARCHIVE), is_block, pickled, is_copy)


def _on_cpu(tensor: torch.Tensor) -> PickledState:
    """Return ``tensor`` as torch saves it: as one on the CPU, whatever its device."""
    if tensor.device.type == "cpu" or tensor.layout is not torch.strided:
        return pickle_state(tensor if tensor.device.type == "cpu" else tensor.cpu())
    # Never touched, so free: torch needs a tensor on the CPU to pickle its shape.
    alike = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return replace(
        pickle_state(alike),
        storages=[tensor.untyped_storage()],
        tensors=[tensor],
        has_devices=True,
    )
