"""A stored state, copied over the tensors of an existing state.

Everything is verified before anything is copied, and hashed again where it arrives: if it does not
verify, the tensors are untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from portus.engine.copying.segments import memory
from portus.engine.format.checksum import UNIT
from portus.engine.loading.open_file import StoredBytes
from portus.engine.loading.patterns import Matcher, Patterns, matcher
from portus.engine.pipeline.plan import Column
from portus.engine.spec import TensorSpec, VersionInfo
from portus.engine.state.merge import Merge
from portus.engine.state.walk import DTYPES, Elsewhere, StateContents, refuse_freed, walk
from portus.errors import UsageError

Pair = tuple[TensorSpec, torch.Tensor]
"""A tensor of a version, and the tensor of the state that it is copied over."""


def overlapping(address: Column, length: Column) -> npt.NDArray[np.bool_]:
    """Return a flag for each block of memory: True if it shares bytes with another one."""
    order = np.lexsort((length, address))
    start, end = address[order], (address + length)[order]
    found = np.zeros(len(order), bool)
    found[order[1:]] = start[1:] < np.maximum.accumulate(end)[:-1]
    found[order[:-1]] |= start[1:] < end[:-1]
    return found & (length > 0)


def doubtful_pairs(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Yield pairs that share memory in another way than in the version: only their values need to
    be read, to see whether there is a ``contradiction``."""
    by_memory: dict[tuple[str, int], list[Pair]] = {}
    for spec, target in pairs:
        if target.numel():
            memory = target.untyped_storage()
            by_memory.setdefault((str(target.device), memory.data_ptr()), []).append((spec, target))
    for users in by_memory.values():
        if doubtful := _doubtful(users):
            yield doubtful


def copy_over(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values, converted to the dtype of ``target``; elements that ``target`` repeats, once."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim]:
            source, target = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
    target.copy_(source)


def _doubtful(users: list[Pair]) -> list[Pair]:
    """Return the pairs that may overlap in another way than when they were saved."""
    places = {
        (spec.storage, (int(target.storage_offset()) - spec.offset) * target.element_size())
        for spec, target in users
    }
    if len(places) == 1 and all(map(_alike, users)):  # one storage, copied as a whole
        return []
    address = np.array([target.data_ptr() for _, target in users], np.int64)
    length = np.array([_extent(target) for _, target in users], np.int64)
    shared = overlapping(address, length)
    return [
        user
        for user, is_shared in zip(users, shared.tolist(), strict=True)
        if is_shared or (_is_folded(user[1]) and not _alike(user))
    ]


def _alike(user: Pair) -> bool:
    """Return True if elements have the same width and distances as when they were saved."""
    spec, target = user
    return target.stride() == spec.strides and str(target.dtype) == f"torch.{spec.dtype}"


def _extent(target: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last."""
    steps = zip(target.shape, target.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * target.element_size()


def _is_folded(target: torch.Tensor) -> bool:
    """Return True if several elements of a tensor may be one place, except for repeated ones."""
    reach = 1
    for stride, size in sorted(zip(target.stride(), target.shape, strict=True)):
        if stride and size > 1:
            if stride < reach:
                return True
            reach = stride * (size - 1) + reach
    return False


def contradiction(users: Sequence[Pair], values: Sequence[torch.Tensor]) -> tuple[str, str] | None:
    """Return two tensors that are one place in memory, for which a version has different
    ``values``; twice the same name for one whose own elements are. None if there are none.

    The values are copied over a copy of that memory: the tensors stay as they are.
    """
    memory = users[0][1].untyped_storage().clone()
    copies = [(spec, _in(memory, target)) for spec, target in users]
    for (_, copy), value in zip(copies, values, strict=True):
        copy_over(copy, value)
    for place, ((spec, copy), value) in enumerate(zip(copies, values, strict=True)):
        wanted = torch.empty_like(copy, memory_format=torch.contiguous_format).copy_(value)
        if not _same_bits(copy, wanted):
            address = np.array([each.data_ptr() for _, each in copies], np.int64)
            length = np.array([_extent(each) for _, each in copies], np.int64)
            starts, ends = address[place], address[place] + length[place]
            others = np.flatnonzero((address < ends) & (address + length > starts))
            other = next((int(each) for each in others[::-1] if each != place), place)
            return spec.name, users[other][0].name
    return None


def _in(memory: torch.UntypedStorage, target: torch.Tensor) -> torch.Tensor:
    """Return ``target``, but in a copy of its memory."""
    blank = torch.empty(0, dtype=target.dtype, device=memory.device)
    tensor = blank.set_(memory, target.storage_offset(), target.shape, target.stride())
    tensor = tensor.conj() if target.is_conj() else tensor
    return torch._neg_view(tensor) if target.is_neg() else tensor


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors of a shape and dtype have the same bits, NaNs too."""
    one, other = (
        each.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        for each in (left, right)
    )
    return bool(torch.equal(one, other))


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The result of ``restore_into``. ``missing``: tensors of the state that the version lacks,
    left as they were. ``unexpected``: tensors of the version that the state lacks."""

    version: VersionInfo
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


Rename = Mapping[str, str] | Callable[[str], str] | None

_INTEGERS: Final = frozenset(
    DTYPES[f"{sign}int{bits}"] for sign in ("", "u") for bits in (8, 16, 32, 64)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """Options of a copy of a stored state over another one: see ``Checkpointer.restore_into``.
    ``verify``: False compares no digests of storages."""

    strict: bool = True
    names: Patterns = None
    rename: Rename = None
    weights_only: bool | None = None
    verify: bool = True


class StoredState:
    """A state that is stored, and the bytes of its storages. ``outline``: the state, whose plain
    tensors have memory without their bytes. ``contents``: of the outline, over its storages.
    ``lengths``: of each, in bytes. ``where``: its name, for errors."""

    def __init__(
        self,
        where: str,
        outline: object,
        verified: StoredBytes | None = None,
        filled_at: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """verified: the file; None if ``outline`` has all of it. filled_at: its storages, by the
        addresses of their memory."""
        self.where: Final = where
        self.outline: Final = outline
        self.contents: Final = walk(outline)
        self._storages: Final = self.contents.storages
        self._index: Final = {each._cdata: at for at, each in enumerate(self._storages)}
        self.lengths: Final = np.array([each.nbytes() for each in self._storages], np.int64)
        self._verified: Final = verified
        in_file = [
            filled_at.get(each.data_ptr(), -1) if each.nbytes() else -1 for each in self._storages
        ]
        self._in_file: Final = np.array(in_file, np.int64)
        """The storage of the file for each storage; -1 for one that is in memory."""

    def check(self, wanted: Column) -> None:
        """Raise ``CorruptionError`` unless these storages have the bytes that were saved."""
        found = self._in_file[wanted]
        if self._verified is not None:
            self._verified.check(found[found >= 0])

    def fetch_into(self, wanted: Column, address: Column) -> None:
        """Copy these storages to memory, verified. Raises ``CorruptionError``."""
        found = self._in_file[wanted]
        if self._verified is not None:
            self._verified.fetch(found[found >= 0], address[found >= 0])
        for index, at in zip(wanted[found < 0].tolist(), address[found < 0].tolist(), strict=True):
            length = int(self.lengths[index])
            memory(at, length)[:] = memory(self._storages[index].data_ptr(), length)

    def fetch(self, index: int) -> torch.UntypedStorage:
        """Return a fresh copy of a storage, verified. Raises ``CorruptionError``."""
        length = int(self.lengths[index])
        storage = torch.empty(length, dtype=torch.uint8, device="cpu").untyped_storage()
        self.fetch_into(np.array([index], np.int64), np.array([storage.data_ptr()], np.int64))
        return storage

    def fill(self, storage: torch.UntypedStorage) -> None:
        """Read a storage of the outline to its memory, verified; nothing if it is there."""
        index = self._index.get(storage._cdata, -1)
        if index >= 0 and self._in_file[index] >= 0 and self._verified is not None:
            self._verified.fetch(self._in_file[[index]], np.array([storage.data_ptr()], np.int64))
            self._in_file[index] = -1

    def units(self, storage: torch.UntypedStorage) -> Iterator[memoryview]:
        """Yield the units of a storage of the outline, verified; each is valid until the next."""
        index = self._index.get(storage._cdata, -1)
        if index >= 0 and self._in_file[index] >= 0:
            assert self._verified is not None
            yield from self._verified.units(int(self._in_file[index]))
            return
        held = memory(storage.data_ptr(), storage.nbytes())
        for start in range(0, max(1, len(held)), UNIT):
            yield held[start : start + UNIT]


def restore_over(
    stored: StoredState, state: object, options: RestoreOptions
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Copy a stored state over the tensors of ``state``, and set its other leaves. Return the
    tensors of ``state`` that the stored one lacks, and the reverse.

    Raises ``UsageError`` listing tensors that are missing, unexpected or of another shape
    (``strict``; shapes always), for tensors that share memory and have different values stored, for
    a table that is in another pool, for a pattern that matches nothing; ``CorruptionError``; then
    ``state`` is untouched.
    """
    keep = matcher(options.names)
    complete = options.strict and keep is None and options.rename is None
    pairs, missing, unexpected = _pair(stored, state, keep, options)
    wanted = np.unique(np.array([spec.storage for spec, _ in pairs], np.int64))
    # All of it, before anything is copied: after an error the state is untouched (V4).
    stored.check(wanted[wanted >= 0])
    if keep is not None:
        for path, _ in stored.contents.others:
            keep(path)
        keep.complain(stored.where)
    _check_shared(stored, pairs)
    _fill(stored, pairs)
    Merge(complete=complete, keep=keep).merge(state, stored.outline)
    return tuple(missing), tuple(unexpected)


def _check_shared(stored: StoredState, pairs: Sequence[Pair]) -> None:
    """Raise ``UsageError`` if one place in memory would have to hold different values."""
    for users in doubtful_pairs(pairs):
        values = [_as_seen(spec, stored.fetch(spec.storage)) for spec, _ in users]
        if found := contradiction(users, values):
            one, other = found
            what = f"{one} and {other} share" if one != other else f"elements of {one} share"
            raise UsageError(
                f"{stored.where} does not fit the state, which is untouched: {what} "
                "memory in the state, and the version has different values for them; restore into "
                "tensors of their own, such as clone() makes, and tie them afterwards"
            )


def _pair(
    stored: StoredState, state: object, keep: Matcher | None, options: RestoreOptions
) -> tuple[list[Pair], list[str], list[str]]:
    """Return the tensors to copy and where to, those of the state that the version lacks, and the
    reverse. Raise ``UsageError`` if they do not fit."""
    here, given = walk(state), options.rename
    rename = given if callable(given) else lambda name: (given or {}).get(name, name)
    targets = {spec.name: spec for spec in here.tensors}
    pairs: list[Pair] = []
    unexpected: list[str] = []
    lines: list[str] = []
    seen = set()
    for spec in stored.contents.tensors:
        if keep is not None and not keep(spec.name):
            continue
        name = rename(spec.name)
        target = targets.get(name)
        if target is None or target.storage < 0 or spec.storage < 0:
            unexpected.append(name)
            continue
        seen.add(name)
        refuse_freed(target, here.storages[target.storage])
        if target.shape != spec.shape:
            lines.append(
                f"size mismatch for {name}: the version has {list(spec.shape)}, the state "
                f"{list(target.shape)}"
            )
        elif not _takes(target.dtype, spec.dtype):
            lines.append(
                f"dtype mismatch for {name}: the version has {spec.dtype}, of which the "
                f"state's {target.dtype} would keep a part; restore into {spec.dtype}, and "
                "convert that"
            )
        elif 0 in target.strides and not _repeated_dims(target) <= _repeated_dims(spec):
            lines.append(
                f"{name} is expanded in the state: several of its elements are one place in "
                "memory, and the version has a value for each; restore into what it was "
                "expanded from, or into a contiguous() copy"
            )
        pairs.append((spec, _as_seen(target, here.storages[target.storage])))
    _refuse_elsewhere(stored, here, keep, {*unexpected, *seen})
    missing = [name for name in targets if name not in seen and (keep is None or keep(name))]
    if options.strict and missing:
        lines.append(f"missing in the version: {', '.join(missing)}")
    if options.strict and unexpected:
        lines.append(f"unexpected, not in the state: {', '.join(unexpected)}")
    if lines:
        raise UsageError(
            f"{stored.where} does not fit the state, which is untouched: " + "; ".join(lines)
        )
    return pairs, missing, unexpected


def _refuse_elsewhere(
    stored: StoredState, here: StateContents, keep: Matcher | None, into: set[str]
) -> None:
    """Raise ``UsageError`` if a requested value, or its place in the state, is a table in another
    pool: it would stay as it is, beside the copied values. into: the requested key paths."""
    found = [
        *(each for each in _places_in(stored.contents) if keep is None or keep(each[0])),
        *(
            (f"{path} in the state", place)
            for path, place in _places_in(here)
            if path in into or keep is None or keep(path)
        ),
    ]
    if found:
        path, place = found[0]
        raise UsageError(
            f"{stored.where} was not restored, and the state is untouched: {path} is a "
            f"protected table, which is in {place.pool}, and would stay as it is now; `load` "
            "the version instead, and pass its parts to `load_state_dict` of the model and "
            "the optimizers, or leave the tables out with names="
        )


def view_of(spec: TensorSpec, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor over ``storage``, laid out as ``spec``; no copy, no gradient."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    blank = torch.empty(0, dtype=dtype, device=storage.device)
    return blank.set_(storage, spec.offset, spec.shape, spec.strides)


def _as_seen(spec: TensorSpec, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the tensor with its lazy bits: values copied to it read back unchanged."""
    tensor = view_of(spec, storage)
    tensor = tensor.conj() if spec.conjugate else tensor
    return torch._neg_view(tensor) if spec.negative else tensor


def _takes(target: str, saved: str) -> bool:
    """Return True if a tensor of dtype ``target`` may be filled with values of ``saved``, rounded
    at most: no fraction, imaginary part, or high byte is dropped."""
    if target == saved or saved not in DTYPES:
        return True
    ours, theirs = DTYPES[target], DTYPES[saved]
    if ours in _INTEGERS and theirs in _INTEGERS:
        at_most, needed = torch.iinfo(ours), torch.iinfo(theirs)
        return at_most.min <= needed.min and needed.max <= at_most.max
    return torch.can_cast(theirs, ours)


def _repeated_dims(spec: TensorSpec) -> set[int]:
    """Return the dimensions along which all elements are one place in memory."""
    rows = enumerate(zip(spec.shape, spec.strides, strict=True))
    return {index for index, (size, stride) in rows if size > 1 and stride == 0}


def _fill(stored: StoredState, pairs: Sequence[Pair]) -> None:
    """Copy storages over tensors: straight to their place if every tensor of a storage is the whole
    of it, at one place that no other shares."""
    users_of: dict[int, list[Pair]] = {}
    for spec, target in pairs:
        users_of.setdefault(spec.storage, []).append((spec, target))
    lengths = stored.lengths
    blocks = {
        index: users[0][1]
        for index, users in users_of.items()
        if all(_is_whole(spec, target, int(lengths[index])) for spec, target in users)
        and len({target.data_ptr() for _, target in users}) == 1
    }
    wanted = np.array(list(blocks), np.int64)
    address = np.array([target.data_ptr() for target in blocks.values()], np.int64)
    # Threads fill these in any order; what overlaps is copied afterwards, in order.
    alone = ~overlapping(address, lengths[wanted])
    stored.fetch_into(wanted[alone], address[alone])
    filled = set(wanted[alone].tolist())
    for index, users in users_of.items():
        if index not in filled:
            storage = stored.fetch(index)
            for spec, target in users:
                copy_over(target, _as_seen(spec, storage))


def _is_whole(spec: TensorSpec, target: torch.Tensor, length: int) -> bool:
    """Return True if ``target`` is a plain block of memory with just the bytes of the storage. A
    tensor of another class than torch's own may have its memory elsewhere."""
    return (
        type(target) is torch.Tensor  # a subclass may keep its bytes elsewhere
        and target.device.type == "cpu"
        and target.layout is torch.strided
        and str(target.dtype) == f"torch.{spec.dtype}"
        and target.nbytes == length
        and tuple(target.stride()) == spec.strides
        and target.is_contiguous()
        and not (spec.conjugate or spec.negative or target.is_conj() or target.is_neg())
    )


def _places_in(found: StateContents) -> list[tuple[str, Elsewhere]]:
    """Return each ``Elsewhere`` in a state, with its key path."""
    return [(path, value) for path, value in found.others if isinstance(value, Elsewhere)]
