"""Loads of committed versions back into tensors, verified (V4).

A load fills fresh memory, hashes what arrived there and compares; no unverified byte is returned.
``restore_into`` first verifies the pool's bytes, then copies them over the caller's tensors,
hashing again: if no version verifies, the tensors are untouched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch

from portus.engine.copying.local import check, fetch
from portus.engine.copying.segments import Digests, Stop, memory
from portus.engine.format.checksum import UNIT, unit_counts
from portus.engine.image.key_paths import storages_in
from portus.engine.loading.checkpoint_file import load_opened, note_loaded
from portus.engine.loading.open_file import OpenFile
from portus.engine.loading.patterns import Matcher, Patterns, matcher, part_of
from portus.engine.loading.restore_over import (
    RestoreOptions,
    RestoreReport,
    fetch_storages,
    restore_over,
    view_of,
)
from portus.engine.loading.torch_file import restore_torch
from portus.engine.pipeline.plan import Column
from portus.engine.spec import TensorSpec, VersionInfo
from portus.engine.state.walk import StateContents, is_plain, leaves
from portus.errors import CorruptionError, UsageError
from portus.reach.format.arrays import array_over
from portus.reach.format.items import StoredArray
from portus.reach.index.in_place import InPlaceReader
from portus.reach.index.log import NOT_LOGGED, LogState, read_log
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry, VersionRecord
from portus.reach.pools.leaves import is_pickle, leaves_in, shelf_items, tensors_among
from portus.reach.pools.version_file import files_opened
from portus.reach.pools.weights_only import unpickle
from portus.reach.versions.parts import share, sources


@dataclass(frozen=True)
class _PinnedVersion:
    """A pinned version with everything that was read of it, except its bytes."""

    pool: PoolReader
    record: VersionRecord
    contents: bytes
    verify: bool
    logged: LogState
    in_place: InPlaceReader

    @cached_property
    def leaves(self) -> list[tuple[str, object]]:
        """The leaves of the version; see ``leaves_in``."""
        lengths, storages = self.lengths.tolist(), None
        with contextlib.suppress(CorruptionError), _naming(self):
            return leaves_in(self.contents, lengths)
        if is_pickle(self.contents):
            fetched = fetch_storages(self, np.arange(len(lengths)))
            storages = [each for each in fetched if each is not None]
        with _naming(self):
            return leaves_in(self.contents, lengths, storages)

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The plain tensors of the version; an array of a shelf as its bytes."""
        return tensors_among(self.leaves)

    @property
    def where(self) -> str:
        return describe(self.record.info)

    def name(self, index: int) -> str:
        """Return the name of a storage, for errors. Reads no storage: one may be damaged."""
        if not is_pickle(self.contents):
            return f"{self.where}: {_names(self.tensors, index)}"
        found = storages_in(self.contents)
        return f"{self.where}: {_names(() if found is None else found[1], index)}"

    @property
    def lengths(self) -> Column:
        return self.record.length

    def check(self, wanted: Column) -> None:
        """Raise ``CorruptionError`` unless the pool holds the bytes that were saved."""
        if not self.verify:
            return
        placed = np.isin(wanted, self.in_place.storages)
        for index in wanted[placed].tolist():
            for _ in _units_in_place(self, index):
                pass
        wanted = wanted[~placed]
        group = share(self.record, wanted)
        lengths = self.lengths[wanted]
        nowhere = np.ones(len(wanted), np.int64)  # not used as addresses
        found = check(self.pool.medium, sources(nowhere, lengths, group.extents), Stop())
        _compare(self, wanted, found, group.digests)

    def fetch_into(self, wanted: Column, address: Column) -> None:
        placed = np.isin(wanted, self.in_place.storages)
        for index, start in zip(wanted[placed].tolist(), address[placed].tolist(), strict=True):
            for piece in _units_in_place(self, index):
                memory(start, len(piece))[:] = piece
                start += len(piece)
        wanted, address = wanted[~placed], address[~placed]
        group = share(self.record, wanted)
        lengths = self.lengths[wanted]
        found = fetch(self.pool.medium, sources(address, lengths, group.extents), Stop())
        _compare(self, wanted, found, group.digests)
        # After the comparison: the digests are those of the bytes as they were committed.
        if self.logged.changes:
            columns = (wanted, address, lengths)
            for index, start, length in zip(*(each.tolist() for each in columns), strict=True):
                self.logged.over(index, 0, memory(start, length))


def load(
    pool: PoolReader,
    entry: VersionEntry,
    names: Patterns = None,
    *,
    verify: bool = True,
    file: str | None = None,
    **settings: Any,
) -> object:
    """Return the state of one version, on the CPU, in memory of its own; or the part that matches.

    verify: False returns bytes without comparing their checksums. file: load only that file of the
    version; ``CorruptionError`` if there is none of that name.

    Raises ``CorruptionError`` naming model, step, tensor and offset, ``StaleError`` if the version
    was retired meanwhile, ``MediumError``; ``UsageError`` for a pattern that matches nothing.
    """
    with files_opened(pool, entry, file) as files:
        if file is not None and not files:
            raise CorruptionError(f"{describe(entry.info)}: has no file {file!r}")
        if files:
            found = load_files(files, entry.info, names, verify=verify, **settings)
            return found if len(files) > 1 else next(iter(found.values()))
    keep = matcher(names)
    with pool.pin(entry.info.id) as current:
        opened = _open(pool, current, verify)
        state = _assemble(opened, fetch_storages(opened, _storages_of(opened, keep)))
    if keep is not None:
        state = part_of(state, keep)
        keep.complain(describe(entry.info))
    note_loaded(entry.info)
    return state


def load_over(
    pool: PoolReader, entry: VersionEntry, there: Mapping[int, torch.UntypedStorage]
) -> object:
    """Return the state of one version, with some storages, by their indices, in the memory
    ``there``: that is the pool's own, which is read and verified, and not filled. Raises as
    ``load``."""
    with pool.pin(entry.info.id) as current:
        opened = _open(pool, current, True)
        given = np.array(sorted(there), np.int64)
        # Compared where it is: the tables are the pool's own memory, and nothing is copied.
        opened.check(given)
        storages = fetch_storages(opened, np.setdiff1d(_storages_of(opened, None), given))
        for index, storage in there.items():
            storages[index] = storage
        return _assemble(opened, storages)


@dataclass(frozen=True, slots=True)
class Outline:
    """A state whose plain tensors have memory without their bytes. ``indices``: of storages of the
    version, by the address (``_cdata``) of the storage of a tensor."""

    state: object
    indices: Mapping[int, int]
    record: VersionRecord
    tensors: tuple[TensorSpec, ...]
    logged: LogState = NOT_LOGGED

    def name(self, index: int) -> str:
        """Return the name of a storage, for errors."""
        return f"{describe(self.record.info)}: {_names(self.tensors, index)}"


@contextlib.contextmanager
def outline_version(
    pool: PoolReader, entry: VersionEntry, keep: Matcher | None = None
) -> Iterator[Outline]:
    """Yield a version, or the part with key paths to ``keep``, without the bytes of its tensors:
    they get address space that is never touched, and so takes no memory. All else, arrays too, is
    loaded and verified. The version is pinned inside.

    Raises as ``load``.
    """
    with pool.pin(entry.info.id) as current:
        opened = _open(pool, current, True)
        found = _VersionState(opened, "cpu")
        state = found.outline if keep is None else part_of(found.outline, keep)
        yield Outline(state, found.indices, opened.record, opened.tensors, opened.logged)


def contents_of(
    pool: PoolReader, entry: VersionEntry
) -> tuple[tuple[TensorSpec, ...], list[tuple[str, object]]]:
    """Return the plain tensors of a version of a shelf, or of tables, its arrays as their bytes;
    and all leaves, by key path, without a byte of a storage: see ``leaves_in``. Raises as
    ``load``."""
    with pool.pin(entry.info.id) as current:
        opened = _open(pool, current, True)
        return opened.tensors, opened.leaves


def verify(
    pool: PoolReader, entry: VersionEntry, advance: Callable[[int], None] | None = None
) -> int:
    """Read and check every byte of one version; return their number. ``advance`` receives bytes
    done.

    Raises as ``load``.
    """
    with pool.pin(entry.info.id) as current:
        opened = _open(pool, current, True)
        lengths = opened.record.length
        for batch in _batches(lengths):
            opened.check(batch)
            if advance is not None:
                advance(int(lengths[batch].sum()))
    return int(lengths.sum())


def restore_into(
    pool: PoolReader, entry: VersionEntry, state: object, options: RestoreOptions
) -> RestoreReport:
    """Copy one version over the tensors of ``state``, and set its other leaves.

    Raises ``UsageError`` listing tensors that are missing, unexpected or of another shape
    (``strict``; shapes always), for tensors that share memory and have different values in the
    version, for a table that is in another pool (``Elsewhere``), in the version or in ``state``,
    for a pattern that matches nothing, and as ``load``; then ``state`` is untouched.
    """
    with files_opened(pool, entry) as files:
        if len(files) > 1:
            raise UsageError(
                f"{describe(entry.info)} has several files, {sorted(files)!r:.200}, and is "
                "restored by the framework that saved it"
            )
        for file in files.values():
            restored = restore_torch(file, describe(entry.info), state, options)
            note_loaded(entry.info)
            return RestoreReport(entry.info, *restored)
    with pool.pin(entry.info.id) as current:
        opened = _open(pool, current, options.verify)
        restored = restore_over(_VersionState(opened, "meta"), state, options)
    note_loaded(current.info)
    return RestoreReport(current.info, *restored)


def load_files(
    files: Mapping[str, OpenFile],
    info: VersionInfo,
    names: Patterns,
    *,
    verify: bool = True,
    weights_only: bool | None = None,
    map_location: Any = "cpu",
) -> dict[str, object]:
    """Return the contents of the files of a version, by their names. Raises as ``load``."""
    settings: dict[str, object] = {"map_location": map_location}
    if weights_only is not None:
        settings["weights_only"] = weights_only
    found = {
        name: load_opened(file, describe(info), names, verify=verify, settings=dict(settings))
        for name, file in files.items()
    }
    note_loaded(info)
    return found


class _VersionState:
    """A version of a shelf or of tables, as a ``StoredState``."""

    def __init__(self, opened: _PinnedVersion, device: str) -> None:
        """device: of the memory for plain tensors; on "meta" they have none."""
        self._opened: Final = opened
        self.where: Final = opened.where
        found = (value for _, value in opened.leaves if isinstance(value, StoredArray))
        arrays = {each.storage for each in found if not isinstance(each.dtype, str)}
        plain = {spec.storage for spec in opened.tensors} - arrays
        blank = [
            torch.UntypedStorage(length, device=device if index in plain else "cpu")
            for index, length in enumerate(opened.lengths.tolist())
        ]
        self.indices: Final = {each._cdata: index for index, each in enumerate(blank)}
        rest = np.array([index for index in range(len(blank)) if index not in plain], np.int64)
        opened.fetch_into(rest, np.array([blank[each].data_ptr() for each in rest], np.int64))
        self.outline: Final = _assemble(opened, blank)
        self.contents: Final = StateContents(
            tuple(spec for spec in opened.tensors if spec.storage in plain),
            blank,
            [(path, value) for path, value in leaves(self.outline) if not is_plain(value)],
        )
        self.lengths: Final = opened.lengths

    def check(self, wanted: Column) -> None:
        self._opened.check(wanted)

    def fetch_into(self, wanted: Column, address: Column) -> None:
        self._opened.fetch_into(wanted, address)


def _assemble(opened: _PinnedVersion, storages: Sequence[torch.UntypedStorage | None]) -> object:
    """Return the state over ``storages``; a storage that is None has no memory, and is not used."""
    lengths = opened.lengths.tolist()
    every = [
        torch.UntypedStorage(length, device="meta") if each is None else each
        for each, length in zip(storages, lengths, strict=True)
    ]

    def make(array: StoredArray) -> object:
        storage = every[array.storage]
        if isinstance(array.dtype, str) or storage.device.type == "meta":
            return view_of(array.raw(array.name), storage)
        data = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        return array_over(array.dtype, array.sizes, data.numpy().data)

    with _naming(opened):
        if is_pickle(opened.contents):
            return unpickle(opened.contents, every)
        return shelf_items(opened.contents, lengths, make)


@contextlib.contextmanager
def _naming(opened: _PinnedVersion) -> Iterator[None]:
    """Put the version's name into errors."""
    try:
        yield
    except CorruptionError as error:
        raise CorruptionError(f"{opened.where}: {error}") from error
    except UsageError as error:
        raise UsageError(f"{opened.where}: {error}") from error


def _open(pool: PoolReader, entry: VersionEntry, verify: bool) -> _PinnedVersion:
    record = pool.record(entry)
    changed = read_log(pool.medium, record)
    contents = changed.contents or record.contents
    in_place = InPlaceReader(pool.medium, record, changed)
    return _PinnedVersion(pool, record, contents, verify, changed, in_place)


def _storages_of(opened: _PinnedVersion, keep: Matcher | None) -> Column:
    """Return the indices of the storages that the kept leaves need, and of those without a
    tensor."""
    count = len(opened.record.storages)
    if keep is None:
        return np.arange(count)
    dropped = {spec.storage for spec in opened.tensors if not keep(spec.name)}
    kept = {spec.storage for spec in opened.tensors if keep(spec.name)}
    return np.array([i for i in range(count) if i not in dropped or i in kept], np.int64)


def _units_in_place(opened: _PinnedVersion, index: int) -> Iterator[memoryview]:
    """Yield the units of a storage that is changed in place; they are verified in any case."""
    try:
        yield from opened.in_place.units(index)
    except CorruptionError as error:
        raise CorruptionError(f"{opened.name(index)}: {error}") from error


def _compare(opened: _PinnedVersion, wanted: Column, found: Digests, expected: Digests) -> None:
    bad = np.flatnonzero(np.any(found != expected, axis=1))
    if not len(bad) or not opened.verify:
        return
    lengths = opened.record.storages["length"][wanted].astype(np.int64)
    units = unit_counts(lengths)
    position = int(np.searchsorted(np.cumsum(units), bad[0], side="right"))
    offset = int(bad[0] - (np.cumsum(units) - units)[position]) * UNIT
    index = int(wanted[position])
    raise CorruptionError(
        f"{opened.name(index)} is damaged within 16 MiB from byte {offset} of its storage: "
        f"expected digest {expected[bad[0]].tobytes().hex()}, "
        f"found {found[bad[0]].tobytes().hex()}"
    )


def _batches(lengths: Column) -> list[Column]:
    """Return runs of storages of about 256 MiB."""
    if not len(lengths):
        return []
    part = (np.cumsum(lengths) - lengths) // (256 << 20)
    return np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(part)) + 1)


def _names(tensors: Sequence[TensorSpec], index: int) -> str:
    """Return the tensors that use a storage, as its name."""
    return " = ".join(spec.name for spec in tensors if spec.storage == index) or "an array"


def describe(info: VersionInfo) -> str:
    """Return the name of a version, for errors."""
    return f"model {info.model!r}, step {info.step} (version {info.id})"
