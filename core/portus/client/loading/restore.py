"""From a committed version back to tensors, verified (V4).

A load fills fresh memory, hashes what arrived there and compares; nothing unverified is handed
out. ``restore_into`` first verifies the pool's bytes, then copies them over the caller's tensors,
hashing again: if no version verifies, the tensors are untouched. So do loads of shards, by
``check_where`` and ``fill_where``.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import numpy as np
import torch
from torch.autograd.graph import increment_version

from portus.client.loading.loaded import note_loaded
from portus.client.loading.overlap import contradiction, copy_over, overlapping
from portus.client.state.codecs import codec_named
from portus.client.state.elsewhere import by_place, places_in
from portus.client.state.merge import HOLE, Merge
from portus.client.state.state import flatten, unflatten
from portus.client.state.tensors import DTYPES
from portus.client.state.tree import (
    decode,
    leaf_nodes,
    object_paths,
    objects,
    said_at,
    tensor_index,
)
from portus.errors import CorruptionError, StaleError, UsageError
from portus.format.checksum import UNIT, unit_counts
from portus.format.layout import RecordKind
from portus.index.in_place import InPlace
from portus.index.log import NOT_LOGGED, Logged, logged
from portus.index.reader import PoolReader
from portus.index.records import VersionEntry, VersionRecord, decode_layout
from portus.pipeline.parts import shared, sources
from portus.pipeline.plan import Column
from portus.spec import TensorSpec, VersionInfo
from portus.transport.base import Digests, Stop, memory
from portus.transport.local import check, fetch

_log: Final = logging.getLogger("portus")

Patterns = str | Sequence[str] | None
Rename = Mapping[str, str] | Callable[[str], str] | None

Result = TypeVar("Result")

_INTEGERS: Final = frozenset(
    DTYPES[f"{sign}int{bits}"] for sign in ("", "u") for bits in (8, 16, 32, 64)
)

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
    logged: Logged
    in_place: InPlace


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

    def complain(self, where: str) -> None:
        """Raise ``UsageError`` if a pattern matched nothing of what was asked about so far."""
        for pattern in self._patterns:
            if pattern in self._unmet:
                raise UsageError(f"{where}: no key path matches {pattern!r}; {self._near(pattern)}")

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
    """For the patterns that a user gave; None for all. Raises ``UsageError`` for what is none."""
    if names is None:
        return None
    given: Any = names
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    patterns = [given] if is_one else list(given)
    if not all(isinstance(each, str) for each in patterns):
        raise UsageError(f"names: expected a pattern, or a list of patterns, found {names!r:.80}")
    return _Matcher(patterns)


def newest_first(
    found: Iterable[tuple[PoolReader, VersionEntry]],
    use: Callable[[PoolReader, VersionEntry], Result],
    elsewhere: Callable[[VersionEntry, CorruptionError], Result] | None = None,
) -> Result:
    """``use`` of the newest version that verifies; older ones only with an error in the log (V4).
    found: some versions at least, newest last, each with its pool. elsewhere: gives what ``use``
    does of another copy of a version that is damaged here, or raises ``CorruptionError``.

    Raises ``CorruptionError`` if none verifies, ``StaleError`` if all are gone meanwhile (ask
    again).
    """
    failure: CorruptionError | StaleError | None = None
    for pool, entry in reversed(list(found)):
        if failure is not None:
            info = entry.info
            say_fallen_back(pool.medium.info.name, failure, info.step, info.commit)
        try:
            return _sound(pool, entry, use, elsewhere)
        except (CorruptionError, StaleError) as error:
            failure = failure if isinstance(failure, CorruptionError) else error
    assert failure is not None, "there was no version to load"
    raise failure


def _sound(
    pool: PoolReader,
    entry: VersionEntry,
    use: Callable[[PoolReader, VersionEntry], Result],
    elsewhere: Callable[[VersionEntry, CorruptionError], Result] | None,
) -> Result:
    try:
        return use(pool, entry)
    except CorruptionError as error:
        if elsewhere is None:
            raise
        return elsewhere(entry, error)


def say_fallen_back(name: str, failure: Exception, step: int, commit: int) -> None:
    """Say loudly that an older version is taken. name: of the pool, or the mirror."""
    _log.error("%s: %s; FALLING BACK to step %d (commit %d)", name, failure, step, commit)


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
        keep.complain(named(entry.info))
    note_loaded(entry.info)
    return state


def load_over(
    pool: PoolReader, entry: VersionEntry, there: Mapping[int, torch.UntypedStorage]
) -> object:
    """The state of one version, of which some storages, by their indices, are the memory ``there``:
    the pool's own, which is read and verified, and not filled. Raises as ``load``."""
    with pool.pinned(entry.info.id) as current:
        opened = _open(pool, current, True)
        _check_codecs(opened, None)
        given = np.array(sorted(there), np.int64)
        _check(opened, given)
        storages = _fetch(opened, np.setdiff1d(_storages_of(opened, None), given))
        for index, storage in there.items():
            storages[index] = storage
        return _assembled(opened, storages, None, stand_ins=False)


@dataclass(frozen=True, slots=True)
class Outline:
    """A state whose tensors have memory that holds nothing. ``indices``: of storages of the
    version, by the address (``_cdata``) of the storage of a tensor."""

    state: object
    indices: Mapping[int, int]
    record: VersionRecord
    tensors: tuple[TensorSpec, ...]
    logged: Logged = NOT_LOGGED

    def name(self, index: int) -> str:
        """What errors call a storage."""
        return f"{named(self.record.info)}: {_names(self.tensors, index)}"


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
    else, arrays too, is loaded and verified. Of objects of codecs there are stand-ins. The version
    is pinned inside.

    Raises as ``load_part``.
    """
    wanted = _within(part) if keep is None else keep
    with pool.pinned(entry.info.id) as current:
        opened = _open(pool, current, True)
        wanted = wanted and by_place(opened.tree, wanted)
        lengths = opened.record.storages["length"]
        needed = _storages_of(opened, wanted)
        read = np.intersect1d(needed, _of_arrays(opened))
        storages = _fetch(opened, read)
        for index in np.setdiff1d(needed, read).tolist():
            storages[index] = torch.UntypedStorage(int(lengths[index]), device=device)
        state = _assembled(opened, storages, wanted, stand_ins=True)
        state = _part(state, current.info, part)
        places = {each._cdata: index for index, each in enumerate(storages) if each is not None}
        yield Outline(state, places, opened.record, opened.tensors, opened.logged)


def load_on_meta(pool: PoolReader, entry: VersionEntry, part: str | None = None) -> object:
    """As ``load_part``, with tensors on the device "meta": their bytes are not read."""
    with outlined(pool, entry, part, device="meta") as outline:
        return outline.state


def load_where(
    pool: PoolReader,
    entry: VersionEntry,
    keep: Callable[[str], bool],
    *,
    stand_ins: bool = False,
) -> object:
    """The part of a version at the key paths to ``keep``. stand_ins: in the place of objects of
    codecs. Raises as ``load``."""
    return _load(pool, entry, keep, True, stand_ins=stand_ins)


def fill_where(
    pool: PoolReader, entry: VersionEntry, targets: Mapping[str, torch.Tensor]
) -> set[str]:
    """Copy tensors of a version, by key path, straight over those of ``targets`` that are plain
    blocks of memory for just their bytes; which these were. After ``check_where``: what is copied
    is hashed again where it arrived.

    All else is left alone: what would have to be converted or spread out, and what overlaps
    another target. Raises as ``load``; then targets hold anything.
    """
    with pool.pinned(entry.info.id) as current:
        opened = _open(pool, current, True)
        pairs = [
            (spec, targets[spec.name])
            for spec in opened.tensors
            if spec.storage >= 0 and spec.name in targets
        ]
        filled = _fill_blocks(opened, _by_storage(pairs))
    names = {spec.name for spec, _ in pairs if spec.storage in filled}
    increment_version([targets[name] for name in names])  # autograd did not see it
    return names


def check_where(
    pool: PoolReader, entry: VersionEntry, keep: Callable[[str], bool], kept_max: int = 0
) -> object | None:
    """Read and check the bytes that ``load_where`` would hand out, and that there are codecs for
    its objects; hand them out if they are ``kept_max`` at most, else None. Raises as ``load``."""
    with pool.pinned(entry.info.id) as current:
        opened = _open(pool, current, True)
        _check_codecs(opened, keep)
        wanted = _storages_of(opened, keep)
        if int(opened.record.storages["length"][wanted].sum()) <= kept_max:
            return _assembled(opened, _fetch(opened, wanted), keep, stand_ins=False)
        _check(opened, wanted)
        return None


def load_part(
    pool: PoolReader, entry: VersionEntry, part: str | None, *, verify: bool = True
) -> object:
    """The value that the state, a dict, has for the key ``part``, and no more is read of it; all
    of the state for None.

    Raises as ``load``, and ``CorruptionError`` if there is no such key.
    """
    state = _part(_load(pool, entry, _within(part), verify), entry.info, part)
    note_loaded(entry.info)
    return state


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
    shapes always), for tensors that share memory and have different values in the version, for a
    table that is in another pool (``Elsewhere``), in the version or in ``state``, for a pattern
    that matches nothing, and as ``load``; then ``state`` is untouched.
    """
    asked = matcher(names)
    keep: Callable[[str], bool] | None = asked
    complete = strict and keep is None and rename is None
    with pool.pinned(entry.info.id) as current:
        opened = _open(pool, current, verify)
        keep = keep and by_place(opened.tree, keep)
        pairs = _Pairs(opened, state, keep, rename)
        pairs.refuse_elsewhere(keep, rename)
        pairs.complain(strict)
        apart = frozenset() if complete else pairs.apart
        _check_codecs(opened, lambda name: name not in apart and (keep is None or keep(name)))
        wanted = np.unique(np.array([spec.storage for spec, _ in pairs.found], np.int64))
        _check(opened, wanted[wanted >= 0])
        leaves = _leaves(opened, pairs.arrays, apart, keep)
        if asked is not None:
            asked.complain(named(current.info))
        _check_shared(opened, pairs.found)
        _fill(opened, pairs.found)
    Merge(complete=complete).merged(state, leaves)
    note_loaded(current.info)
    return Restored(current.info, tuple(pairs.missing), tuple(pairs.unexpected))


def _check_shared(opened: _Opened, pairs: list[tuple[TensorSpec, torch.Tensor]]) -> None:
    """Raise ``UsageError`` if one place in memory would have to hold different values."""

    def values_of(spec: TensorSpec) -> torch.Tensor:
        storage = _fetch(opened, np.array([spec.storage], np.int64))[spec.storage]
        assert storage is not None
        return resolved(spec, view_of(spec, storage))

    if found := contradiction(pairs, values_of):
        one, other = found
        what = f"{one} and {other} share" if one != other else f"elements of {one} share"
        raise UsageError(
            f"{named(opened.record.info)} does not fit the state, which is untouched: {what} "
            "memory in the state, and the version has different values for them; restore into "
            "tensors of their own, such as clone() makes, and tie them afterwards"
        )


class _Pairs:
    """Which tensor of a version goes over which tensor of a state."""

    def __init__(
        self, opened: _Opened, state: object, keep: Callable[[str], bool] | None, rename: Rename
    ) -> None:
        flat = flatten(state)
        saved, here = object_paths(opened.tree), object_paths(flat.tree)
        both = {*saved.values()} & {*here.values()}
        targets = {spec.name: spec for spec in flat.tensors if spec.name not in here}
        self.found: list[tuple[TensorSpec, torch.Tensor]] = []
        self.unexpected: list[str] = []
        self.arrays: set[str] = set()
        """Leaves that are arrays or bytes in the state, or in an object of a codec: set anew, not
        copied over."""
        self.apart: Final = frozenset(path for path in saved if saved[path] not in both)
        """Leaves in objects that the state has not."""
        self._misshapen: list[str] = []
        self._elsewhere: Final = places_in(opened.tree), places_in(flat.tree)
        seen = set()
        for spec in opened.tensors:
            if keep is not None and not keep(spec.name):
                continue
            if saved.get(spec.name) in both:
                self.arrays.add(spec.name)
                continue
            name = _renamed(spec.name, rename)
            target = targets.get(name) if spec.name not in saved else None
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
            elif not _takes(target.dtype, spec.dtype):
                self._misshapen.append(
                    f"dtype mismatch for {name}: the version has {spec.dtype}, of which the "
                    f"state's {target.dtype} would keep a part; restore into {spec.dtype}, and "
                    "convert that"
                )
            elif not _repeated(target) <= _repeated(spec):
                self._misshapen.append(
                    f"{name} is expanded in the state: several of its elements are one place in "
                    "memory, and the version has a value for each; restore into what it was "
                    "expanded from, or into a contiguous() copy"
                )
            self.found.append((spec, _shown(target, flat.storages[target.storage])))
        names = [spec.name for spec in flat.tensors if here.get(spec.name) not in both]
        self.missing = [name for name in names if name not in seen and (keep is None or keep(name))]
        self._where = named(opened.record.info)

    def refuse_elsewhere(self, keep: Callable[[str], bool] | None, rename: Rename) -> None:
        """Raise ``UsageError`` if what is asked for, or its place in the state, is a table in
        another pool: it would stay as it is, beside what is copied."""
        saved, here = self._elsewhere
        into = {*self.unexpected, *(_renamed(spec.name, rename) for spec, _ in self.found)}
        found = [
            *((path, place) for path, place in saved.items() if keep is None or keep(path)),
            *(
                (f"{path} in the state", place)
                for path, place in here.items()
                if path in into or keep is None or keep(path)
            ),
        ]
        if found:
            path, place = found[0]
            raise UsageError(
                f"{self._where} was not restored, and the state is untouched: {path} is a "
                f"protected table, which is in {place.pool}, and would stay as it is now; `load` "
                "the version instead, and pass its parts to `load_state_dict` of the model and "
                "the optimizers, or leave the tables out with names="
            )

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


def _takes(target: str, saved: str) -> bool:
    """True if a tensor of dtype ``target`` may be filled with values of ``saved``, rounded at most:
    no fraction, imaginary part, or high byte is dropped."""
    if target == saved or saved not in DTYPES:
        return True
    ours, theirs = DTYPES[target], DTYPES[saved]
    if ours in _INTEGERS and theirs in _INTEGERS:
        at_most, needed = torch.iinfo(ours), torch.iinfo(theirs)
        return at_most.min <= needed.min and needed.max <= at_most.max
    return torch.can_cast(theirs, ours)


def _repeated(spec: TensorSpec) -> set[int]:
    """Dimensions along which all elements are one place in memory."""
    rows = enumerate(zip(spec.shape, spec.strides, strict=True))
    return {index for index, (size, stride) in rows if size > 1 and stride == 0}


def _load(
    pool: PoolReader,
    entry: VersionEntry,
    keep: Callable[[str], bool] | None,
    verify: bool,
    *,
    stand_ins: bool = False,
) -> object:
    with pool.pinned(entry.info.id) as current:
        opened = _open(pool, current, verify)
        keep = keep and by_place(opened.tree, keep)
        if not stand_ins:
            _check_codecs(opened, keep)
        storages = _fetch(opened, _storages_of(opened, keep))
        return _assembled(opened, storages, keep, stand_ins=stand_ins)


def _assembled(
    opened: _Opened,
    storages: list[torch.UntypedStorage | None],
    keep: Callable[[str], bool] | None,
    *,
    stand_ins: bool,
) -> object:
    try:
        return unflatten(opened.tree, opened.tensors, storages, keep, stand_ins=stand_ins)
    except CorruptionError as error:
        raise CorruptionError(f"{named(opened.record.info)}: {error}") from error


def _within(part: str | None) -> Callable[[str], bool] | None:
    """Which key paths are of the part; None if all are."""
    if part is None:
        return None
    return lambda path: path == part or path.startswith(f"{part}.")


def _part(state: object, info: VersionInfo, part: str | None) -> object:
    if part is None:
        return state
    if not isinstance(state, dict) or part not in state:
        raise CorruptionError(f"{named(info)}: its state has no part {part!r}")
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
    tensors = decode_layout(pool.payload(record.layout, RecordKind.LAYOUT))
    changed = logged(pool.medium, record)
    tree = changed.tree or bytes(pool.payload(record.tree, RecordKind.TREE))
    in_place = InPlace(pool.medium, record, changed)
    return _Opened(pool, record, tensors, tree, verify, changed, in_place)


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
        storage = torch.empty(length, dtype=torch.uint8, device="cpu").untyped_storage()
        storages[index] = storage
        address[position] = storage.data_ptr()
    _fetch_into(opened, wanted, address)
    return storages


def _fetch_into(opened: _Opened, wanted: Column, address: Column) -> None:
    placed = np.isin(wanted, opened.in_place.storages)
    for index, start in zip(wanted[placed].tolist(), address[placed].tolist(), strict=True):
        for piece in _units_in_place(opened, index):
            memory(start, len(piece))[:] = piece
            start += len(piece)
    wanted, address = wanted[~placed], address[~placed]
    group = shared(opened.record, wanted)
    lengths = opened.record.storages["length"][wanted].astype(np.int64)
    found = fetch(opened.pool.medium, sources(address, lengths, group.extents), Stop())
    _compare(opened, wanted, found, group.digests)
    if opened.logged.changes:
        columns = (wanted, address, lengths)
        for index, start, length in zip(*(each.tolist() for each in columns), strict=True):
            opened.logged.over(index, 0, memory(start, length))


def _check(opened: _Opened, wanted: Column) -> None:
    """Raise ``CorruptionError`` unless the pool holds the bytes that were saved."""
    if not opened.verify:
        return
    placed = np.isin(wanted, opened.in_place.storages)
    for index in wanted[placed].tolist():
        for _ in _units_in_place(opened, index):
            pass
    wanted = wanted[~placed]
    group = shared(opened.record, wanted)
    lengths = opened.record.storages["length"][wanted].astype(np.int64)
    nowhere = np.ones(len(wanted), np.int64)  # addresses are not looked at
    found = check(opened.pool.medium, sources(nowhere, lengths, group.extents), Stop())
    _compare(opened, wanted, found, group.digests)


def _units_in_place(opened: _Opened, index: int) -> Iterator[memoryview]:
    """The units of a storage that is changed in place; they are verified in any case."""
    try:
        yield from opened.in_place.units(index)
    except CorruptionError as error:
        where = f"{named(opened.record.info)}: {_names(opened.tensors, index)}"
        raise CorruptionError(f"{where}: {error}") from error


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
        f"{named(opened.record.info)}: {_names(opened.tensors, index)} is damaged within 16 MiB "
        f"from byte {offset} of its storage: expected digest {expected[bad[0]].tobytes().hex()}, "
        f"found {found[bad[0]].tobytes().hex()}"
    )


def _fill(opened: _Opened, pairs: list[tuple[TensorSpec, torch.Tensor]]) -> None:
    """Copy storages over tensors: straight where one tensor is the whole storage."""
    by_storage = _by_storage(pairs)
    filled = _fill_blocks(opened, by_storage)
    for index, users in by_storage.items():
        if index not in filled:
            storage = _fetch(opened, np.array([index], np.int64))[index]
            assert storage is not None
            for spec, target in users:
                copy_over(target, resolved(spec, view_of(spec, storage)))


def _fill_blocks(opened: _Opened, by_storage: _Users) -> set[int]:
    """Fetch straight to where they go the storages whose every tensor is the whole of it, at one
    place that is no other's; which these were."""
    lengths = opened.record.storages["length"]
    blocks = {
        index: users[0][1]
        for index, users in by_storage.items()
        if all(_is_whole(spec, target, int(lengths[index])) for spec, target in users)
        and len({target.data_ptr() for _, target in users}) == 1
    }
    wanted = np.array(list(blocks), np.int64)
    address = np.array([target.data_ptr() for target in blocks.values()], np.int64)
    alone = ~overlapping(address, lengths[wanted].astype(np.int64))
    _fetch_into(opened, wanted[alone], address[alone])
    return set(wanted[alone].tolist())


_Users = dict[int, list[tuple[TensorSpec, torch.Tensor]]]
"""The tensors of each storage, by its index."""


def _by_storage(pairs: list[tuple[TensorSpec, torch.Tensor]]) -> _Users:
    found: _Users = {}
    for spec, target in pairs:
        found.setdefault(spec.storage, []).append((spec, target))
    return found


def resolved(spec: TensorSpec, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with the conjugate and negative bits of ``spec`` carried out."""
    tensor = tensor.conj().resolve_conj() if spec.conjugate else tensor
    return -tensor if spec.negative else tensor


def _is_whole(spec: TensorSpec, target: torch.Tensor, length: int) -> bool:
    """True if ``target`` is a plain block of memory with just the bytes of the storage. Of another
    class than torch's own, memory may be elsewhere."""
    return (
        type(target) is torch.Tensor
        and target.device.type == "cpu"
        and target.layout is torch.strided
        and str(target.dtype) == f"torch.{spec.dtype}"
        and target.nbytes == length
        and tuple(target.stride()) == spec.strides
        and target.is_contiguous()
        and not (spec.conjugate or spec.negative or target.is_conj() or target.is_neg())
    )


def _leaves(
    opened: _Opened,
    arrays: set[str],
    apart: frozenset[str],
    keep: Callable[[str], bool] | None,
) -> object:
    """The part of a version that is no tensor, but for what is ``apart``."""
    left = {spec.name for spec in opened.tensors} - arrays | apart
    needed = sorted({spec.storage for spec in opened.tensors if spec.name in arrays})
    return unflatten(
        opened.tree,
        opened.tensors,
        _fetch(opened, np.array(needed, np.int64)),
        lambda name: name not in left and (keep is None or keep(name)),
        HOLE,
    )


def _check_codecs(opened: _Opened, keep: Callable[[str], bool] | None) -> None:
    """Raise ``UsageError`` for an object at a key path to ``keep`` that has no codec here: before
    anything is read for it, and before any other is decoded."""
    if object_paths(opened.tree):
        for path, name, leaves in objects(decode(opened.tree)):
            if keep is None or any(map(keep, leaves)):
                with said_at(path):
                    codec_named(name)


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


def named(info: VersionInfo) -> str:
    """What errors call a version."""
    return f"model {info.model!r}, step {info.step} (version {info.id})"
