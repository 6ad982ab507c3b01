"""Files of ``torch.save``, loaded by torch, every byte of them verified on the way.

torch reads through a file object of ours, which fills the memory that torch has made for a storage
and compares it with the digests in the file, in one pass. So classes, devices and ``weights_only``
are torch's own affair. All bytes come from one descriptor: a file that is replaced meanwhile
changes nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from portus.client.loading.restore import Patterns, matcher
from portus.errors import CorruptionError, MediumError, PortusError, UsageError, printable
from portus.format.checksum import unit_counts
from portus.image.key_paths import storage_places
from portus.image.torch_reader import Read, TorchFile, read_torch
from portus.media.file import FileSystemTraits, PlainFile
from portus.media.process import Descriptor
from portus.spec import Extent
from portus.transport.base import Column, Digests, Source, Stop, ranges
from portus.transport.local import check, fetch

_ZIP: Final = b"PK\x03\x04"

_TRAITS: Final = FileSystemTraits(volatile=False, early=False)
"""Of a file that is only read from."""


def load_file(
    path: str | os.PathLike[str], names: Patterns = None, *, mmap: bool = False, **settings: Any
) -> Any:
    """What ``torch.load`` returns of the file at ``path``, verified if the file has digests.

    names: shell patterns of key paths: only the storages of what matches are read, and of dicts,
        lists and tuples only that is returned, with None for what a list or tuple lacks.
    mmap: as for ``torch.load``. The whole file is read and verified first.
    settings: others of ``torch.load``.

    Blocks. Raises ``CorruptionError``, ``MediumError``, ``UsageError`` for a pattern that matches
    nothing, and what ``torch.load`` raises.
    """
    where = os.fspath(path)
    if os.path.isdir(where):
        raise UsageError(
            f"{printable(where)}: expected a file of torch.save, found a directory; portus.open "
            "reads a pool"
        )
    try:
        descriptor = Descriptor(where, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):
        raise  # as torch.load
    except OSError as error:
        raise MediumError(error.errno, f"{printable(where)}: {error.strerror}") from error
    with contextlib.closing(PlainFile(descriptor, _TRAITS, writable=False)) as file:
        keep, found = matcher(names), _read(file, where)
        if found is None:
            if keep is not None:
                raise UsageError(
                    f"{printable(where)}: names={names!r} needs a file of torch.save in the format "
                    "of torch 1.6 or newer"
                )
            return torch.load(where, mmap=mmap, **settings)
        wanted = None if keep is None else _wanted(found, keep)
        if mmap:
            _Verified(file, found, wanted).check_all()
            same = f"/proc/self/fd/{descriptor.number}"
            there = same if os.path.exists(same) else where
            state = torch.load(there, mmap=True, **settings)
        else:
            state = _loaded(_Verified(file, found, wanted), settings)
        if keep is None:
            return state
        part = _part(state, keep, ())
        keep.complain(printable(where))
        return part


def verify_file(path: str | os.PathLike[str]) -> int:
    """Read every byte of a file of ``torch.save`` and compare it with the digests in it; how many
    bytes. Of a stock file the CRCs of the zip are compared. Raises ``CorruptionError``,
    ``MediumError``."""
    where = os.fspath(path)
    try:
        descriptor = Descriptor(where, os.O_RDONLY)
    except OSError as error:
        raise MediumError(error.errno, f"{printable(where)}: {error.strerror}") from error
    with contextlib.closing(PlainFile(descriptor, _TRAITS, writable=False)) as file:
        found = read_torch(_reads(file), file.size, printable(where))
        if found.digests is None:
            found.verify(_reads(file))
        else:
            _Verified(file, found, None).check_all()
        return found.size


def is_whole(number: int, name: str) -> bool:
    """True if the open file is a file of ``torch.save`` all of whose bytes are as they were
    saved."""

    def read(offset: int, length: int) -> bytes:
        return os.pread(number, length, offset)

    try:
        read_torch(read, os.fstat(number).st_size, name).verify(read)
    except (PortusError, OSError):
        return False
    return True


def _reads(file: PlainFile) -> Read:
    def read(offset: int, length: int) -> bytes:
        target = memoryview(bytearray(max(0, min(length, file.size - offset))))
        file.load(offset, target)
        return bytes(target)

    return read


def _read(file: PlainFile, where: str) -> TorchFile | None:
    """What is in a file; None for one that is no zip, of which torch may know more."""
    read = _reads(file)
    try:
        return read_torch(read, file.size, printable(where))
    except CorruptionError:
        if read(0, len(_ZIP)) == _ZIP:
            raise
        return None


def _loaded(verified: _Verified, settings: dict[str, Any]) -> Any:
    try:
        return torch.load(verified, **settings)  # type: ignore[arg-type]  # it reads, and no more
    except Exception:
        if verified.failure is not None:  # torch may have made another error of it
            raise verified.failure from None
        raise


def _wanted(found: TorchFile, keep: Callable[[str], bool]) -> set[str]:
    """The keys of storages that are to be read: those of what matches, and those without which
    torch may not even make what they are in."""
    places = storage_places(found.pickle)
    followed = {place.storage for place in places}
    return {place.storage for place in places if not place.is_plain or keep(place.dotted)} | {
        key for key in found.keys if key not in followed
    }


_DROPPED: Final = object()


def _part(value: Any, keep: Callable[[str], bool], keys: tuple[object, ...]) -> Any:
    """What of a value matches."""
    if isinstance(value, dict) and value:
        pairs = [(key, _part(each, keep, (*keys, key))) for key, each in value.items()]
        kept = {key: each for key, each in pairs if each is not _DROPPED}
        return _made_as(value, kept) if kept or not keys else _DROPPED
    if type(value) in (list, tuple) and value:
        parts = [_part(each, keep, (*keys, index)) for index, each in enumerate(value)]
        if all(each is _DROPPED for each in parts) and keys:
            return _DROPPED
        return type(value)(None if each is _DROPPED else each for each in parts)
    return value if keep(".".join(map(str, keys))) else _DROPPED


def _made_as(value: dict[Any, Any], kept: dict[Any, Any]) -> dict[Any, Any]:
    if type(value) is dict:
        return kept
    for key in [key for key in value if key not in kept]:
        del value[key]
    value.update(kept)
    return value


class _Verified:
    """A file object that hands out what is as it was saved, and nothing else.

    wanted: the keys of storages to read; what memory for another one is filled with is undefined.
    """

    def __init__(self, file: PlainFile, found: TorchFile, wanted: set[str] | None) -> None:
        self.failure: PortusError | None = None
        """Why the last read failed."""
        self._file: Final = file
        self._found: Final = found
        self._wanted: Final = wanted
        self._position = 0
        self._units: Final = unit_counts(found.length)
        self._first: Final = np.cumsum(self._units) - self._units
        filled = np.flatnonzero(found.length > 0)
        order = filled[np.argsort(found.offset[filled], kind="stable")]
        self._order: Final = order
        self._starts: Final = found.offset[order]
        self._ends: Final = self._starts + found.length[order]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._found.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, length: int = -1) -> bytes:
        left = max(0, self._found.size - self._position)
        data = bytearray(left if length is None or length < 0 else min(length, left))
        self.readinto(data)
        return bytes(data)

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        view = view[: max(0, min(len(view), self._found.size - self._position))]
        try:
            self._fill(self._position, view)
        except PortusError as error:
            self.failure = error
            raise
        self._position += len(view)
        return len(view)

    def check_all(self) -> None:
        """Compare all storages with their digests. Raises ``CorruptionError``, ``MediumError``."""
        if self._found.digests is None:
            return
        sources = [self._source(int(index), 0) for index in self._order]
        self._compare(self._order, check(self._file, sources, Stop()))

    def _fill(self, offset: int, view: memoryview) -> None:
        begin = int(np.searchsorted(self._ends, offset, "right"))
        end = int(np.searchsorted(self._starts, offset + len(view), "left"))
        if begin >= end or self._found.digests is None:
            if begin < end and self._is_unwanted(begin):
                return
            self._file.load(offset, view)
            return
        start, stop = int(self._starts[begin]), int(self._ends[begin])
        if (offset, offset + len(view)) == (start, stop):
            if not self._is_unwanted(begin):
                address = np.frombuffer(view, np.uint8).ctypes.data
                self._fetch(int(self._order[begin]), address)
            return
        self._file.load(offset, view)
        if offset < start or stop < offset + len(view):
            return  # torch looks for the end of the file; it takes no bytes of a tensor from this
        index = int(self._order[begin])
        whole = np.empty(int(self._found.length[index]), np.uint8)
        self._fetch(index, whole.ctypes.data)
        view[:] = whole[offset - start : offset - start + len(view)].data

    def _is_unwanted(self, place: int) -> bool:
        return self._wanted is not None and (
            self._found.keys[int(self._order[place])] not in self._wanted
        )

    def _source(self, index: int, address: int) -> Source:
        length = int(self._found.length[index])
        return Source(address, length, (Extent(int(self._found.offset[index]), length),))

    def _fetch(self, index: int, address: int) -> None:
        stored = fetch(self._file, [self._source(index, address)], Stop())
        self._compare(np.array([index]), stored)

    def _compare(self, indices: Column, stored: Digests) -> None:
        """Raise ``CorruptionError`` if the units of some storages are not those that were saved."""
        assert self._found.digests is not None
        rows = ranges(self._first[indices], self._units[indices])
        wrong = rows[(stored != self._found.digests[rows]).any(axis=1)]
        if len(wrong):
            index = int(np.searchsorted(self._first, wrong[0], "right")) - 1
            raise self._damaged(index, int(wrong[0] - self._first[index]))

    def _damaged(self, index: int, unit: int) -> CorruptionError:
        found, key = self._found, self._found.keys[index]
        offset, length, _ = list(found.units(index))[unit]
        places = [each.subscript for each in storage_places(found.pickle) if each.storage == key]
        return CorruptionError(
            f"{found.name}: {' = '.join(places[:3]) or f'storage {key}'}: {length} bytes at "
            f"{offset} are not those that were saved. Load another checkpoint, and check the disk"
        )
