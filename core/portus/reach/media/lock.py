"""Locks of a pool's writer, and of the readers of its versions: ``FileLocks`` between processes,
``ProcessLocks`` within one.

Theory. A lock is an open-file-description lock on one byte far behind the end of the pool file: the
system releases it when the last descriptor of that description is closed, even if its holder is
killed. Forked children close theirs at once (see ``process``). Writer lock and pins are on two
descriptions, because a description never conflicts with itself, and the writer asks about its own
pins too. It asks without taking anything, so a reader's pin never fails by being looked at.

A pin alone does not keep a version: the reader then reads the root again, and finds the version
there, or gone. The writer first removes the version from the root, and then asks for pins.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import sys
import threading
import time
from collections import Counter
from typing import Final

from portus.engine.media.file_calls import file_error
from portus.engine.media.process import Descriptor
from portus.errors import BusyError, MediumError, UsageError

PIN_BASE: Final = 1 << 62
"""The byte of version 0's pin; that of version n is n bytes after it."""

WRITER_BYTE: Final = PIN_BASE - 1

_VERSION_MAX: Final = PIN_BASE - 1
# The pause doubles from the one to the other: quick at first, and cheap for a long wait.
_POLL_MIN_S: Final = 0.005
_POLL_MAX_S: Final = 0.25
_QUIET_S: Final = 0.5
"""Shorter waits are not logged. A process that its parent forked just before it was killed holds
the lock for the moment until it closes its descriptors."""
_LOG: Final = logging.getLogger("portus")

_READ, _WRITE, _NONE = 0, 1, 2
"""F_RDLCK, F_WRLCK, F_UNLCK of Linux."""

_HOLDER_MAX: Final = 20
"""Bytes for the number of a process, padded with spaces."""

_FLOCK: Final = struct.Struct("@hhqqi0q")
"""``struct flock`` of 64-bit Linux: type, whence, start, length, process (0 for these locks)."""


class FileLocks:
    """Locks of the pool file at ``path``, between all processes of this machine.

    Two ``FileLocks`` of one file conflict, also inside one process. Where the platform has no
    such locks, ``acquire_writer`` raises ``UsageError`` and pins do nothing.
    """

    def __init__(self, path: str, *, writable: bool) -> None:
        self.path: Final = path
        self._writable: Final = writable
        self._lock: Final = threading.Lock()
        self._pins: Counter[int] = Counter()
        flags = os.O_RDWR if writable else os.O_RDONLY
        self._writer_file: Final = self._open(flags)
        try:
            self._pin_file: Final = self._open(os.O_RDONLY)
        except MediumError:
            self._writer_file.close()
            raise

    def describe_holder(self) -> str:
        """Return who holds the writer lock, for messages. Called only while it is held."""
        return "unknown"

    def acquire_writer(self, timeout_s: float) -> None:
        """Poll for the lock; log once, with ``describe_holder``, that this waits."""
        if not self._writable:
            raise UsageError(f"{self.path}: opened for reading; open it with writable=True")
        if not _can_lock():
            raise UsageError(
                f"{self.path}: a pool can be written on Linux only: {sys.platform} has no "
                "locks of open files; it can be read here"
            )
        number = self._writer_file.number
        begin_s, pause_s, has_said = time.monotonic(), _POLL_MIN_S, False
        # By polling: the system cannot wait for such a lock for a limited time.
        while not self._set(number, _WRITE, WRITER_BYTE):
            waited_s = time.monotonic() - begin_s
            if waited_s >= timeout_s:
                raise BusyError(
                    errno.EAGAIN,
                    f"{self.path}: another writer has held it for {timeout_s:g} s: "
                    f"{self.describe_holder()}; stop it, wait for it, or use another pool",
                )
            if waited_s >= _QUIET_S and not has_said:
                has_said = True
                _LOG.warning(
                    "%s: waiting up to %g s for the writer to close it: %s",
                    *(self.path, timeout_s, self.describe_holder()),
                )
            time.sleep(min(pause_s, timeout_s - waited_s))
            pause_s = min(2 * pause_s, _POLL_MAX_S)

    def pin(self, version: int) -> None:
        """Pin a version. Raise ``UsageError`` for an impossible version, ``BusyError`` if another
        program locked its byte."""
        byte, number = _pin_byte(version), self._pin_file.number
        with self._lock:
            # The system does not count: a second lock of this byte is the same one.
            first = self._pins[version] == 0
            if first and _can_lock() and not self._set(number, _READ, byte):
                raise BusyError(
                    errno.EAGAIN, f"{self.path}: version {version} is locked by another program"
                )
            self._pins[version] += 1

    def unpin(self, version: int) -> None:
        """Take one pin back. Raise ``UsageError`` if this object has none on the version."""
        byte, number = _pin_byte(version), self._pin_file.number
        with self._lock:
            if self._pins[version] == 0:
                raise UsageError(f"{self.path}: version {version} is not pinned here")
            self._pins[version] -= 1
            if self._pins[version] == 0:
                del self._pins[version]
                if _can_lock():
                    self._set(number, _NONE, byte)

    def pins(self) -> set[int]:
        """Return all pinned versions, without taking a lock. The system names one lock in a range;
        then both sides of it are searched."""
        if not _can_lock():
            return set(self._pins)
        found: set[int] = set()
        ranges = [(PIN_BASE, _VERSION_MAX)]
        while ranges:
            start, length = ranges.pop()
            byte = self._conflict(start, length) if length > 0 else None
            if byte is not None:
                found.add(byte - PIN_BASE)
                ranges += [(start, byte - start), (byte + 1, start + length - byte - 1)]
        return found

    def close(self) -> None:
        """Release all locks. A second call does nothing."""
        self._pins.clear()
        self._pin_file.close()
        self._writer_file.close()

    def _open(self, flags: int) -> Descriptor:
        try:
            return Descriptor(self.path, flags)
        except OSError as error:
            raise file_error("open", self.path, error) from error

    def _set(self, number: int, kind: int, byte: int) -> bool:
        """Set or release a lock. Return False if another description holds it."""
        import fcntl

        try:
            # A lock of the open file: one of the process would end when any descriptor of the file
            # is closed, and two objects of one process would not conflict.
            fcntl.fcntl(number, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise file_error("lock", self.path, error) from error
        return True

    def _conflict(self, start: int, length: int) -> int | None:
        """Return a byte that prevents a write lock of the range by the writer, or None."""
        import fcntl

        question = _FLOCK.pack(_WRITE, os.SEEK_SET, start, length, 0)
        try:
            answer = fcntl.fcntl(self._writer_file.number, fcntl.F_OFD_GETLK, question)
        except OSError as error:
            raise file_error("ask for locks of", self.path, error) from error
        kind, _, byte, _, _ = _FLOCK.unpack(answer)
        return None if kind == _NONE else max(start, int(byte))


class ProcessLocks:
    """The locks of a medium that no other process can see: all who use it share this object, and
    one of them writes. Thread-safe."""

    def __init__(self) -> None:
        self._guard: Final = threading.Lock()
        self._pins: Final[Counter[int]] = Counter()

    def acquire_writer(self, timeout_s: float) -> None:
        """Do nothing: there is no other writer."""

    def pin(self, version: int) -> None:
        """Pin a version. Raise ``UsageError`` for an impossible version."""
        _pin_byte(version)
        with self._guard:
            self._pins[version] += 1

    def unpin(self, version: int) -> None:
        """Take one pin back."""
        with self._guard:
            self._pins[version] -= 1

    def pins(self) -> set[int]:
        """Return the versions that anyone pins."""
        with self._guard:
            return set(+self._pins)

    def close(self) -> None:
        """Release all pins."""
        with self._guard:
            self._pins.clear()


class DirectoryLock(FileLocks):
    """The lock of one process of this machine on a directory, for as long as it lives: a lock of a
    file in it, which names the process."""

    def __init__(self, path: str) -> None:
        """path: of the file, which is created. Raises ``BusyError`` immediately, naming the holder,
        and ``MediumError``."""
        try:
            Descriptor(path, os.O_RDWR | os.O_CREAT, 0o600).close()
        except OSError as error:
            raise file_error("open", path, error) from error
        super().__init__(path, writable=True)
        number = self._writer_file.number
        try:
            holder = os.pread(number, _HOLDER_MAX, 0).decode("ascii", "replace").strip()
            self.acquire_writer(0)
            os.pwrite(number, f"{os.getpid():<{_HOLDER_MAX}}".encode(), 0)
        except OSError as error:
            self.close()
            if not isinstance(error, BusyError):
                raise file_error("lock", path, error) from error
            raise BusyError(
                errno.EAGAIN,
                f"{os.path.dirname(path)}: process {holder or 'unknown'} of this machine already "
                "serves it; stop that process, or serve another directory",
            ) from error


def _pin_byte(version: int) -> int:
    if not 0 <= version < _VERSION_MAX:
        raise UsageError(f"version {version}: expected 0 to {_VERSION_MAX - 1}")
    return PIN_BASE + version


def _can_lock() -> bool:
    if sys.platform != "linux":
        return False
    import fcntl

    return hasattr(fcntl, "F_OFD_SETLK")
