"""From a committed version back to tensors, verified (V4).

A load fills fresh memory, hashes what arrived there and compares; nothing unverified is handed
out. ``restore_into`` first verifies the pool's bytes, then copies them over the caller's tensors,
hashing again: if no version verifies, the tensors are untouched.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import numpy as np
import torch

from portus.client.merge import HOLE, Merge
from portus.client.state import flatten, unflatten
from portus.client.tree import decode, leaf_nodes, tensor_index
from portus.errors import CorruptionError, StaleError, UsageError
from portus.format.checksum import UNIT
from portus.format.layout import Kind
from portus.index.pool import PoolReader
from portus.index.records import VersionEntry, VersionRecord, decode_layout
from portus.pipeline.parts import shared, sources
from portus.pipeline.plan import Column
from portus.spec import TensorSpec, VersionInfo
from portus.transport.base import Digests, Stop, unit_counts
from portus.transport.local import check, fetch

_log: Final = logging.getLogger("portus")

Patterns = str | Sequence[str] | None
Rename = Mapping[str, str] | Callable[[str], str] | None

Result = TypeVar("Result")

_NEAR_MAX: Final = 5
_HEADS_MAX: Final = 2000
"""Key paths that an error names, and looks at, for one that is not there."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What ``restore_into`` did. ``missing``: tensors of the state that the version lacks, left as
    they were. ``unexpected``: tensors of the version that the state lacks."""

    version: VersionInfo
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Opened:
    """A pinned version with everything that was read of it but its bytes."""

    pool: PoolReader
    record: VersionRecord
    tensors: tuple[TensorSpec, ...]
    tree: bytes
    verify: bool


class _Matcher:
    """Whether a key path matches one of some shell patterns, or lies below what one matches."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns: Final = list(patterns)
        self._unmet: Final = set(patterns)
        self._seen: Final[dict[str, None]] = {}

    def __call__(self, name: str) -> bool:
        found = [
            pattern
            for pattern in self._patterns
            if fnmatch.fnmatchcase(name, pattern) or name.startswith(pattern + ".")
        ]
        self._unmet.difference_update(found)
        self._seen[name] = None
        return bool(found)

    def complain(self, info: VersionInfo) -> None:
        """Raise ``UsageError`` if a pattern matched nothing of what was asked about so far."""
        for pattern in self._patterns:
            if pattern in self._unmet:
                raise UsageError(
                    f"{_where(info)}: no key path matches {pattern!r}; {self._near(pattern)}"
                )

    def _near(self, pattern: str) -> str:
        """What may have been meant: paths, and what they lie below, as deep as the pattern."""
        stem = pattern.removesuffix(".*")
        depth = stem.count(".") + 1
        heads = list(dict.fromkeys(".".join(each.split(".")[:depth]) for each in self._seen))
        near = difflib.get_close_matches(stem, heads[:_HEADS_MAX], _NEAR_MAX)
        if near:
            return f"near it are {', '.join(near)}"
        tops = dict.fromkeys(each.split(".")[0] for each in self._seen)
        return f"paths begin with {', '.join(list(tops)[:_NEAR_MAX])}"


def matcher(names: Patterns) -> _Matcher | None:
    """For the patterns that a user gave; None for all."""
    if names is None:
        return None
    return _Matcher([names] if isinstance(names, str) else names)


def newest_first(
    found: Iterable[tuple[PoolReader, VersionEntry]],
    use: Callable[[PoolReader, VersionEntry], Result],
) -> Result:
    """``use`` of the newest version that verifies; older ones only with an error in the log (V4).
    found: some versions at least, newest last, each with its pool.

    Raises ``CorruptionError`` if none verifies, ``StaleError`` if all are gone meanwhile (ask
    again).
    """
    failure: CorruptionError | StaleError | None = None
    for pool, entry in reversed(list(found)):
        if failure is not None:
            _log.error(
                "%s: %s; FALLING BACK to step %d (commit %d)",
                pool.medium.info.name,
                failure,
                entry.info.step,
                entry.info.commit,
            )
        try:
            return use(pool, entry)
        except (CorruptionError, StaleError) as error:
            failure = failure if isinstance(failure, CorruptionError) else error
    assert failure is not None, "there was no version to load"
    raise failure


def load(
    pool: PoolReader, entry: VersionEntry, names: Patterns = None, *, verify: bool = True
) -> object:
    """The state of one version, on the CPU, in memory of its own; or the part that matches.

    verify: False hands bytes out without comparing their checksums.

    Raises ``CorruptionError`` naming model, step, tensor and offset, ``StaleError`` if it was
    retired meanwhile, ``MediumError``; ``UsageError`` for a pattern that matches nothing.
    """
    keep = matcher(names)
    state = _load(pool, entry, keep, verify)
    if keep is not None:
        keep.complain(entry.info)
    return state


@dataclass(frozen=True, slots=True)
class Outline:
    """A state whose tensors have memory that holds nothing. ``indices``: of storages of the
    version, by the address (``_cdata``) of the storage of a tensor."""

    state: object
    indices: Mapping[int, int]
    record: VersionRecord
    tensors: tuple[TensorSpec, ...]

    def name(self, index: int) -> str:
        """What errors call a storage."""
        return f"{_where(self.record.info)}: {_names(self.tensors, index)}"


@contextlib.contextmanager
def outlined(
    pool: PoolReader,
    entry: VersionEntry,
    part: str | None = None,
    keep: Callable[[str], bool] | None = None,
    *,
    device: Literal["cpu", "meta"] = "cpu",
) -> Iterator[Outline]:
    """A version, or the value of its key ``part``, or what has key paths to ``keep``, without the
    bytes of its tensors: memory is set aside for them, which nobody touches and so nobody has. All
    else, arrays too, is loaded and verified. The version is pinned inside.

    Raises as ``load_part``.
    """
    wanted = _within(part) if keep is None else keep
    with pool.pinned(entry.info.id) as current:
        opened = _open(pool, current, True)
        lengths = opened.record.storages["length"]
        needed = _storages_of(opened, wanted)
        read = np.intersect1d(needed, _of_arrays(opened))
        storages = _fetch(opened, read)
        for index in np.setdiff1d(needed, read).tolist():
            storages[index] = torch.UntypedStorage(int(lengths[index]), device=device)
        state = _part(_assembled(opened, storages, wanted), current.info, part)
        places = {each._cdata: index for index, each in enumerate(storages) if each is not None}
        yield Outline(state, places, opened.record, opened.tensors)


def load_on_meta(pool: PoolReader, entry: VersionEntry, part: str | None = None) -> object:
    """As ``load_part``, with tensors on the device "meta": their bytes are not read."""
    with outlined(pool, entry, part, device="meta") as outline:
        return outline.state


def load_where(pool: PoolReader, entry: VersionEntry, keep: Callable[[str], bool]) -> object:
    """The part of a version at the key paths to ``keep``. Raises as ``load``."""
    return _load(pool, entry, keep, True)


def check_where(pool: PoolReader, entry: VersionEntry, keep: Callable[[str], bool]) -> None:
    """Read and check the bytes that ``load_where`` would hand out. Raises as ``load``."""
    with pool.pinned(entry.info.id) as current:
        opened = _open(pool, current, True)
        _check(opened, _storages_of(opened, keep))


def load_part(
    pool: PoolReader, entry: VersionEntry, part: str | None, *, verify: bool = True
) -> object:
    """The value that the state, a dict, has for the key ``part``, and no more is read of it; all
    of the state for None.

    Raises as ``load``, and ``CorruptionError`` if there is no such key.
    """
    return _part(_load(pool, entry, _within(part), verify), entry.info, part)


def verify(
    pool: PoolReader, entry: VersionEntry, advanced: Callable[[int], None] | None = None
) -> int:
    """Read and check every byte of one version; how many. ``advanced`` is told bytes done.

    Raises as ``load``.
    """
    with pool.pinned(entry.info.id) as current:
        opened = _open(pool, current, True)
        lengths = opened.record.storages["length"].astype(np.int64)
        for batch in _batches(lengths):
            _check(opened, batch)
            if advanced is not None:
                advanced(int(lengths[batch].sum()))
    return int(lengths.sum())


def restore_into(
    pool: PoolReader,
    entry: VersionEntry,
    state: object,
    *,
    strict: bool,
    names: Patterns,
    rename: Rename,
    verify: bool = True,
) -> Restored:
    """Copy one version over the tensors of ``state``, and set its other leaves.

    Raises ``UsageError`` listing what is missing, unexpected or of another shape (``strict``;
    shapes always), for a pattern that matches nothing, and as ``load``; then ``state`` is
    untouched.
    """
    with pool.pinned(entry.info.id) as current:
        opened = _open(pool, current, verify)
        keep = matcher(names)
        pairs = _Pairs(opened, state, keep, rename)
        pairs.complain(strict)
        wanted = np.unique(np.array([spec.storage for spec, _ in pairs.found], np.int64))
        _check(opened, wanted[wanted >= 0])
        leaves = _leaves(opened, pairs.arrays, keep)
        if keep is not None:
            keep.complain(current.info)
        _fill(opened, pairs.found)
    Merge(complete=strict and keep is None and rename is None).merged(state, leaves)
    return Restored(current.info, tuple(pairs.missing), tuple(pairs.unexpected))


class _Pairs:
    """Which tensor of a version goes over which tensor of a state."""

    def __init__(
        self, opened: _Opened, state: object, keep: Callable[[str], bool] | None, rename: Rename
    ) -> None:
        flat = flatten(state)
        targets = {spec.name: spec for spec in flat.tensors}
        self.found: list[tuple[TensorSpec, torch.Tensor]] = []
        self.unexpected: list[str] = []
        self.arrays: set[str] = set()
        """Leaves that are arrays or bytes in the state: set anew, not copied over."""
        self._misshapen: list[str] = []
        seen = set()
        for spec in opened.tensors:
            if keep is not None and not keep(spec.name):
                continue
            name = _renamed(spec.name, rename)
            target = targets.get(name)
            if target is None or target.storage < 0 or spec.storage < 0:
                self.unexpected.append(name)
                continue
            seen.add(name)
            if target.storage in flat.owned:
                self.arrays.add(spec.name)
                continue
            if target.shape != spec.shape:
                self._misshapen.append(
                    f"size mismatch for {name}: the version has {list(spec.shape)}, the state "
                    f"{list(target.shape)}"
                )
            elif not _repeated(target) <= _repeated(spec):
                self._misshapen.append(
                    f"{name} is expanded in the state: several of its elements are one place in "
                    "memory, and the version has a value for each; restore into what it was "
                    "expanded from, or into a contiguous() copy"
                )
            self.found.append((spec, _shown(target, flat.storages[target.storage])))
        self.missing = [
            name for name in targets if name not in seen and (keep is None or keep(name))
        ]
        self._where = _where(opened.record.info)

    def complain(self, strict: bool) -> None:
        """Raise ``UsageError`` if they do not fit."""
        lines = list(self._misshapen)
        if strict and self.missing:
            lines.append(f"missing in the version: {', '.join(self.missing)}")
        if strict and self.unexpected:
            lines.append(f"unexpected, not in the state: {', '.join(self.unexpected)}")
        if lines:
            raise UsageError(
                f"{self._where} does not fit the state, which is untouched: " + "; ".join(lines)
            )


def view_of(spec: TensorSpec, storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor that looks at ``storage`` as ``spec`` says; no copy, no gradient."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    blank = torch.empty(0, dtype=dtype, device=storage.device)
    return blank.set_(storage, spec.offset, spec.shape, spec.strides)


def _shown(spec: TensorSpec, storage: torch.UntypedStorage) -> torch.Tensor:
    """The same, with lazy bits: what is copied to it reads back as it was."""
    tensor = view_of(spec, storage)
    tensor = tensor.conj() if spec.conjugate else tensor
    return torch._neg_view(tensor) if spec.negative else tensor


def _repeated(spec: TensorSpec) -> set[int]:
    """Dimensions along which all elements are one place in memory."""
    rows = enumerate(zip(spec.shape, spec.strides, strict=True))
    return {index for index, (size, stride) in rows if size > 1 and stride == 0}


def _load(
    pool: PoolReader, entry: VersionEntry, keep: Callable[[str], bool] | None, verify: bool
) -> object:
    with pool.pinned(entry.info.id) as current:
        opened = _open(pool, current, verify)
        return _assembled(opened, _fetch(opened, _storages_of(opened, keep)), keep)


def _assembled(
    opened: _Opened,
    storages: list[torch.UntypedStorage | None],
    keep: Callable[[str], bool] | None,
) -> object:
    try:
        return unflatten(opened.tree, opened.tensors, storages, keep)
    except CorruptionError as error:
        raise CorruptionError(f"{_where(opened.record.info)}: {error}") from error


def _within(part: str | None) -> Callable[[str], bool] | None:
    """Which key paths are of the part; None if all are."""
    if part is None:
        return None
    return lambda path: path == part or path.startswith(f"{part}.")


def _part(state: object, info: VersionInfo, part: str | None) -> object:
    if part is None:
        return state
    if not isinstance(state, dict) or part not in state:
        raise CorruptionError(f"{_where(info)}: its state has no part {part!r}")
    return state[part]


def _of_arrays(opened: _Opened) -> Column:
    """Indices of the storages that hold arrays and bytes, which are read when they are made."""
    indices = [
        tensor_index(node)
        for _, node in leaf_nodes(decode(opened.tree))
        if isinstance(node, dict) and "$tensor" not in node
    ]
    count = len(opened.tensors)
    found = {opened.tensors[each].storage for each in indices if each is not None and each < count}
    return np.array(sorted(found), np.int64)


def _open(pool: PoolReader, entry: VersionEntry, verify: bool) -> _Opened:
    record = pool.record(entry)
    tensors = decode_layout(pool.payload(record.layout, Kind.LAYOUT))
    tree = bytes(pool.payload(record.tree, Kind.TREE))
    return _Opened(pool, record, tensors, tree, verify)


def _storages_of(opened: _Opened, keep: Callable[[str], bool] | None) -> Column:
    """Indices of the storages that the kept leaves need. Those no tensor names belong to arrays
    and bytes of the tree, and are always needed."""
    count = len(opened.record.storages)
    if keep is None:
        return np.arange(count)
    dropped = {spec.storage for spec in opened.tensors if not keep(spec.name)}
    kept = {spec.storage for spec in opened.tensors if keep(spec.name)}
    return np.array([i for i in range(count) if i not in dropped or i in kept], np.int64)


def _fetch(opened: _Opened, wanted: Column) -> list[torch.UntypedStorage | None]:
    """Fresh storages with the verified bytes of ``wanted``; None for the rest."""
    record = opened.record
    storages: list[torch.UntypedStorage | None] = [None] * len(record.storages)
    lengths = record.storages["length"][wanted].astype(np.int64)
    address = np.zeros(len(wanted), np.int64)
    for position, (index, length) in enumerate(zip(wanted.tolist(), lengths.tolist(), strict=True)):
        storage = torch.empty(length, dtype=torch.uint8).untyped_storage()
        storages[index] = storage
        address[position] = storage.data_ptr()
    _fetch_into(opened, wanted, address)
    return storages


def _fetch_into(opened: _Opened, wanted: Column, address: Column) -> None:
    group = shared(opened.record, wanted)
    lengths = opened.record.storages["length"][wanted].astype(np.int64)
    found = fetch(opened.pool.medium, sources(address, lengths, group.extents), Stop())
    _compare(opened, wanted, found, group.digests)


def _check(opened: _Opened, wanted: Column) -> None:
    """Raise ``CorruptionError`` unless the pool holds the bytes that were saved."""
    if not opened.verify:
        return
    group = shared(opened.record, wanted)
    lengths = opened.record.storages["length"][wanted].astype(np.int64)
    nowhere = np.ones(len(wanted), np.int64)  # addresses are not looked at
    found = check(opened.pool.medium, sources(nowhere, lengths, group.extents), Stop())
    _compare(opened, wanted, found, group.digests)


def _compare(opened: _Opened, wanted: Column, found: Digests, expected: Digests) -> None:
    bad = np.flatnonzero(np.any(found != expected, axis=1))
    if not len(bad) or not opened.verify:
        return
    lengths = opened.record.storages["length"][wanted].astype(np.int64)
    units = unit_counts(lengths)
    position = int(np.searchsorted(np.cumsum(units), bad[0], side="right"))
    offset = int(bad[0] - (np.cumsum(units) - units)[position]) * UNIT
    index = int(wanted[position])
    raise CorruptionError(
        f"{_where(opened.record.info)}: {_names(opened.tensors, index)} is damaged within 16 MiB "
        f"from byte {offset} of its storage: expected digest {expected[bad[0]].tobytes().hex()}, "
        f"found {found[bad[0]].tobytes().hex()}"
    )


def _fill(opened: _Opened, pairs: list[tuple[TensorSpec, torch.Tensor]]) -> None:
    """Copy storages over tensors: straight where one tensor is the whole storage."""
    by_storage: dict[int, list[tuple[TensorSpec, torch.Tensor]]] = {}
    for spec, target in pairs:
        by_storage.setdefault(spec.storage, []).append((spec, target))
    lengths = opened.record.storages["length"]
    direct = {
        index: users[0][1].data_ptr()
        for index, users in by_storage.items()
        if all(_is_whole(spec, target, int(lengths[index])) for spec, target in users)
        and len({target.data_ptr() for _, target in users}) == 1
    }
    _fetch_into(opened, np.array(list(direct), np.int64), np.array(list(direct.values()), np.int64))
    for index, users in by_storage.items():
        if index not in direct:
            storage = _fetch(opened, np.array([index], np.int64))[index]
            assert storage is not None
            for spec, target in users:
                source = resolved(spec, view_of(spec, storage))
                for dim, stride in enumerate(target.stride()):
                    if stride == 0 and target.shape[dim]:
                        source, target = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
                target.copy_(source)


def resolved(spec: TensorSpec, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with the conjugate and negative bits of ``spec`` carried out."""
    tensor = tensor.conj().resolve_conj() if spec.conjugate else tensor
    return -tensor if spec.negative else tensor


def _is_whole(spec: TensorSpec, target: torch.Tensor, length: int) -> bool:
    """True if ``target`` is a plain block of memory with just the bytes of the storage."""
    return (
        target.device.type == "cpu"
        and str(target.dtype) == f"torch.{spec.dtype}"
        and target.nbytes == length
        and tuple(target.stride()) == spec.strides
        and target.is_contiguous()
        and not (spec.conjugate or spec.negative or target.is_conj() or target.is_neg())
    )


def _leaves(opened: _Opened, arrays: set[str], keep: Callable[[str], bool] | None) -> object:
    """The part of a version that is no tensor."""
    tensors = {spec.name for spec in opened.tensors} - arrays
    needed = sorted({spec.storage for spec in opened.tensors if spec.name in arrays})
    return unflatten(
        opened.tree,
        opened.tensors,
        _fetch(opened, np.array(needed, np.int64)),
        lambda name: name not in tensors and (keep is None or keep(name)),
        HOLE,
    )


def _batches(lengths: Column) -> list[Column]:
    """Runs of storages of about 256 MiB."""
    if not len(lengths):
        return []
    part = (np.cumsum(lengths) - lengths) // (256 << 20)
    return np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(part)) + 1)


def _renamed(name: str, rename: Rename) -> str:
    if rename is None:
        return name
    return rename(name) if callable(rename) else rename.get(name, name)


def _names(tensors: Sequence[TensorSpec], index: int) -> str:
    """What a storage is called: the tensors that use it."""
    return " = ".join(spec.name for spec in tensors if spec.storage == index) or "an array"


def _where(info: VersionInfo) -> str:
    return f"model {info.model!r}, step {info.step} (version {info.id})"
