"""``PortusStorageReader``: loads from torch's checkpoint directories, and verifies what it reads.

Whole shards are read directly into their targets, and verified there; of others, the needed units
are read. Files by stock torch have no digests, and torch loads them.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from portus.engine.copying.local import fetch
from portus.engine.copying.segments import Digests, Sources, Stop
from portus.engine.directory.waiting import wait_for_drafts
from portus.engine.fence.fence import before_write
from portus.engine.files.pending import PENDING
from portus.engine.format.checksum import UNIT, unit_counts
from portus.engine.image.image import Read, StoredFile
from portus.engine.image.torch_reader import read_torch
from portus.engine.loading.checkpoint_file import use_file
from portus.engine.loading.open_file import OpenFile, reads
from portus.errors import (
    CorruptionError,
    NoCheckpointError,
    PortusError,
    UsageError,
    printable,
)
from portus.reach.formats.safetensors import SAVE, SUFFIX, SafetensorsFile, read_safetensors
from portus.reach.index.place import Place, PlaceName, hosts_of
from portus.reach.pools.resolve import allow
from portus.reach.shards.directories import has_safetensors_of_torch, read_metadata
from portus.reach.shards.rank_file import (
    BLOCK,
    METADATA,
    RANK_FILE,
    RankFile,
    bytes_of,
    is_rank_file,
    read_rank_file,
    slice_of,
)

_BUFFERS_MAX: Final = 256 << 20
"""The most bytes of buffered shards, before the next ones are read."""


class _Storage(NamedTuple):
    """One block of memory in a file, or whole units of it: its name in messages, its place in the
    file, and the digest of each of its units (None if the file has none)."""

    name: str
    offset: int
    size: int
    digests: Digests | None


def _storage_of(found: StoredFile, index: int, name: str, base: int = 0) -> _Storage:
    """Return a storage of a file that begins at ``base``."""
    counts = unit_counts(found.length)
    first, count = int(counts[:index].sum()), int(counts[index])
    digests = None if found.digests is None else found.digests[first : first + count]
    return _Storage(name, base + int(found.offset[index]), int(found.length[index]), digests)


class PortusStorageReader(FileSystemReader):
    """Loads checkpoints of ``PortusStorageWriter``, or of torch's own storage, verified.

    place: the checkpoint directory, if a load has no ``checkpoint_id``. verify: False compares no
        digests of tensors.

    It connects to storage hosts that are allowed: see ``portus.allow``.
    """

    def __init__(self, place: PlaceName | None = None, *, verify: bool = True) -> None:
        hosts = hosts_of(place)
        if hosts is not None:
            allow(hosts)
        self._is_named = place is not None and hosts is None
        super().__init__(Place.parse(place).path if self._is_named else ".")
        self._verify: Final = verify
        self._problem: PortusError | None = None
        self._known: Mapping[str, Any] = {}
        self._save: str | None = None
        self._chunks: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}

    @property
    def directory(self) -> str:
        """Return the directory to load from, absolute and without links."""
        return os.path.realpath(self.path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for a load from ``checkpoint_id``."""
        super().reset(checkpoint_id)
        self._is_named |= bool(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Wait for saves in flight, and return torch's metadata. ``set_up_storage_reader`` raises
        errors of them: torch would turn them into text here."""
        if kwargs.get("rank") is not None:  # stock torch, without collectives, made one for each
            own: Metadata = super().read_metadata(*args, **kwargs)
            return own
        self._problem = None
        try:
            return self._read_metadata()
        except NoCheckpointError as error:
            if os.path.exists(os.path.join(self.directory, f"__0{METADATA}")):
                raise
            self._problem = error
        except PortusError as error:
            self._problem = error
        return Metadata({})

    def _read_metadata(self) -> Metadata:
        if not self._is_named:
            raise UsageError("checkpoint_id: expected the directory to load from, found none")
        PENDING.wait_for(self.directory)
        with PENDING.exempt():
            wait_for_drafts(self.directory)
            try:
                found: Metadata = read_metadata(self.directory)
            except NoCheckpointError:
                stock = _of_safetensors(self.directory)
                if stock is None:
                    raise
                found = stock.read_metadata()
        return found

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the metadata, once all ranks have them. Raises ``NoCheckpointError``,
        ``CorruptionError``, ``MediumError``, ``UsageError``."""
        if self._problem is not None:
            raise self._problem
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._known = metadata.state_dict_metadata
        self._save = getattr(metadata.storage_meta, "save_id", None)
        self._chunks = {}

    def _block(self, index: MetadataIndex) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the sizes and the type of a shard, one block of memory, by the metadata."""
        noted: Any = self._known[index.fqn]
        if index.fqn not in self._chunks:
            self._chunks[index.fqn] = {
                tuple(each.offsets): tuple(each.sizes) for each in noted.chunks
            }
        return self._chunks[index.fqn][tuple(index.offset or ())], noted.properties.dtype

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load this rank's items, one file after another. Raises ``CorruptionError`` with file,
        name and offset, ``UsageError``, ``MediumError``."""
        before_write()  # a writer of this process may be saving these tensors
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            # By file: each is opened once, and its table read once.
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        stock: list[ReadItem] = []
        with PENDING.exempt():
            for name, items in by_file.items():
                if not self._load(name, items, planner):
                    stock += items
            if stock:
                self._read_stock(replace(plan, items=stock), planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_stock(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        reader = None
        if self.storage_data[plan.items[0].storage_index].relative_path.endswith(SUFFIX):
            reader = _of_safetensors(self.directory)
        if reader is None:
            super().read_data(plan, planner)
        else:
            reader.storage_data = self.storage_data
            reader.read_data(plan, planner)

    def _load(self, name: str, items: Sequence[ReadItem], planner: LoadPlanner) -> bool:
        """Load from the file ``name``; return False if stock torch wrote it."""
        path = os.path.join(self.directory, name)
        try:
            return use_file(path, lambda file: self._load_from(file, path, items, planner))
        except FileNotFoundError as error:
            raise CorruptionError(
                f"{printable(path)}: the file of a rank is missing; the checkpoint cannot be loaded"
            ) from error

    def _load_from(
        self, file: OpenFile, path: str, items: Sequence[ReadItem], planner: LoadPlanner
    ) -> bool:
        """Load from an open file; return False if stock torch wrote it."""
        read, name = reads(file), os.path.basename(path)
        loading = _FileLoader(self, file, planner)
        if name.endswith(SUFFIX):
            shards = read_safetensors(read, file.size, printable(path))
            if self._save is None and shards.digests is None:
                return False
            save = shards.metadata.get(SAVE)
            if save is None or save != self._save:
                raise CorruptionError(
                    f"{shards.name}: expected a file of the save {self._save}, found one of "
                    f"{save}: it was copied from another checkpoint"
                )
            for item in items:
                loading.load_shard(item, shards)
            loading.flush()
            return True
        match = RANK_FILE.fullmatch(name)
        if match is None and not is_rank_file(read, file.size):
            return False
        found = read_rank_file(read, file.size, printable(path))
        # A renamed file fits by its name and its sizes: only the number inside reveals it.
        if match is None or int(match[2]) != found.save:
            raise CorruptionError(
                f"{printable(path)}: the file is that of the save {found.save}: it was renamed, or "
                "copied from another checkpoint"
            )
        places = self.storage_data
        for item in sorted(items, key=lambda each: int(places[each.storage_index].offset)):
            loading.load(item, found, places[item.storage_index])
        loading.flush()
        return True


class _FileLoader:
    """The loading of items from one open file of a directory."""

    def __init__(self, reader: PortusStorageReader, file: OpenFile, planner: LoadPlanner) -> None:
        self._reader: Final = reader
        self._file: Final = file
        self._planner: Final = planner
        self._verify: Final = reader._verify
        self._read: Final[Read] = reads(file)
        self._wanted: list[tuple[_Storage, int, Callable[[], None]]] = []
        """Units to read to an address, and the call that follows."""
        self._buffered = 0

    def load(self, item: ReadItem, found: RankFile, place: Any) -> None:
        """Have ``flush`` at the latest pass on an item of a rank's file. place: as torch has it."""
        row, name = found.at(place.offset, place.length), f"{found.name}: {item.storage_index.fqn}"
        if item.type == LoadItemType.BYTE_IO:
            self._planner.load_bytes(item, io.BytesIO(bytes_of(row, self._read, name)))
            return
        target = self._target(item, name)
        part = slice_of(self._read, row)
        stored = read_torch(part, row.length, name)
        if row.kind != BLOCK:
            if self._verify:
                stored.verify(part)
            file = io.BytesIO(part(0, row.length))
            # Not one block of memory, as a sparse or quantized tensor: only torch can rebuild it.
            whole = torch.load(file, map_location="cpu", weights_only=True)
            target.copy_(_narrow(whole, item, 0))
            self._planner.commit_tensor(item, target)
            return
        if len(stored.length) != 1:
            raise CorruptionError(f"{name}: expected one block, found {len(stored.length)}")
        self._load_block(item, target, _storage_of(stored, 0, name, row.offset))

    def load_shard(self, item: ReadItem, found: SafetensorsFile) -> None:
        """Have ``flush`` at the latest pass on an item of a safetensors file."""
        fqn = item.storage_index.fqn
        name = f"{found.name}: {fqn}"
        if fqn not in found.keys:
            raise CorruptionError(f"{name}: expected this tensor, found none of this name")
        storage = _storage_of(found, found.keys.index(fqn), name)
        self._load_block(item, self._target(item, name), storage)

    def _target(self, item: ReadItem, name: str) -> torch.Tensor:
        target = self._planner.resolve_tensor(item).detach()
        if target.size() != item.lengths:
            raise UsageError(
                f"{name}: the state has shape {tuple(target.size())} where the checkpoint has "
                f"{tuple(item.lengths)}"
            )
        return target

    def _load_block(self, item: ReadItem, target: torch.Tensor, storage: _Storage) -> None:
        sizes, dtype = self._reader._block(item.storage_index)
        rows, size = sizes[:1] or (1,), storage.size
        if math.prod(sizes) * dtype.itemsize != size:
            raise CorruptionError(
                f"{storage.name}: {size} bytes are not those of a {dtype} tensor of shape {sizes}"
            )
        if (
            tuple(item.lengths) == sizes
            and target.dtype == dtype
            and target.device.type == "cpu"
            and target.layout is torch.strided
            and target.is_contiguous()
            and not (target.is_conj() or target.is_neg())
        ):  # the bytes of the shard are those of its target
            commit = partial(self._planner.commit_tensor, item, target)
            self._wanted.append((storage, target.data_ptr(), commit))
            return
        first, count = (item.storage_offsets[0], item.lengths[0]) if sizes else (0, 1)
        each = size // max(1, rows[0])
        begin, end = (
            first * each // UNIT * UNIT,
            min(size, -(-(first + count) * each // UNIT) * UNIT),
        )
        buffer = torch.empty(end - begin, dtype=torch.uint8)
        inside = first * each - begin

        def copy() -> None:
            found = buffer[inside : inside + count * each].view(dtype)
            shape = (count, *sizes[1:]) if sizes else ()
            target.copy_(_narrow(found.reshape(shape), item, first))
            self._planner.commit_tensor(item, target)

        # Whole units, though less is wanted: a digest is of a unit.
        digests = storage.digests
        units = None if digests is None else digests[begin // UNIT : -(-end // UNIT)]
        part = _Storage(storage.name, storage.offset + begin, end - begin, units)
        self._wanted.append((part, buffer.data_ptr(), copy))
        self._buffered += len(buffer)
        # Memory is bounded, and many small shards still share one round of reads.
        if self._buffered > _BUFFERS_MAX:
            self.flush()

    def flush(self) -> None:
        """Read the wanted units, compare them, and pass them on."""
        wanted, self._wanted, self._buffered = self._wanted, [], 0
        filled = [each for each in wanted if each[0].size]
        rows = [(each.offset, each.size, address) for each, address, _ in filled]
        offset, length, address = np.array(rows, np.int64).reshape(-1, 3).T.copy()
        held, held_length = self._file.extents(offset, length)
        sources = Sources(
            address=address, length=length, extent_offset=held, extent_length=held_length
        )
        stored, at = fetch(self._file.medium, sources, Stop()), 0
        for (part, *_), units in zip(filled, unit_counts(length).tolist(), strict=True):
            own, at = stored[at : at + units], at + units
            # Compared in place: a load reads each byte once (decision 0213).
            if self._verify and part.digests is not None and not np.array_equal(own, part.digests):
                raise CorruptionError(
                    f"{part.name}: {part.size} bytes at {part.offset} are not those that "
                    "were saved. Load another checkpoint, and check the disk"
                )
        for _, _, then in wanted:
            then()


def _of_safetensors(directory: str) -> FileSystemReader | None:
    """Return a reader of the safetensors files that stock torch wrote; None if there are none."""
    try:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    except ImportError:  # torch 2.6
        return None
    if not has_safetensors_of_torch(directory):
        return None
    return HuggingFaceStorageReader(directory)


def _narrow(tensor: torch.Tensor, item: ReadItem, first: int) -> torch.Tensor:
    """Return the item's part of a shard, whose rows before ``first`` are not there."""
    for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(axis, start - first if axis == 0 else start, length)
    return tensor
