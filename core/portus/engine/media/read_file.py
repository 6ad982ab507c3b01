"""``ReadFile``: a regular file that can only be read; ``Pace``: reading at a bounded speed."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from portus.engine.media.base import PLAIN_FILE, MediumInfo, ReadOnlyMedium
from portus.engine.media.file_calls import file_error
from portus.engine.media.process import Descriptor
from portus.errors import MediumError, UsageError

SECTOR: Final = 512
"""Bytes that a disk writes as one; a larger store can tear at any multiple of it."""


class ReadFile(ReadOnlyMedium):
    """A file as a ``Medium`` that is only read. Owns its descriptor. Loads use preadv, so a bad
    sector or a truncated file is an error, not a signal."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor: Final = descriptor
        self._lock: Final = threading.Lock()
        self._known = 0
        self._known = self.size

    @property
    def path(self) -> str:
        return self._descriptor.path

    @property
    def info(self) -> MediumInfo:
        return MediumInfo(PLAIN_FILE, self.path, SECTOR, False, False)

    @property
    def size(self) -> int:
        """The file's present bytes, also after another process made it grow. ``MediumError``."""
        return self._status().st_size

    def load(self, offset: int, target: memoryview) -> None:
        """Load with preadv. Raise ``MediumError`` if the file was truncated meanwhile."""
        self._check_range(offset, target.nbytes)
        if target.readonly or not target.c_contiguous:
            raise UsageError(f"{self.path}: load into memory that is read-only or has gaps")
        if target.nbytes == 0:
            return
        try:
            found = self._read(offset, target.cast("B"))
        except OSError as error:
            raise file_error(
                "load", self.path, error, f"{target.nbytes} bytes at {offset}"
            ) from error
        if found < target.nbytes:
            raise self._truncation(offset + target.nbytes)

    def close(self) -> None:
        """Close the descriptor. No thread may be inside another call."""
        self._descriptor.close()

    def _refusal(self) -> MediumError:
        return MediumError(errno.EBADF, f"{self.path}: opened for reading")

    def _check_range(self, offset: int, length: int) -> None:
        end = offset + length
        # Another process may have made it grow; the size known already needs no call.
        if end > self._known:
            self._known = max(self._known, self.size)
        if offset < 0 or end > self._known:
            raise UsageError(
                f"{self.path}: bytes {offset} to {end} are outside the file of {self._known} bytes"
            )

    def _truncation(self, expected: int) -> MediumError:
        found = self._status().st_size
        return MediumError(
            errno.EIO,
            f"{self.path}: expected bytes up to {expected}, found the end at {found}: another "
            "program truncated the file; restore it from a copy",
        )

    def _status(self) -> os.stat_result:
        try:
            return os.fstat(self._descriptor.number)
        except OSError as error:
            raise file_error("look at", self.path, error) from error

    def _read(self, offset: int, target: memoryview) -> int:
        """Fill ``target``; return the bytes found, fewer at the end of the file."""
        # One call reads at most 2 GiB less a page.
        done = count = self._read_once(offset, target)
        while count and done < len(target):
            count = self._read_once(offset + done, target[done:])
            done += count
        return done

    def _read_once(self, offset: int, target: memoryview) -> int:
        number = self._descriptor.number
        if hasattr(os, "preadv"):
            return os.preadv(number, [target], offset)
        with self._lock:  # Windows: one file position for all threads.
            os.lseek(number, offset, os.SEEK_SET)
            data = os.read(number, len(target))
        target[: len(data)] = data
        return len(data)


Wait = Callable[[float], object]
"""Receives seconds to wait, 0 or more. An error that it raises ends the paced work."""


class Pace:
    """Waits so that no second has more reads than the limit. Idle time earns no credit."""

    def __init__(self, bytes_per_s: int, wait: Wait = time.sleep) -> None:
        self._bytes_per_s: Final = bytes_per_s
        self._wait: Final = wait
        self._free_s = time.monotonic()

    def take(self, size: int) -> None:
        """Wait until ``size`` bytes may be read. Raises the errors of ``wait``."""
        now_s = time.monotonic()
        self._wait(max(0.0, self._free_s - now_s))
        self._free_s = max(self._free_s, now_s) + size / self._bytes_per_s
