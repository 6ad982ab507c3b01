"""Linux calls that Python does not offer, through libc. Each is looked up at its first use.

They raise ``OSError`` as the functions of ``os`` do, and callers translate it. All of them let
other threads run meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import struct
import sys
from typing import Final

with contextlib.suppress(ImportError):  # Windows has none
    import fcntl  # not on a thread: a fork in the midst breaks a child

PROT_NONE: Final = 0
PROT_READ: Final = 1
PROT_WRITE: Final = 2
MAP_SHARED: Final = 1
MAP_PRIVATE: Final = 2
MAP_SHARED_VALIDATE: Final = 3
MAP_FIXED: Final = 0x10
MAP_ANONYMOUS: Final = 0x20
MAP_NORESERVE: Final = 0x4000
MAP_SYNC: Final = 0x80000
MREMAP_MAYMOVE: Final = 1
MREMAP_FIXED: Final = 2
MADV_DONTNEED: Final = 4
MADV_DONTFORK: Final = 10
MADV_HUGEPAGE: Final = 14
MADV_POPULATE_WRITE: Final = 23
MADV_COLLAPSE: Final = 25

EXT_TYPE: Final = 0xEF53
XFS_TYPE: Final = 0x58465342
TMPFS_TYPE: Final = 0x01021994
RAMFS_TYPE: Final = 0x858458F6
LOCAL_TYPES: Final = frozenset(
    {
        *(EXT_TYPE, XFS_TYPE, TMPFS_TYPE, RAMFS_TYPE),
        *(0x9123683E, 0xF2F52010, 0xCA451A4E, 0x2FC12FC1),  # btrfs, f2fs, bcachefs, ZFS
        0x794C7630,  # overlay
    }
)
"""File systems whose files only this kernel opens."""

_pointer = ctypes.c_void_p
_MAP_FAILED: Final = _pointer(-1).value
_SYNC_FILE_RANGE_WRITE: Final = 2
_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
_ALLOCATE_MAX: Final = 256 << 20
_ALLOCATE_MIN: Final = 64 << 10
"""Bytes per fallocate. On tmpfs a signal undoes the whole call, so under a timer that fires often a
long one would never end: each signal makes the next ones shorter."""

_XFS_GEOMETRY: Final = struct.Struct("=88xiI16x")
_XFS_IOC_FSGEOMETRY_V4: Final = (2 << 30) | (_XFS_GEOMETRY.size << 16) | (ord("X") << 8) | 124
_XFS_REFLINK: Final = 1 << 20
"""Source: ``xfs_fsop_geom_v4`` and ``XFS_FSOP_GEOM_FLAGS_REFLINK`` in the kernel's xfs_fs.h."""


def map_pages(
    address: int, length: int, protection: int, flags: int, place: tuple[int, int]
) -> int:
    """Call mmap(2), and return the address. ``place``: (descriptor, file offset), or (-1, 0)."""
    call, (number, offset) = _libc().mmap, place
    call.restype = _pointer
    size = ctypes.c_size_t(length)
    result = call(_pointer(address), size, protection, flags, number, ctypes.c_int64(offset))
    if result == _MAP_FAILED:
        raise _error()
    return int(result)


def unmap_pages(address: int, length: int) -> None:
    """Call munmap(2)."""
    _do("munmap", _pointer(address), ctypes.c_size_t(length))


def move_pages(address: int, length: int, target: int) -> None:
    """Call mremap(2): move these pages to ``target``, in place of the mapping there."""
    call, size = _libc().mremap, ctypes.c_size_t(length)
    call.restype = _pointer
    flags = MREMAP_MAYMOVE | MREMAP_FIXED
    if call(_pointer(address), size, size, flags, _pointer(target)) == _MAP_FAILED:
        raise _error()


def advise_pages(address: int, length: int, advice: int) -> None:
    """Call madvise(2)."""
    _do("madvise", _pointer(address), ctypes.c_size_t(length), advice)


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Ask the kernel to begin writing dirty pages. Only a hint: errors show at the next sync.

    May block for a moment while the device's queue is full.
    """
    span = (ctypes.c_int64(offset), ctypes.c_int64(length))
    _libc().sync_file_range(descriptor, *span, _SYNC_FILE_RANGE_WRITE)


def allocate(descriptor: int, offset: int, length: int) -> None:
    """Call fallocate(2), in pieces: fill holes with zeros, and lengthen the file.

    EOPNOTSUPP where the file system (or this platform) cannot.
    """
    end, piece_max = offset + length, _ALLOCATE_MAX
    while offset < end:
        piece = min(end - offset, piece_max)
        if _fallocate(descriptor, 0, offset, piece):
            offset += piece
        else:
            piece_max = max(piece_max // 4, _ALLOCATE_MIN)


def punch(descriptor: int, offset: int, length: int) -> None:
    """Call fallocate(2): return the blocks of a range to the file system; the range reads as zero.

    EOPNOTSUPP where the file system (or this platform) cannot.
    """
    while not _fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, offset, length):
        pass


def _fallocate(descriptor: int, mode: int, offset: int, length: int) -> bool:
    """Return False if a signal interrupted the call."""
    if sys.platform != "linux":
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    try:
        _do("fallocate", descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(length))
    except InterruptedError:
        return False
    return True


def holes(descriptor: int, size: int) -> list[tuple[int, int]]:
    """Return offset and length of the ranges below ``size`` without blocks, by lseek(2); none on
    other platforms. Some may have blocks that were never stored to."""
    found: list[tuple[int, int]] = []
    if sys.platform != "linux":
        return found
    end = 0
    while end < size:
        start = os.lseek(descriptor, end, os.SEEK_HOLE)
        if start >= size:
            break
        try:
            end = min(size, os.lseek(descriptor, start, os.SEEK_DATA))
        except OSError as error:
            if error.errno != errno.ENXIO:  # no data behind it
                raise
            end = size
        found.append((start, end - start))
    return found


def file_system_type(descriptor: int) -> int | None:
    """Return ``f_type`` of fstatfs(2), or None where this platform has none."""
    if sys.platform != "linux":
        return None
    answer = (ctypes.c_long * 64)()  # Larger than struct statfs, of which f_type is the first.
    if _libc().fstatfs(descriptor, answer) != 0:
        raise _error()
    return int(answer[0])


def may_share_blocks(descriptor: int) -> bool:
    """Return True unless the xfs that holds the file says that it was made without reflink."""
    try:
        answer = fcntl.ioctl(descriptor, _XFS_IOC_FSGEOMETRY_V4, bytes(_XFS_GEOMETRY.size))
    except OSError:
        return True
    _version, flags = _XFS_GEOMETRY.unpack(answer)
    return bool(flags & _XFS_REFLINK)


_USERFAULTFD: Final = {"x86_64": 323, "aarch64": 282}
"""The number of the system call, by machine."""

_UFFD_API: Final = 0xAA
_UFFD_USER_MODE_ONLY: Final = 1
_UFFD_WP: Final = 2
_UFFD_FEATURES: Final = 1 << 15 | 1 << 13  # WP_ASYNC, WP_UNPOPULATED
_UFFDIO_API: Final = 3 << 30 | 24 << 16 | _UFFD_API << 8 | 0x3F
_UFFDIO_REGISTER: Final = 3 << 30 | 32 << 16 | _UFFD_API << 8
_UFFDIO_WRITEPROTECT: Final = 3 << 30 | 24 << 16 | _UFFD_API << 8 | 6
_PAGEMAP_SCAN: Final = 3 << 30 | 96 << 16 | ord("f") << 8 | 16
_PAGE_IS_WRITTEN: Final = 2
_REGIONS: Final = 256
_PROCMAP: Final = struct.Struct("=5Q64x")
"""``struct procmap_query``: its size, flags, the address; start and end of the mapping found."""
_PROCMAP_QUERY: Final = 3 << 30 | _PROCMAP.size << 16 | ord("f") << 8 | 17
_PROCMAP_SHARED: Final = 8 | 16  # VMA_SHARED, COVERING_OR_NEXT_VMA
"""Source: linux/userfaultfd.h and linux/fs.h."""


def open_write_watch() -> int:
    """Call userfaultfd(2): it notes writes without a handler (``WP_ASYNC``, Linux 6.7), and needs
    no privilege. Return a descriptor, for this process's memory: no forked child may use it."""
    number = _USERFAULTFD.get(os.uname().machine) if sys.platform == "linux" else None
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    descriptor = int(_libc().syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _UFFD_USER_MODE_ONLY))
    if descriptor < 0:
        raise _error()
    try:
        fcntl.ioctl(descriptor, _UFFDIO_API, struct.pack("=QQQ", _UFFD_API, _UFFD_FEATURES, 0))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def register_pages(watch: int, start: int, length: int) -> None:
    """Allow ``protect_pages`` for whole pages, until they are unmapped."""
    fcntl.ioctl(watch, _UFFDIO_REGISTER, struct.pack("=QQQQ", start, length, _UFFD_WP, 0))


def protect_pages(watch: int, start: int, length: int, *, on: bool) -> None:
    """Start (``on``) or stop noting writes to these pages. ENOENT: not registered."""
    fcntl.ioctl(watch, _UFFDIO_WRITEPROTECT, struct.pack("=QQQ", start, length, int(on)))


def dirty_pages(pagemap: int, start: int, length: int) -> list[tuple[int, int]]:
    """Return runs of pages (start, end) that were written since they were protected. ``pagemap``:
    ``/proc/self/pagemap``, opened by this process."""
    found: list[tuple[int, int]] = []
    regions = (ctypes.c_uint64 * (3 * _REGIONS))()
    end = start + length
    while start < end:
        wanted = (96, 0, start, end, 0, ctypes.addressof(regions), _REGIONS, 0)
        # Of categories: those inverted, all needed, of which one is, and that tell runs apart.
        categories = 0, _PAGE_IS_WRITTEN, 0, _PAGE_IS_WRITTEN
        asked = bytearray(struct.pack("=12Q", *wanted, *categories))
        count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, asked)
        found += [(regions[3 * i], regions[3 * i + 1]) for i in range(count)]
        # ``walk_end``, before ``end`` if there are more regions than fit into one answer.
        start = struct.unpack_from("=Q", asked, 32)[0]
    return found


def shared_mappings(maps: int, start: int, end: int) -> list[tuple[int, int]]:
    """Return memory (start, end) that is mapped to be shared with other processes, in order: all
    mappings that have bytes from ``start`` to before ``end``. ``maps``: ``/proc/self/maps``, opened
    by this process. ENOTTY before Linux 6.11."""
    found: list[tuple[int, int]] = []
    while True:  # ends: each turn begins where the last one's memory ends
        asked = _PROCMAP.pack(_PROCMAP.size, _PROCMAP_SHARED, start, 0, 0)
        try:
            answer = fcntl.ioctl(maps, _PROCMAP_QUERY, asked)
        except OSError as error:
            if error.errno != errno.ENOENT:  # no more of it
                raise
            return found
        _, _, _, low, high = _PROCMAP.unpack(answer)
        if low >= end:
            return found
        found.append((low, high))
        start = high


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _do(name: str, *arguments: object) -> None:
    """Call a function that returns 0. Raise ``OSError`` if it returns anything else."""
    if getattr(_libc(), name)(*arguments) != 0:
        raise _error()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
