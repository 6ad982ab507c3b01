"""Memory that is changed in place, beside its committed bytes, and the pages in which the two
differ.

Theory. The committed bytes are a file in memory (memfd), and the view is a private mapping of that
file. A page of the view without a write is the file's own page; after a write it is a copy. The
kernel reports which pages are copies: at once by ``PAGEMAP_SCAN`` (Linux 6.7), else by bit 61 of
each entry of ``/proc/self/pagemap``. Both need no privilege, and catch every write in this process.
A copy may hold the same bytes as the file, as it does after a commit; so copies are compared. If
the kernel reports nothing, and for small arrays, all of the view is compared.

Bytes to commit are copied from the view once. That copy is hashed, stored, and finally becomes
``committed``, since another thread may write to the view meanwhile.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from portus.engine.media import linux
from portus.engine.media.process import Descriptor
from portus.engine.media.write_watch import PAGE as SYSTEM_PAGE
from portus.engine.spec import PAGE
from portus.errors import MediumError

Bytes = NDArray[np.uint8]

Run = tuple[int, int]
"""The first byte of a range, and the byte after its end."""

_WHOLE_MAX: Final = 64 << 10
"""Bytes of an array that counts as one run if it changed: comparing closer costs more."""

_MAPPED_MIN: Final = 256 << 10
"""Bytes from which asking the kernel is cheaper than comparing all."""

_BLOCK: Final = 1 << 20
"""Bytes to compare together."""

_SAMPLED_MIN: Final = 1 << 20
"""Bytes of an array from which a sample is compared first."""

_SAMPLE: Final = 64
"""Pages of the sample."""

_LINE: Final = 8
"""Words of a page that are compared first: most pages that differ do so there."""

_PRESENT: Final = np.uint64(1 << 63)
_SWAPPED: Final = np.uint64(1 << 62)
_FILE: Final = np.uint64(1 << 61)


class WriteDetection(enum.Enum):
    """The way to detect which pages were written to."""

    SCAN = "PAGEMAP_SCAN"
    BITS = "bit 61 of /proc/self/pagemap"
    NOTHING = "comparing all"


class PrivateMapping:
    """Two memories of whole pages of uint8, zero at first: ``view``, which users change, and
    ``committed``, its bytes at the last commit. They live as long as an array over them."""

    def __init__(self, size: int) -> None:
        """size: in bytes. Raises ``MediumError`` if there is no memory."""
        length = size + -size % max(PAGE, SYSTEM_PAGE)
        self.size: Final = size
        try:
            self.mapped: Final = size >= _MAPPED_MIN and tells() is not WriteDetection.NOTHING
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
        if not self.size:
            return ()
        if self.mapped:
            return self._differing(self._candidates())
        view, committed = self._places
        if _same(view, committed, self.size):
            return ()
        if self.size <= _WHOLE_MAX:
            return ((0, self.size),)
        return self._differing([(0, len(self.view))])

    def revert(self) -> None:
        """Restore the committed bytes in the view."""
        for start, end in self.changes():
            self.view[start:end] = self.committed[start:end]

    def _differing(self, runs: Sequence[Run]) -> Sequence[Run]:
        if self._seem_all_to_differ(runs):
            return [(start, min(end, self.size)) for start, end in runs]
        rows = [_differing(self.view, self.committed, run) for run in runs]
        if not rows:
            return ()
        pages = np.concatenate(rows)
        if not len(pages):
            return ()
        cuts = np.flatnonzero(np.diff(pages) != 1) + 1
        first = pages[np.append(0, cuts)] * PAGE
        last = (pages[np.append(cuts - 1, len(pages) - 1)] + 1) * PAGE
        return list(zip(first.tolist(), np.minimum(last, self.size).tolist(), strict=True))

    def _seem_all_to_differ(self, runs: Sequence[Run]) -> bool:
        """Return whether the runs are most of a large array, and every page of a sample differs:
        then comparing the rest is not worth its time."""
        starts, ends = np.array(runs, np.int64).reshape(-1, 2).T
        if self.size < _SAMPLED_MIN or 2 * int((ends - starts).sum()) < self.size:
            return False
        pages = np.concatenate([np.arange(start, end, PAGE) for start, end in runs]) // PAGE
        sample = pages[np.linspace(0, len(pages) - 1, _SAMPLE).astype(np.int64)]
        view, committed = self._places
        return not any(_same(view + at, committed + at, PAGE) for at in (sample * PAGE).tolist())

    def _candidates(self) -> list[tuple[int, int]]:
        length = len(self.view)
        address, _ = self._places
        if tells() is WriteDetection.SCAN:
            found = linux.private_pages(_pagemap().number, address, length)
            return [(start - address, end - address) for start, end in found]
        return by_bits(_pagemap().number, address, length)


@functools.cache
def tells() -> WriteDetection:
    """Return how this system reports the written pages of a private mapping."""
    for way, ask in ((WriteDetection.SCAN, linux.private_pages), (WriteDetection.BITS, by_bits)):
        try:
            committed, view = _map_twice(2 * SYSTEM_PAGE)
            committed[0] = view[SYSTEM_PAGE]  # one page is read, and not written to
            view[0] = 1
            address = view.ctypes.data
            start = address if way is WriteDetection.SCAN else 0
            if ask(_pagemap().number, address, len(view)) == [(start, start + SYSTEM_PAGE)]:
                return way
        except (OSError, AttributeError):
            continue  # another platform, or an older kernel, or /proc is not there
    return WriteDetection.NOTHING


_process: int = 0
_opened: Descriptor | None = None


def _pagemap() -> Descriptor:
    """Return the pagemap of this process; after a fork the one opened before is the parent's."""
    global _process, _opened
    if _opened is None or _process != os.getpid():
        _process, _opened = os.getpid(), Descriptor("/proc/self/pagemap", os.O_RDONLY)
    return _opened


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


def by_bits(pagemap: int, address: int, length: int) -> list[tuple[int, int]]:
    """Return runs of pages as ``linux.private_pages`` does, by bit 61 of each page. They are
    counted from ``address`` on."""
    count, first = length // SYSTEM_PAGE, address // SYSTEM_PAGE
    bits = np.frombuffer(os.pread(pagemap, 8 * count, 8 * first), np.uint64)
    # A page that was written to may be swapped out by now.
    copied = (bits & (_PRESENT | _SWAPPED) != 0) & (bits & _FILE == 0)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], copied, [False]])))
    return [(start, end) for start, end in (edges.reshape(-1, 2) * SYSTEM_PAGE).tolist()]


def _differing(left: Bytes, right: Bytes, run: Run) -> NDArray[np.int64]:
    """Return the pages of a run in which two memories differ."""
    found = []
    for start in range(*run, _BLOCK):
        end = min(start + _BLOCK, run[1])
        ours, theirs = (
            each[start:end].view(np.uint64).reshape(-1, PAGE // 8) for each in (left, right)
        )
        differs = (ours[:, :_LINE] != theirs[:, :_LINE]).any(axis=1)
        if not differs.all():
            alike = np.flatnonzero(~differs) if 2 * differs.sum() > len(differs) else slice(None)
            differs[alike] = (ours[alike] != theirs[alike]).any(axis=1)
        found.append(np.flatnonzero(differs) + start // PAGE)
    return np.concatenate(found)


@functools.cache
def _memcmp() -> Callable[[int, int, int], int]:
    call = ctypes.PyDLL(None).memcmp  # keeps Python's lock: releasing it takes longer
    call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return call


def _same(left: int, right: int, length: int) -> bool:
    return _memcmp()(left, right, length) == 0
