"""Files of the file systems of this machine, and the choice of a medium for each.

Addresses are used where a block that was allocated is overwritten in place: ext2, ext3, ext4,
tmpfs, and xfs made without reflink. Everywhere else (network and FUSE file systems, overlay,
btrfs, ZFS, shared xfs blocks) a store may need space or a peer, which through an address would be
SIGBUS; there pwrite is used, whose failure is an error.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator
from typing import Final

from portus.engine.media.file_calls import (
    FileSystemTraits,
    Sync,
    data_sync,
    file_error,
    file_system_of,
)
from portus.engine.media.process import Descriptor
from portus.errors import MediumError, PortusError, UsageError
from portus.reach.media.dax import DaxDevice, DaxFile, accepts_map_sync, is_device, open_device
from portus.reach.media.file import MappedFile, PlainFile, UncachedFile
from portus.reach.media.pmem import Processor
from portus.reach.media.pool import FileStatus

_LOG: Final = logging.getLogger("portus")


def write_whole(path: str, data: bytes) -> None:
    """Write a file durably. It is complete or absent whenever the power fails, and its directory
    exists already. Raises ``MediumError``."""
    files, fresh = LocalFiles(), f"{path}.{os.getpid()}.new"
    try:
        with naming_call("write", path), open(fresh, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        files.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(MediumError):
            files.remove(fresh)
        raise
    files.sync(os.path.dirname(path))


class LocalFiles:
    """A ``FileSystem`` through the operating system. It has no state, so any number may exist."""

    def __init__(
        self, *, mapped: bool = True, sync: Sync = data_sync, cpu: Processor | None = None
    ) -> None:
        """mapped: use addresses where the file system allows. sync, cpu: called by ``persist``, for
        files and for persistent memory; tests pass ones that fail."""
        self._mapped: Final = mapped
        self._sync: Final = sync
        self._cpu: Final = cpu

    def create(self, path: str, size: int) -> PlainFile:
        """Create a file whose size is durable too. If it does not fit, remove its name again."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        with naming_call("create", path):
            descriptor = Descriptor(path, flags)
        try:
            # Grown before it is mapped, so that addresses are set aside for its real size.
            PlainFile(
                descriptor, file_system_of(descriptor.number, descriptor.path)[0], writable=True
            ).grow(size)
            return self._medium(descriptor, writable=True)
        except MediumError:
            descriptor.close()
            self.remove(path)
            raise

    def open(self, path: str, *, writable: bool) -> PlainFile | DaxDevice:
        """Open a file or a device. Raise ``UsageError`` for anything else."""
        with naming_call("open", path):
            mode = os.stat(path).st_mode
        if stat.S_ISCHR(mode) and is_device(path):
            return open_device(path, writable=writable, cpu=self._cpu)
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path}: expected a regular file, found {_kind(mode)}; give a file")
        flags = os.O_RDWR if writable else os.O_RDONLY
        with naming_call("open", path):
            descriptor = Descriptor(path, flags)
        return self._medium(descriptor, writable=writable)

    def open_uncached(self, path: str) -> UncachedFile | PlainFile | DaxDevice:
        """Open a file for reading the bytes of the disk, past the page cache. Fall back to ``open``
        where that is not possible (memory, devices, some network file systems)."""
        with contextlib.suppress(OSError, AttributeError):  # no O_DIRECT on this platform
            if stat.S_ISREG(os.stat(path).st_mode):
                descriptor = Descriptor(path, os.O_RDONLY | os.O_DIRECT)
                try:
                    return UncachedFile(descriptor)
                except OSError:
                    descriptor.close()
                    raise
        return self.open(path, writable=False)

    def link(self, source: str, target: str) -> None:
        """Make a hard link. Raise ``MediumError`` where there are none too (EPERM, EXDEV)."""
        with naming_call(f"link {source} as", target):
            os.link(source, target)

    def replace(self, source: str, target: str) -> None:
        """Rename by rename(2): both names must be on one file system."""
        with naming_call(f"rename {source} to", target):
            os.replace(source, target)

    def remove(self, path: str) -> None:
        """Remove a name by unlink(2)."""
        with naming_call("remove", path), contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def sync(self, directory: str) -> None:
        """Sync the directory by fsync."""
        with naming_call("sync", directory):
            descriptor = Descriptor(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor.number)
        except OSError as error:
            # EINVAL: a file system whose directories have nothing to sync (some network ones).
            if error.errno != errno.EINVAL:
                raise file_error("sync", directory, error) from error
        finally:
            descriptor.close()

    def entries(self, directory: str) -> list[str]:
        """Return names of every kind, hidden ones included."""
        with naming_call("list", directory), contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(directory))
        return []

    def status(self, path: str) -> FileStatus | None:
        """Return the status of a file, or None, also for a broken symbolic link."""
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP and os.path.islink(path):
                return None  # a cycle of links; other errors leave open whether there is a file
            raise file_error("look at", path, error) from error
        identity = (found.st_dev, found.st_ino)
        return FileStatus(identity, found.st_nlink, found.st_size, found.st_mtime_ns)

    def _medium(self, descriptor: Descriptor, *, writable: bool) -> PlainFile:
        """Return the best medium for the file of ``descriptor``, closed if there is none."""
        try:
            file_system, in_place = file_system_of(descriptor.number, descriptor.path)
            if writable and self._mapped and in_place:
                mapped = self._mapped_medium(descriptor, file_system)
                if mapped is not None:
                    return mapped
            return PlainFile(descriptor, file_system, writable=writable, sync=self._sync)
        except MediumError:
            descriptor.close()
            raise

    def _mapped_medium(
        self, descriptor: Descriptor, file_system: FileSystemTraits
    ) -> MappedFile | None:
        """Return a medium with addresses, or None after a warning if it cannot be mapped."""
        # Other file systems refuse MAP_SYNC, so this tells which are on persistent memory.
        if not file_system.volatile and accepts_map_sync(descriptor):
            try:
                return DaxFile(descriptor, file_system, cpu=self._cpu)
            except MediumError as error:
                _LOG.warning("%s; persisted by the file system, which is slower", error.strerror)
        try:
            return MappedFile(descriptor, file_system, sync=self._sync)
        except MediumError as error:
            _LOG.warning("%s; written to by pwrite, which is slower", error.strerror)
        return None


@contextlib.contextmanager
def naming_call(operation: str, path: str) -> Iterator[None]:
    """Turn an error of the system into a ``MediumError`` that names the operation and the path."""
    try:
        yield
    except PortusError:
        raise  # from the source of the bytes to write
    except OSError as error:
        raise file_error(operation, path, error) from error


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a pipe",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")
