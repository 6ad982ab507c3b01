"""The memory of this process that was written since a moment, and the memory that other processes
share, as the kernel reports it.

Linux 6.7 and later: pages are protected (userfaultfd with ``WP_ASYNC``); a write to one continues
at once, and leaves a note that ``PAGEMAP_SCAN`` finds. No write is missed, by this process, or by
the kernel for it; writes of devices to memory are not seen. Memory that other processes may map is
not watched: this process's pages do not show their writes.

Cost: nearly nothing for huge pages; for pages of 4 KiB about half of the cost of copying them. So
``make_huge`` asks for huge ones.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import threading
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from portus.engine.media import linux, process

Column = NDArray[np.int64]
Flags = NDArray[np.bool_]
Run = tuple[int, int]
"""Start and end, in bytes, of memory."""

PAGE: Final = os.sysconf("SC_PAGESIZE") if hasattr(os, "sysconf") else 4096
"""Bytes of a page of this processor; the page of a pool may differ."""

HUGE: Final = 2 << 20

_MAPS: Final = "/proc/self/maps"
_MAPS_MAX: Final = "/proc/sys/vm/max_map_count"
_SHARED: Final = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...s", re.MULTILINE)


class WriteWatch:
    """Notes writes to some pages from now on, until ``close``. Made by ``watch``."""

    def __init__(self, kernel: _Kernel, runs: list[Run]) -> None:
        self._kernel: Final = kernel
        self._runs: Final = runs
        self._ended: Final = threading.Lock()

    def written_runs(self) -> Column:
        """Return the runs of pages that were written, in order: (n, 2). Raises ``OSError``."""
        pagemap = self._kernel.pagemap.number
        runs = [linux.dirty_pages(pagemap, start, end - start) for start, end in self._runs]
        return np.array(list(itertools.chain(*runs)), np.int64).reshape(-1, 2)

    def close(self) -> None:
        """Stop noting writes, which then cost nothing more. A second call does nothing."""
        if self._ended.acquire(blocking=False):
            for start, end in self._runs:
                with contextlib.suppress(OSError):  # pages unmapped meanwhile are not protected
                    linux.protect_pages(self._kernel.watch, start, end - start, on=False)
            self._kernel.busy.release()


def watch(address: Column, length: Column) -> WriteWatch | None:
    """Watch the pages of some memory. Return None if the kernel refuses, if it is not private
    memory, or during another watch: the end of one would blind the other."""
    kernel = _here()
    if kernel is None or not kernel.busy.acquire(blocking=False):
        return None
    runs = pages_of(address, length)
    made = WriteWatch(kernel, runs)
    try:
        for run in runs:
            kernel.protect(run)
    except OSError:
        made.close()
        return None
    return made


def can_watch() -> bool:
    """Return True if the kernel supports it."""
    return _here() is not None


def pages_of(address: Column, length: Column) -> list[Run]:
    """Return the pages that hold some memory, as runs in order; neighbours joined."""
    order = np.argsort(address, kind="stable")
    start = address[order] // PAGE * PAGE
    end = np.maximum.accumulate(-(-(address[order] + length[order]) // PAGE) * PAGE)
    first = np.flatnonzero(np.append(True, start[1:] > end[:-1])) if len(order) else order
    last = np.append(first[1:], len(order))[: len(first)] - 1
    return list(zip(start[first].tolist(), end[last].tolist(), strict=True))


def exposure(address: Column, length: Column) -> Flags:
    """Return a mask of the memory that other processes may have too, by a shared mapping, and may
    write at any moment; all False where the system does not say. Address 0 stands for no memory."""
    # The kernel is asked, not torch: ``is_shared()`` does not know of memory that numpy or mmap
    # made, and says yes for private mappings of files.
    there = address[address > 0]
    if not len(there):
        return np.zeros(len(address), np.bool_)
    shared = _shared_runs(int(there.min()), int((address + length).max()))
    runs = np.array(shared, np.uint64).reshape(-1, 2)
    low = np.minimum(runs, np.iinfo(np.int64).max).astype(np.int64)
    return meet(low, address, address + length)


def _shared_runs(start: int, end: int) -> list[Run]:
    """Return all shared memory with bytes from ``start`` to before ``end``. The text has a line for
    each mapping, hundreds with torch, so it is the last resort: a millisecond, in each save."""
    try:
        with open(_MAPS, "rb", buffering=0) as maps:
            with contextlib.suppress(OSError):
                return linux.shared_mappings(maps.fileno(), start, end)
            # Before Linux 6.11 there is only the text.
            found = [(int(low, 16), int(high, 16)) for low, high in _SHARED.findall(maps.read())]
            return [(low, high) for low, high in found if low < end and start < high]
    except OSError:
        return []


def meet(runs: Column, start: Column, end: Column) -> Flags:
    """Return a mask of the ranges that meet a run; runs (n, 2) are in order, and apart."""
    if not len(runs):
        return np.zeros(len(start), np.bool_)
    first = np.searchsorted(runs[:, 1], start, "right")
    starts = np.append(runs[:, 0], np.iinfo(np.int64).max)
    meets: Flags = (starts[first] < end) & (start < end)
    return meets


def make_huge(address: Column, length: Column) -> Iterator[None]:
    """Ask for huge pages under some memory, one with each step; the kernel may refuse. Blocks."""
    for start, end in pages_of(address, length):
        # One at a time, so that the caller may stop: each copies 2 MiB, and blocks until then.
        for page in range(-(-start // HUGE) * HUGE, end // HUGE * HUGE, HUGE):
            yield
            with contextlib.suppress(OSError):
                linux.advise_pages(page, HUGE, linux.MADV_COLLAPSE)


class _Kernel:
    """The two descriptors for its queries; of this process alone."""

    def __init__(self) -> None:
        """Raise ``OSError`` if the kernel refuses."""
        self.busy: Final = threading.Lock()
        with process.no_fork():
            self.watch: Final = linux.open_write_watch()
            process.leave_in_child(self)
        self.pagemap: Final = process.Descriptor("/proc/self/pagemap", os.O_RDONLY)

    def protect(self, run: Run) -> None:
        """Note writes to these pages. Raises ``OSError``."""
        span = run[0], run[1] - run[0]
        try:
            linux.protect_pages(self.watch, *span, on=True)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
            _check_may_register(run)
            linux.register_pages(self.watch, *span)
            linux.protect_pages(self.watch, *span, on=True)

    def leave(self) -> None:
        """Close the watch in a forked child, where its descriptor is about the parent's memory."""
        global _opened
        os.close(self.watch)
        _opened = None


def _check_may_register(run: Run) -> None:
    """Raise ``OSError`` unless all of it is private memory, and there is room for more mappings: a
    registered range is a mapping of its own."""
    count, at = 0, run[0]
    with open(_MAPS, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            count += 1
            span, access, _, _, inode, *_ = line.split(maxsplit=5)
            start, end = (int(number, 16) for number in span.split("-"))
            if start <= at < end and access[3] == "p" and inode == "0":
                at = end
    with open(_MAPS_MAX, encoding="utf-8") as limit:
        if at < run[1] or count > int(limit.read()) // 2:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))


_opening: Final = threading.Lock()
_opened: _Kernel | OSError | None = None


def _here() -> _Kernel | None:
    """Return the kernel interface of this process, opened once."""
    global _opened
    with _opening:
        if _opened is None:
            try:
                _opened = _Kernel()
            except OSError as error:
                _opened = error
        return _opened if isinstance(_opened, _Kernel) else None
