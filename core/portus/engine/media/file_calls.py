"""Calls on open files, their errors, and the facts of the file systems that hold them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from portus.engine.media import linux
from portus.errors import MediumError

_ZEROS: Final = bytes(1 << 20)
_VOLATILE: Final = (linux.TMPFS_TYPE, linux.RAMFS_TYPE)
_IN_PLACE: Final = (linux.EXT_TYPE, linux.TMPFS_TYPE)

OUT_OF_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that more space would resolve."""

_ADVICE: Final = {
    errno.ENOSPC: "free space on it, or save elsewhere",
    errno.EDQUOT: "raise the quota, or save elsewhere",
    errno.EFBIG: "raise `ulimit -f`, or save to a file system that allows larger files",
    errno.EIO: "the device failed: see the kernel's log",
    errno.EROFS: "mount it for writing, or save elsewhere",
    errno.EACCES: "check owner and mode of the file and its directory",
    errno.EPERM: "check owner, mode and attributes of the file and its directory",
    errno.ENOENT: "check the path",
    errno.ENXIO: "no driver serves it: `daxctl reconfigure-device --mode=devdax`, for a DAX device",
    errno.EEXIST: "choose another name",
}

Sync = Callable[[int], None]
"""Takes a descriptor, and returns when its data is on the medium; raises ``OSError``."""

data_sync: Final[Sync] = getattr(os, "fdatasync", os.fsync)


def file_error(operation: str, path: str, cause: OSError, what: str = "") -> MediumError:
    """Return ``cause`` as a ``MediumError`` that says where it happened, and what to do."""
    text = f"{path}: cannot {operation}" + (f" {what}" if what else "")
    return MediumError(cause.errno, f"{text}: {cause.strerror or cause}; {advice(cause)}")


def advice(cause: OSError) -> str:
    """Return what the operator can do about ``cause``."""
    return _ADVICE.get(cause.errno or 0, "see the kernel's log, and check that it is still mounted")


def allocate(number: int, offset: int, length: int) -> None:
    """Lengthen a file by zeros with blocks of their own; raises ``OSError``, then maybe half done.

    A length that cannot fit is refused at once: tmpfs would take all memory before it noticed.
    """
    status = os.fstatvfs(number)
    if status.f_blocks > 0 and status.f_bfree * status.f_frsize < length:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        linux.allocate(number, offset, length)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        _write_zeros(number, offset, length)


def fill_holes(number: int, size: int, *, every_block_counts: bool) -> None:
    """Give every byte its block: a copied pool is sparse where it was never written to.

    every_block_counts: of tmpfs, whose count of blocks is exact, and whose fallocate is slow.
    """
    if size == 0 or (every_block_counts and os.fstat(number).st_blocks * 512 >= size):
        return
    try:
        linux.allocate(number, 0, size)
    except OSError as error:
        # Without fallocate (ext2) there are no blocks that look like holes: this is exact.
        if error.errno != errno.EOPNOTSUPP or os.lseek(number, 0, os.SEEK_HOLE) < size:
            raise


def _write_zeros(number: int, offset: int, length: int) -> None:
    end = offset + length
    while offset < end:
        piece = memoryview(_ZEROS)[: end - offset]
        write_all(number, piece, offset)
        offset += len(piece)


def write_all(number: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset`` of an open file. Raises ``OSError``."""
    done = 0
    # One call writes at most 2 GiB less a page, and less if a signal comes or space runs out.
    while done < len(data):
        done += os.pwrite(number, data[done:], offset + done)


def free_bytes(number: int) -> int | str:
    """Return the bytes that an unprivileged process may still allocate there, for messages."""
    try:
        status = os.fstatvfs(number)
    except OSError as error:
        return f"unknown ({error.strerror})"
    return status.f_bavail * status.f_frsize


@dataclass(frozen=True, slots=True)
class FileSystemTraits:
    """The relevant facts of the file system that holds a file.

    ``volatile``: in memory, lost at power loss. ``early``: write-back is worth starting before the
    sync.
    """

    volatile: bool
    early: bool


def file_system_of(number: int, path: str) -> tuple[FileSystemTraits, bool]:
    """Return the facts of the file system of the open file ``number``, and whether it overwrites
    the file's blocks in place. Raises ``MediumError``. path: for messages."""
    try:
        found = linux.file_system_type(number)
    except OSError as error:
        raise file_error("ask for the file system of", path, error) from error
    in_place = found in _IN_PLACE or (
        # With reflink, xfs copies a shared block when it is written, and may find no space for it.
        found == linux.XFS_TYPE and not linux.may_share_blocks(number)
    )
    early = found in (linux.EXT_TYPE, linux.XFS_TYPE)
    return FileSystemTraits(volatile=found in _VOLATILE, early=early), in_place
