"""System calls that fail on purpose, below Python: ``calls.c``, built and driven.

In a process that was started with ``environment()`` each call below a directory is counted, by what
it does and where, and one of them, or all from one on, fails with an errno of choice.
"""

from __future__ import annotations

import atexit
import ctypes
import enum
import errno
import functools
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path


class Call(enum.IntEnum):
    """A kind of call, as ``calls.c`` has it; ``ANY`` and ``ANY_CHANGE``: see there."""

    ANY_CHANGE = -2
    ANY = -1
    OPEN = 0
    CREATE = 1
    CLOSE = 2
    READ = 3
    WRITE = 4
    FSYNC = 5
    FDATASYNC = 6
    TRUNCATE = 7
    ALLOCATE = 8
    LINK = 9
    RENAME = 10
    UNLINK = 11
    MKDIR = 12
    RMDIR = 13
    STAT = 14
    FSTAT = 15
    LIST = 16
    LOCK = 17
    MAP = 18
    STATFS = 19
    CHMOD = 20
    UTIME = 21
    ACCESS = 22
    READLINK = 23


class Where(enum.IntEnum):
    """The pools, or elsewhere: where checkpoints are."""

    POOL = 0
    FILES = 1


_CHANGES = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES)
_LOOKS = (errno.EIO, errno.EACCES, errno.ESTALE)
_NAMES = (*_LOOKS, errno.ENOTDIR, errno.ELOOP)

ERRORS = {
    Call.OPEN: (*_NAMES, errno.EMFILE),
    Call.CREATE: (*_CHANGES, errno.EMFILE),
    Call.CLOSE: (errno.EIO, errno.EINTR),
    Call.READ: (errno.EIO, errno.ESTALE),
    Call.WRITE: _CHANGES,
    Call.FSYNC: (errno.EIO, errno.ENOSPC),
    Call.FDATASYNC: (errno.EIO, errno.ENOSPC),
    Call.TRUNCATE: _CHANGES,
    Call.ALLOCATE: (errno.EIO, errno.ENOSPC),
    Call.LINK: (*_CHANGES, errno.EMLINK, errno.EPERM),
    Call.RENAME: (*_CHANGES, errno.ENOENT),
    Call.UNLINK: (errno.EIO, errno.EROFS, errno.EACCES),
    Call.MKDIR: _CHANGES,
    Call.RMDIR: (errno.EIO, errno.EROFS),
    Call.STAT: _NAMES,
    Call.FSTAT: (errno.EIO, errno.ESTALE),
    Call.LIST: _NAMES,
    Call.LOCK: (errno.EIO, errno.ENOLCK),
    Call.MAP: (errno.ENOMEM, errno.ENODEV),
    Call.STATFS: (errno.EIO, errno.ENOSYS),
    Call.CHMOD: (errno.EPERM, errno.EROFS),
    Call.UTIME: (errno.EPERM, errno.EROFS),
    Call.ACCESS: (errno.EIO, errno.EACCES),
    Call.READLINK: (errno.EIO, errno.ESTALE),
}
"""What each kind of call may fail with on real machines."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Call ``number`` of a kind at a place fails, and all after it if ``for_ever``."""

    call: Call
    where: Where
    number: int
    error: int
    for_ever: bool

    def __str__(self) -> str:
        name, end = errno.errorcode[self.error], " and all after it" if self.for_ever else ""
        return f"{self.call.name} {self.number} at {self.where.name}{end}: {name}"

    def plain(self) -> list[int]:
        """For JSON: ``Fault.of`` takes it."""
        return [self.call, self.where, self.number, self.error, self.for_ever]

    @staticmethod
    def of(plain: list[int]) -> Fault:
        call, where, number, error, for_ever = plain
        return Fault(Call(call), Where(where), number, error, bool(for_ever))


def why_not() -> str:
    """Why calls cannot be made to fail here; nothing if they can."""
    if shutil.which("cc") is None:
        return "no C compiler (cc) to build tests/faults/calls.c with"
    return "" if os.uname().sysname == "Linux" else "calls.c is for Linux"


@functools.cache
def environment() -> dict[str, str]:
    """For a process in which calls are to fail."""
    folder = tempfile.mkdtemp(prefix="portus-faults-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = os.path.join(folder, "calls.so")
    source = Path(__file__).with_name("calls.c")
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", library, source],
        check=True,
    )
    return {"LD_PRELOAD": library}


# In that process.


def begin(root: str) -> None:
    """Count calls below ``root`` from now on."""
    _library().faults_begin(os.fsencode(os.path.realpath(root)))


def arm(fault: Fault) -> None:
    _library().faults_arm(fault.call, fault.where, fault.number, fault.error, int(fault.for_ever))


def end() -> None:
    """Let every call through again."""
    _library().faults_end()


def counts() -> list[tuple[Call, Where, int]]:
    """How many calls there were of each kind at each place."""
    every = [(call, where) for call in Call if call >= 0 for where in Where]
    found = [(*each, _library().faults_count(*each)) for each in every]
    return [(call, where, count) for call, where, count in found if count]


def hit() -> str:
    """The first call that failed: its kind and path. Nothing if none did."""
    library = _library()
    if not library.faults_hits():
        return ""
    return f"{Call(library.faults_call()).name} {os.fsdecode(library.faults_path())}"


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.faults_count.restype = library.faults_hits.restype = ctypes.c_long
    library.faults_arm.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long] + [ctypes.c_int] * 2
    library.faults_path.restype = ctypes.c_char_p
    return library
