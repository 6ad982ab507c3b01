"""Sharded checkpoint directories as torch itself writes them, in place of references.

What is put there is what ``torch.distributed.checkpoint`` reads with nothing of Portus installed:
``.metadata``, and files of shards. Each shard is read, verified, and written; about
``FILE_SIZE`` bytes of them are in memory at a time, whatever the size of the checkpoint.

The order of changes, so that the directory leads to its checkpoint at every moment: all is
written into a hidden directory; its files are renamed into place, ``.metadata`` last, since who
wrote that last has the directory; only then the references go.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from portus.client.leaving.whole import PoolPath, filled
from portus.client.shards.cuts import ITEMS, METADATA, ItemLocation, decode
from portus.client.shards.group_reader import GroupReader
from portus.client.shards.grouped import STOCK_METADATA, load_part, name_of, shards_at
from portus.errors import CorruptionError, MediumError, UsageError
from portus.index.groups import ID_SIZE, Group

FILE_SIZE: Final = 256 << 20
"""Bytes of a file of shards, roughly; torch keeps a file's shards in memory while it writes it."""

_OF_ACCELERATE: Final = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")
"""What Accelerate calls the directories that it keeps inside of a checkpoint: torch's own each."""


def materialize_shards(directory: str, tables_pool: PoolPath | None = None) -> list[str]:
    """Write the group that ``directory`` leads to as torch does; the paths of the new files.
    tables_pool: see ``materialize``; a table is in memory as a whole.

    The references to the parts of ranks are removed then; other files are left alone. Raises
    ``UsageError`` for a group that is not complete, ``CorruptionError``, ``MediumError``; then
    the directory leads where it did.
    """
    reader = GroupReader.at(directory)
    assert reader is not None, "not a directory of ours"
    reader.read_metadata()
    group = reader.group
    assert group is not None
    needed = sum(info.size for _, info in group.parts.values())
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise MediumError(
            errno.ENOSPC, f"cannot materialise {directory}: {needed} bytes needed, {free} free"
        )
    temporary = os.path.join(directory, f".{group.id.hex()}.portus")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # of a try that was cut off
        os.mkdir(temporary)
        for name, metadata, placed in _checkpoints(group):
            source = _Source(group, placed, tables_pool)
            _write(os.path.join(temporary, name), source, metadata, placed)
        return _move(temporary, directory, group)
    except OSError as error:
        if isinstance(error, MediumError):
            raise
        raise MediumError(error.errno, f"cannot write {directory}: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


_Checkpoint = tuple[str, Metadata, Mapping[MetadataIndex, ItemLocation]]
"""A directory of torch's below ours ("" for ours itself), and what is in it."""


def _checkpoints(group: Group) -> Iterator[_Checkpoint]:
    metadata, placed = _described(group)
    paths: dict[str, Any] = metadata.planner_data or {}
    tops = {str(path[0]) for path in paths.values()}
    if not tops or not all(map(_OF_ACCELERATE.fullmatch, tops)) or "model" in tops:
        yield "", metadata, placed
        return
    for top in sorted(tops):
        prefix = f"{top}."
        mine = {name for name, path in paths.items() if path[0] == top}
        entries = {
            name.removeprefix(prefix): entry
            for name, entry in metadata.state_dict_metadata.items()
            if name in mine
        }
        inner = {name.removeprefix(prefix): tuple(paths[name][1:]) for name in mine}
        places = {
            dataclasses.replace(index, fqn=index.fqn.removeprefix(prefix)): at
            for index, at in placed.items()
            if index.fqn in mine
        }
        yield top, Metadata(entries, inner), places


def _described(group: Group) -> tuple[Metadata, Mapping[MetadataIndex, ItemLocation]]:
    for rank in sorted(group.parts):
        content = load_part(group, rank, lambda path: path.split(".", 1)[0] == METADATA)
        if METADATA in content:
            return decode(content[METADATA])
    raise CorruptionError(f"{name_of(group)}: no part of it holds the metadata")


class _Source:
    """A planner that saves what is in the pools."""

    def __init__(
        self,
        group: Group,
        placed: Mapping[MetadataIndex, ItemLocation],
        tables_pool: PoolPath | None,
    ) -> None:
        self._group: Final = group
        self._placed: Final = placed
        self._tables_pool: Final = tables_pool

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The shard, or the object as torch stores it: read and verified now."""
        at = self._placed[write_item.index]
        wanted = f"{ITEMS}.{at.key}"
        content = load_part(
            self._group,
            at.rank,
            lambda path: path in (ITEMS, wanted) or path.startswith(f"{wanted}."),
            stand_ins=True,  # stock torch knows no codec
        )
        value = filled(content[ITEMS][at.key], write_item.index.fqn, self._tables_pool)
        if isinstance(value, torch.Tensor) and write_item.type != WriteItemType.BYTE_IO:
            return value
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer


def _write(
    place: str,
    source: Any,
    metadata: Metadata,
    placed: Mapping[MetadataIndex, ItemLocation],
) -> None:
    writer = FileSystemWriter(place, single_file_per_rank=True, sync_files=True, thread_count=1)
    writer.set_up_storage_writer(True)
    plans = [writer.prepare_local_plan(SavePlan(items)) for items in _files(metadata, placed)]
    results = []
    for plan in writer.prepare_global_plan(plans):
        results.append(writer.write_data(plan, source).wait())
    writer.finish(metadata, results)


def _files(
    metadata: Metadata, placed: Mapping[MetadataIndex, ItemLocation]
) -> Iterator[list[WriteItem]]:
    """What is written, file by file; shards of one rank are side by side."""
    items: list[WriteItem] = []
    size = 0
    by_place = sorted(_items(metadata), key=lambda item: (placed[item.index].rank, item.index.fqn))
    for item in by_place:
        data = item.tensor_data
        length = 0 if data is None else prod(data.chunk.sizes) * data.properties.dtype.itemsize
        if items and size + length > FILE_SIZE:
            yield items
            items, size = [], 0
        items.append(item)
        size += length
    yield items


def _items(metadata: Metadata) -> Iterator[WriteItem]:
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            yield WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
            continue
        assert isinstance(entry, TensorStorageMetadata)
        for number, chunk in enumerate(entry.chunks):
            yield WriteItem(
                MetadataIndex(name, chunk.offsets, number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, entry.properties, entry.size),
            )


def _move(temporary: str, directory: str, group: Group) -> list[str]:
    made = [
        os.path.relpath(os.path.join(above, name), temporary)
        for above, _, names in os.walk(temporary)
        for name in names
    ]
    made.sort(key=lambda name: (os.path.basename(name) == STOCK_METADATA, name))
    references = shards_at(directory)
    if not references or bytes.fromhex(references[0].token)[:ID_SIZE] != group.id:
        raise UsageError(f"{directory} was replaced while it was materialised: try again")
    for name in made:
        target = os.path.join(directory, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(os.path.join(temporary, name), target)
    _sync(directory, made)
    return [os.path.join(directory, name) for name in made]


def remove_references(directory: str, paths: Sequence[str]) -> None:
    """Remove the references to parts: the versions that only they held may go then."""
    for path in paths:
        os.unlink(path)
    _sync(directory, ())


def _sync(directory: str, names: Sequence[str]) -> None:
    for place in {directory, *(os.path.dirname(os.path.join(directory, n)) for n in names)}:
        descriptor = os.open(place, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
