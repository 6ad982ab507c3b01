"""Memory that is changed in place, beside its committed bytes, and the pages in which the two
differ.

Theory. The committed bytes are a file in memory (memfd), and the view is a private mapping of that
file. A page of the view without a write is the file's own page; after a write it is a copy. The
kernel reports which pages are copies, by bit 61 of each entry of ``/proc/self/pagemap``. That needs
no privilege, and catches every write in this process. A copy may hold the same bytes as the file,
as it does after a commit; so copies are compared. If the kernel reports nothing, and for small
arrays, all of the view is compared.

Bytes to commit are copied from the view once. That copy is hashed, stored, and finally becomes
``committed``, since another thread may write to the view meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from portus.engine.media import linux
from portus.engine.media.write_watch import PAGE as SYSTEM_PAGE
from portus.engine.spec import PAGE
from portus.errors import MediumError

Bytes = NDArray[np.uint8]
Column = NDArray[np.int64]

Run = tuple[int, int]
"""The first byte of a range, and the byte after its end."""

_WHOLE_MAX: Final = 64 << 10
"""Bytes of an array that counts as one run if it changed: comparing closer costs more."""

_MAPPED_MIN: Final = 256 << 10
"""Bytes from which asking the kernel is cheaper than comparing all."""

_BLOCK: Final = 256
"""Pages to compare together."""

_LINE: Final = 8
"""Words of a page that are compared first: most pages that differ do so there."""

_PRESENT: Final = np.uint64(1 << 63)
_SWAPPED: Final = np.uint64(1 << 62)
_FILE: Final = np.uint64(1 << 61)


class PrivateMapping:
    """Two memories of whole pages of uint8, zero at first: ``view``, which users change, and
    ``committed``, its bytes at the last commit. They live as long as an array over them."""

    def __init__(self, size: int) -> None:
        """size: in bytes. Raises ``MediumError`` if there is no memory."""
        length = size + -size % max(PAGE, SYSTEM_PAGE)
        self.size: Final = size
        try:
            self.mapped: Final = size >= _MAPPED_MIN and tells()
            if self.mapped:
                # Of a file in memory, not of the pool, whose pages are reused when a log is folded
                # in: a view would change under its user (decision 0150).
                self.committed, self.view = _map_twice(length)
            else:
                self.committed, self.view = np.zeros(length, np.uint8), np.zeros(length, np.uint8)
        except (OSError, MemoryError, OverflowError, ValueError) as error:  # more than numbers hold
            number = error.errno if isinstance(error, OSError) else None
            raise MediumError(number, f"no memory for an array of {size} bytes: {error}") from error
        self._places: Final = self.view.ctypes.data, self.committed.ctypes.data

    def refresh(self) -> None:
        """Make the view, which was never written to, show ``committed`` after that was filled."""
        if not self.mapped:
            self.view[:] = self.committed

    def changes(self) -> Sequence[Run]:
        """Return the runs of pages in which the view differs from ``committed``, in order."""
        if self.mapped:
            pages = written_pages(self.view)
        elif _same(*self._places, self.size):
            return ()
        elif self.size <= _WHOLE_MAX:
            return ((0, self.size),)
        else:
            pages = np.arange(len(self.view) // PAGE)
        pages = _differing(self.view, self.committed, pages)
        if not len(pages):
            return ()
        cuts = np.flatnonzero(np.diff(pages) != 1) + 1
        first = pages[np.append(0, cuts)] * PAGE
        last = (pages[np.append(cuts - 1, len(pages) - 1)] + 1) * PAGE
        return list(zip(first.tolist(), np.minimum(last, self.size).tolist(), strict=True))

    def revert(self) -> None:
        """Restore the committed bytes in the view."""
        for start, end in self.changes():
            self.view[start:end] = self.committed[start:end]


@functools.cache
def tells() -> bool:
    """Return whether this system reports the written pages of a private mapping."""
    try:
        committed, view = _map_twice(2 * SYSTEM_PAGE)
        committed[0] = view[SYSTEM_PAGE]  # one page is read, and not written to
        view[0] = 1
        return bool(written_pages(view).tolist() == list(range(SYSTEM_PAGE // PAGE)))
    except (OSError, AttributeError):  # another platform, or /proc is not there
        return False


def _map_twice(length: int) -> tuple[Bytes, Bytes]:
    """Return memory of a new file, and a private mapping of the same. Raise ``OSError``."""
    file = os.memfd_create("portus-shelf")
    try:
        os.ftruncate(file, length)
        return _mapping(file, length, linux.MAP_SHARED), _mapping(file, length, linux.MAP_PRIVATE)
    finally:
        os.close(file)


def _mapping(file: int, length: int, flags: int) -> Bytes:
    address = linux.map_pages(0, length, linux.PROT_READ | linux.PROT_WRITE, flags, (file, 0))
    held = (ctypes.c_uint8 * length).from_address(address)
    # Every array over it, of numpy and of torch, keeps ``held`` alive.
    # Not at exit: threads may still read views, and the kernel unmaps them anyway.
    weakref.finalize(held, linux.unmap_pages, address, length).atexit = False
    return np.frombuffer(memoryview(held), np.uint8)


def written_pages(view: Bytes) -> Column:
    """Return the pages of a private mapping that are copies, made by a write, in order."""
    count, first = len(view) // SYSTEM_PAGE, view.ctypes.data // SYSTEM_PAGE
    # Opened here: after a fork the one opened before would be the parent's.
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        bits = np.frombuffer(os.pread(pagemap.fileno(), 8 * count, 8 * first), np.uint64)
    # A page that was written to may be swapped out by now.
    copied = (bits & (_PRESENT | _SWAPPED) != 0) & (bits & _FILE == 0)
    return np.flatnonzero(np.repeat(copied, SYSTEM_PAGE // PAGE))


def _differing(view: Bytes, committed: Bytes, pages: Column) -> Column:
    """Return those of some pages in which two memories differ."""
    ours, theirs = (each.view(np.uint64).reshape(-1, PAGE // 8) for each in (view, committed))
    found = [np.empty(0, np.int64)]
    for start in range(0, len(pages), _BLOCK):
        own = pages[start : start + _BLOCK]
        differs = (_rows(ours, own, _LINE) != _rows(theirs, own, _LINE)).any(axis=1)
        alike = own[~differs]
        differs[~differs] = (_rows(ours, alike) != _rows(theirs, alike)).any(axis=1)
        found.append(own[differs])
    return np.concatenate(found)


def _rows(memory: NDArray[np.uint64], pages: Column, words: int = PAGE // 8) -> NDArray[np.uint64]:
    """Return the first words of some pages, without a copy if these are neighbours."""
    if len(pages) and pages[-1] - pages[0] < len(pages):
        return memory[pages[0] : pages[-1] + 1, :words]
    return memory[pages, :words]


@functools.cache
def _memcmp() -> Callable[[int, int, int], int]:
    call = ctypes.PyDLL(None).memcmp  # keeps Python's lock: releasing it takes longer
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return call


def _same(left: int, right: int, length: int) -> bool:
    return _memcmp()(left, right, length) == 0
