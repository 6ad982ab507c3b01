"""Files of ``torch.save``, loaded by torch, every byte of them verified on the way.

torch reads through a file object of ours, which fills the memory that torch has made for a storage
and compares it with the digests in the file, in one pass. So classes, devices and ``weights_only``
are torch's own affair. All bytes come from one descriptor: a file that is replaced meanwhile
changes nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from portus.client.loading.over import Rename, restore_over
from portus.client.loading.patterns import Patterns, matcher
from portus.client.state.state import flatten
from portus.errors import CorruptionError, MediumError, PortusError, UsageError, printable
from portus.format.checksum import unit_counts
from portus.image.key_paths import storage_places
from portus.image.torch_reader import Read, TorchFile, read_record, read_torch
from portus.image.torch_zip import DIGESTS, NOTE
from portus.media.file import FileSystemTraits, PlainFile
from portus.media.process import Descriptor
from portus.spec import Extent
from portus.transport.base import Column, Digests, Source, Stop, memory, ranges
from portus.transport.local import check, fetch

_ZIP: Final = b"PK\x03\x04"
_PICKLE: Final = b"\x80"
_TAR: Final = (257, b"ustar")
"""By what the files of torch before 1.6 and 0.4 are known, and where."""

_TRAITS: Final = FileSystemTraits(volatile=False, early=False)
"""Of a file that is only read from."""


def load_file(
    path: str | os.PathLike[str],
    names: Patterns = None,
    *,
    mmap: bool = False,
    verify: bool = True,
    **settings: Any,
) -> Any:
    """What ``torch.load`` returns of the file at ``path``, verified if the file has digests.

    names: shell patterns of key paths: only the storages of what matches are read, and of dicts,
        lists and tuples only that is returned, with None for what a list or tuple lacks.
    mmap: as for ``torch.load``. The whole file is read and verified first.
    verify: False compares no digests of storages.
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
    with _opened(where) as (file, number):
        keep, found = matcher(names), _read(file, where, verify=verify)
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
            same = f"/proc/self/fd/{number}"
            there = same if os.path.exists(same) else where
            state = torch.load(there, mmap=True, **settings)
        else:
            state = _loaded(_Verified(file, found, wanted), settings)
        if keep is None:
            return state
        part = _part(state, keep, ())
        keep.complain(printable(where))
        return part


def restore_file(
    path: str | os.PathLike[str],
    state: object,
    *,
    strict: bool = True,
    names: Patterns = None,
    rename: Rename = None,
    weights_only: bool | None = None,
    verify: bool = True,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Copy the file at ``path`` over the tensors of ``state``, and set its other leaves; see
    ``over.restore_over``, also for what is returned and raised.

    Storages are read straight into tensors that are plain blocks of memory. weights_only: as for
    ``torch.load``. verify: False compares no digests of storages.
    """
    where = os.fspath(path)
    settings: dict[str, Any] = {"map_location": "cpu"}
    if weights_only is not None:
        settings["weights_only"] = weights_only
    with _opened(where) as (file, _):
        found = _read(file, where, verify=verify)
        verified = (
            None if found is None else _Verified(file, found, _wanted(found, lambda _: False))
        )
        outline = torch.load(where, **settings) if verified is None else _loaded(verified, settings)
        stored = _FileState(printable(where), outline, verified)
        return restore_over(stored, state, strict=strict, names=names, rename=rename)


def read_note(path: str | os.PathLike[str]) -> bytes | None:
    """Return what whoever saved a file noted in it; None if nothing. Reads little of the file.
    Raises ``CorruptionError`` for one that is cut off, ``MediumError``."""
    where = os.fspath(path)
    with _opened(where) as (file, _):
        if _is_old(_reads(file)):
            return None
        return read_record(_reads(file), file.size, printable(where), NOTE)


def has_digests(path: str | os.PathLike[str]) -> bool:
    """Return whether a file has digests of its storages, as one that Portus saved. Reads little of
    it. Raises as ``read_note``."""
    where = os.fspath(path)
    with _opened(where, as_torch=False) as (file, _):
        if _is_old(_reads(file)):
            return False
        return read_record(_reads(file), file.size, printable(where), DIGESTS) is not None


def outlined(path: str | os.PathLike[str]) -> TorchFile:
    """Return where everything is in a file of torch 1.6 or newer. Raises ``CorruptionError``,
    ``MediumError``."""
    where = os.fspath(path)
    with _opened(where, as_torch=False) as (file, _):
        return read_torch(_reads(file), file.size, printable(where))


@contextlib.contextmanager
def _opened(where: str, *, as_torch: bool = True) -> Iterator[tuple[PlainFile, int]]:
    """An open file, and its descriptor. as_torch: of a missing one, raise what torch raises."""
    try:
        descriptor = Descriptor(where, os.O_RDONLY)
    except OSError as error:
        if as_torch and isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise MediumError(error.errno, f"{printable(where)}: {error.strerror}") from error
    with contextlib.closing(PlainFile(descriptor, _TRAITS, writable=False)) as file:
        yield file, descriptor.number


def verify_file(path: str | os.PathLike[str], pace: Callable[[int], object] | None = None) -> int:
    """Read every byte of a file of ``torch.save`` and compare it with the digests in it; how many
    bytes. Of a stock file the CRCs of the zip are compared. pace: called after each piece with its
    bytes, and waits as long as it likes; what is cached of the file is read from the disk then.
    Raises ``CorruptionError``, ``MediumError``."""
    where = os.fspath(path)
    with _opened(where, as_torch=False) as (file, number):
        found = read_torch(_reads(file), file.size, printable(where))
        if pace is not None:
            _drop_cached(number)
            found.verify(_paced(_reads(file), pace))
        elif found.digests is None:
            found.verify(_reads(file))
        else:
            _Verified(file, found, None).check_all()
        return found.size


def _drop_cached(number: int) -> None:
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)


def _paced(read: Read, pace: Callable[[int], object]) -> Read:
    def paced(offset: int, length: int) -> bytes:
        data = read(offset, length)
        pace(len(data))
        return data

    return paced


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
        if target:
            file.load(offset, target)
        return bytes(target)

    return read


def _read(file: PlainFile, where: str, *, verify: bool = True) -> TorchFile | None:
    """What is in a file; None for one of an old format, which torch knows."""
    read = _reads(file)
    try:
        found = read_torch(read, file.size, printable(where))
        return found if verify else replace(found, digests=None)
    except CorruptionError as error:
        begin = read(0, len(_ZIP))
        if begin == _ZIP:
            raise
        if _is_old(read):
            return None
        raise CorruptionError(
            f"{printable(where)}: expected a file of torch.save, found {file.size} bytes that "
            f"begin with {begin!r}; what wrote it may not have finished. Load another checkpoint"
        ) from error


def _is_old(read: Read) -> bool:
    """True for a file of torch before 1.6."""
    return read(0, len(_PICKLE)) == _PICKLE or read(_TAR[0], len(_TAR[1])) == _TAR[1]


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
        self.filled_at: Final[dict[int, int]] = {}
        """Storages that were asked for, by the address that they were to be read to."""
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
        self.check(self._order)

    def check(self, indices: Column) -> None:
        """Compare some storages with their digests. Raises ``CorruptionError``, ``MediumError``."""
        if self._found.digests is not None:
            sources = [self._source(index, 0) for index in indices.tolist()]
            self._compare(indices, check(self._file, sources, Stop()))

    def fetch(self, indices: Column, address: Column) -> None:
        """Read some storages to memory, verified. Raises ``CorruptionError``, ``MediumError``."""
        places = zip(indices.tolist(), address.tolist(), strict=True)
        sources = [self._source(index, at) for index, at in places]
        self._compare(indices, fetch(self._file, sources, Stop()))

    def _fill(self, offset: int, view: memoryview) -> None:
        begin = int(np.searchsorted(self._ends, offset, "right"))
        end = int(np.searchsorted(self._starts, offset + len(view), "left"))
        if begin >= end:
            self._file.load(offset, view)
            return
        start, stop = int(self._starts[begin]), int(self._ends[begin])
        if (offset, offset + len(view)) == (start, stop):
            address, index = np.frombuffer(view, np.uint8).ctypes.data, int(self._order[begin])
            self.filled_at[address] = index
            if not self._is_unwanted(begin):
                self.fetch(np.array([index]), np.array([address]))
            return
        self._file.load(offset, view)
        if offset < start or stop < offset + len(view):
            return  # torch looks for the end of the file; it takes no bytes of a tensor from this
        index = int(self._order[begin])
        whole = np.empty(int(self._found.length[index]), np.uint8)
        self.fetch(np.array([index]), np.array([whole.ctypes.data]))
        view[:] = whole[offset - start : offset - start + len(view)].data

    def _is_unwanted(self, place: int) -> bool:
        return self._wanted is not None and (
            self._found.keys[int(self._order[place])] not in self._wanted
        )

    def _source(self, index: int, address: int) -> Source:
        length = int(self._found.length[index])
        return Source(address, length, (Extent(int(self._found.offset[index]), length),))

    def _compare(self, indices: Column, stored: Digests) -> None:
        """Raise ``CorruptionError`` if the units of some storages are not those that were saved."""
        if self._found.digests is None:
            return
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


class _FileState:
    """A file as a ``StoredState``. outline: what is in it, whose plain tensors have memory that
    nobody has filled. verified: the file; None if ``outline`` has all of it."""

    def __init__(self, where: str, outline: object, verified: _Verified | None) -> None:
        self.unknown: Final[list[object]] = []
        flat = flatten(outline, self.unknown)
        self.where: Final = where
        self.tree: Final = flat.tree
        self.tensors: Final = flat.tensors
        self.lengths: Final = np.array([each.nbytes() for each in flat.storages], np.int64)
        self._storages: Final = flat.storages
        self._verified: Final = verified
        at = {} if verified is None else verified.filled_at
        in_file = [at.get(each.data_ptr(), -1) if each.nbytes() else -1 for each in flat.storages]
        for index in flat.owned:  # a copy of an array, perhaps where a tensor was that is gone
            in_file[index] = -1
        self._in_file: Final = np.array(in_file, np.int64)
        """The storage of the file that each is; -1 for one that is in memory."""

    def check(self, wanted: Column) -> None:
        found = self._in_file[wanted]
        if self._verified is not None:
            self._verified.check(found[found >= 0])

    def fetch_into(self, wanted: Column, address: Column) -> None:
        found = self._in_file[wanted]
        if self._verified is not None:
            self._verified.fetch(found[found >= 0], address[found >= 0])
        for index, at in zip(wanted[found < 0].tolist(), address[found < 0].tolist(), strict=True):
            length = int(self.lengths[index])
            memory(at, length)[:] = memory(self._storages[index].data_ptr(), length)
