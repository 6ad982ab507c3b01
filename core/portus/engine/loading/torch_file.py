"""Files of ``torch.save``, loaded by torch, every byte of them verified on the way.

torch reads through a file object of ours, which fills the memory that torch has made for a storage
and compares it with the digests in the file, in one pass. So torch alone handles classes, devices
and ``weights_only``. All bytes come from one descriptor: a file that is replaced meanwhile changes
nothing.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import os
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from portus.engine.image.image import Read
from portus.engine.image.key_paths import is_ordinary, storage_places
from portus.engine.image.torch_reader import TorchFile, read_record, read_torch
from portus.engine.image.torch_zip import ZIP
from portus.engine.loading.open_file import OpenFile, StoredBytes, reads
from portus.engine.loading.patterns import Matcher, Patterns, matcher, part_of
from portus.engine.loading.restore_over import RestoreOptions, StoredState, restore_over
from portus.engine.state.pickling import no_collection
from portus.errors import CorruptionError, PortusError, UsageError, printable

_PICKLE: Final = b"\x80"
_TAR: Final = (257, b"ustar")
"""The marks of the files of torch before 1.6 and 0.4, and their offsets."""
_SMALL: Final = 256 << 10
"""Bytes of a storage up to which it is read together with those that follow."""
_AHEAD: Final = 8 << 20
"""Bytes of small storages that are read together."""


def load_torch(
    file: OpenFile,
    where: str,
    names: Patterns,
    *,
    verify: bool,
    settings: dict[str, Any],
) -> Any:
    """Return the result of ``torch.load`` for the open file at ``where``; see ``load_file``. For a
    file in a pool, ``mmap`` is ignored."""
    keep, found = matcher(names), _read(file, where, verify=verify)
    if found is None:
        if keep is not None:
            raise UsageError(
                f"{printable(where)}: names={names!r} needs a file of torch.save in the format "
                "of torch 1.6 or newer"
            )
        return torch.load(where, **settings)  # as stock does: an old format has nothing to verify
    wanted = None if keep is None else _keys_to_read(found, keep)
    if settings.pop("mmap", False) and file.number is not None:
        StoredBytes(file, found).check_all()
        # The verified file: another one may be at the path by now.
        same = f"/proc/self/fd/{file.number}"
        there = same if os.path.exists(same) else where
        state = torch.load(there, mmap=True, **settings)
    else:
        state = _load(_VerifiedFile(file, found, wanted), settings)
    if keep is None:
        return state
    part = part_of(state, keep)
    keep.complain(printable(where))
    return part


def restore_torch(
    file: OpenFile, where: str, state: object, options: RestoreOptions
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Copy the open file at ``where`` over ``state``; see ``checkpoint_file.restore_file``."""
    weights_only = options.weights_only
    settings = {} if weights_only is None else {"weights_only": weights_only}
    stored = open_state(file, where, verify=options.verify, **settings)
    with no_collection():
        return restore_over(stored, state, options)


def open_state(file: OpenFile, where: str, *, verify: bool = True, **settings: Any) -> StoredState:
    """Return the state in an open file, of which plain tensors are not read yet. settings: of
    ``torch.load``."""
    settings.setdefault("map_location", "cpu")
    found = _read(file, where, verify=verify)
    verified = None
    if found is not None:
        # Most states are ordinary, and to list their places would take longer than all the rest.
        keys = set() if is_ordinary(found.pickle) else _keys_to_read(found, Matcher([]))
        verified = _VerifiedFile(file, found, keys)
    outline = torch.load(where, **settings) if verified is None else _load(verified, settings)
    with no_collection():
        return StoredState(
            printable(where), outline, verified, verified.filled_at if verified else {}
        )


def load_outline(file: OpenFile, found: TorchFile, **settings: Any) -> Any:
    """Return the state in an open file; the memory of its storages has undefined bytes."""
    return _load(_VerifiedFile(file, found, set()), settings)


def record_of_torch(file: OpenFile, where: str, record: str) -> bytes | None:
    """Return a record of an open file of torch; None if it has none such. Reads little of it.
    Raises ``CorruptionError``."""
    if _is_old(reads(file)):
        return None
    return read_record(reads(file), file.size, printable(where), record)


def _read(file: OpenFile, where: str, *, verify: bool = True) -> TorchFile | None:
    """Return the contents of a file; None for one of an old format, which torch knows."""
    read = reads(file)
    try:
        found = read_torch(read, file.size, printable(where))
        return found if verify else replace(found, digests=None)
    except CorruptionError as error:
        begin = read(0, len(ZIP))
        if begin == ZIP:
            raise
        if _is_old(read):
            return None
        raise CorruptionError(
            f"{printable(where)}: expected a file of torch.save, found {file.size} bytes that "
            f"begin with {begin!r}; what wrote it may not have finished. Load another checkpoint"
        ) from error


def _is_old(read: Read) -> bool:
    """Return True for a file of torch before 1.6."""
    return read(0, len(_PICKLE)) == _PICKLE or read(_TAR[0], len(_TAR[1])) == _TAR[1]


def _load(verified: _VerifiedFile, settings: dict[str, Any]) -> Any:
    # No unpickler of our own: it would need torch's rules for classes and devices, in every version
    # (decision 0204).
    try:
        with no_collection():
            return torch.load(verified, **settings)  # type: ignore[arg-type]  # torch only reads it
    except Exception:
        if verified.failure is not None:  # torch may have raised another error from it
            raise verified.failure from None
        raise


def _keys_to_read(found: TorchFile, keep: Matcher) -> set[str]:
    """Return the keys of storages to read: those that match, and those without which torch may be
    unable to make the objects around them."""
    places = storage_places(found.pickle)
    followed = {place.storage for place in places}
    return {place.storage for place in places if not place.is_plain or keep(place.pattern_path)} | {
        key for key in found.keys if key not in followed
    }


class _VerifiedFile(StoredBytes):
    """A file object that returns only bytes that are as they were saved.

    wanted: the keys of storages to read; the memory of any other is filled with undefined bytes.
    """

    def __init__(self, file: OpenFile, found: TorchFile, wanted: set[str] | None) -> None:
        super().__init__(file, found)
        self.failure: PortusError | None = None
        """The reason why the last read failed."""
        self._wanted: Final = wanted
        self._position = 0
        filled = np.flatnonzero(found.length > 0)
        order = filled[np.argsort(found.offset[filled], kind="stable")]
        self._order: Final[list[int]] = order.tolist()
        self.filled_at: Final[dict[int, int]] = {}
        """The storages that torch read, by the addresses that it read them to."""
        self._starts: Final[list[int]] = found.offset[order].tolist()
        self._ends: Final[list[int]] = (found.offset + found.length)[order].tolist()
        # torch asks for storages in the order of their keys.
        next_ = np.array(
            [at for at in filled.tolist() if wanted is None or found.keys[at] in wanted], np.int64
        )
        file.announce(found.offset[next_], found.length[next_])
        self._small: Final = next_[found.length[next_] <= _SMALL]
        self._small_end: Final = np.cumsum(found.length[self._small])
        self._ahead: Final[dict[int, memoryview]] = {}
        """Small storages that were read ahead of torch."""
        self._ahead_until = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._stored.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, length: int = -1) -> bytes:
        left = max(0, self._stored.size - self._position)
        data = bytearray(left if length is None or length < 0 else min(length, left))
        self.readinto(data)
        return bytes(data)

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        view = view[: max(0, min(len(view), self._stored.size - self._position))]
        try:
            self._fill(self._position, view)
        except PortusError as error:
            self.failure = error
            raise
        self._position += len(view)
        return len(view)

    def _fill(self, offset: int, view: memoryview) -> None:
        # Lists: numpy takes several times as long for one number.
        begin = bisect.bisect_right(self._ends, offset)
        end = bisect.bisect_left(self._starts, offset + len(view))
        if begin >= end:
            self._file.load(offset, view)
            return
        start, stop, index = self._starts[begin], self._ends[begin], self._order[begin]
        if (offset, offset + len(view)) == (start, stop):
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            # By address, since torch makes the memory: this finds the tensors over it again.
            self.filled_at[address] = index
            if self._wanted is None or self._stored.keys[index] in self._wanted:
                self._take(index, address, view)
            return
        self._file.load(offset, view)
        if offset < start or stop < offset + len(view):
            return  # torch looks for the end of the file; it takes no bytes of a tensor from this
        # A part of a storage can be verified only with the rest of its units.
        whole = np.empty(int(self._stored.length[index]), np.uint8)
        self.fetch(np.array([index]), np.array([whole.ctypes.data]))
        view[:] = whole[offset - start : offset - start + len(view)].data

    def _take(self, index: int, address: int, view: memoryview) -> None:
        """Fill ``view`` with a storage, and read more ahead if it is a small one."""
        # A read of its own for each would take most of the time of a load of many, and a round
        # trip each if they are elsewhere.
        if len(view) <= _SMALL and index not in self._ahead:
            self._read_ahead(index)
        piece = self._ahead.pop(index, None)
        if piece is None:
            self.fetch(np.array([index]), np.array([address]))
        else:
            view[:] = piece

    def _read_ahead(self, index: int) -> None:
        """Read the small storages from ``index`` on, unless it was read ahead before."""
        first = int(np.searchsorted(self._small, index))
        if first < self._ahead_until:
            return
        lengths = self._stored.length[self._small]
        limit = self._small_end[first] - lengths[first] + _AHEAD
        end = int(np.searchsorted(self._small_end, limit, "right"))
        batch, lengths = self._small[first:end], lengths[first:end]
        starts = np.cumsum(lengths) - lengths
        read = np.empty(int(lengths.sum()), np.uint8)
        self._ahead_until = end
        # Damage is raised when torch reads the damaged storage, not another one of the batch.
        with contextlib.suppress(CorruptionError):
            self.fetch(batch, read.ctypes.data + starts)
            columns = (batch.tolist(), starts.tolist(), lengths.tolist())
            for each, at, length in zip(*columns, strict=True):
                self._ahead[each] = read.data[at : at + length]
