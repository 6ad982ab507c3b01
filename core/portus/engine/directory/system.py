"""``Linux``: the calls to the file system that publishing a file makes, and nothing else.

They are in one class so that tests can run the protocol on a simulated disk that loses power at
every step. Directories are descriptors: a directory that is renamed takes its files along. Every
foreign error becomes a ``MediumError`` here, with the path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from portus.engine.image import integrity
from portus.engine.media import linux
from portus.engine.media.file_calls import OUT_OF_SPACE, write_all
from portus.engine.media.process import Descriptor
from portus.errors import MediumError, printable

with contextlib.suppress(ImportError):  # Windows has none
    import fcntl

_TRIES: Final = 10
"""The most times that a folder is made again because it was removed before it was opened."""


@dataclass(frozen=True, slots=True)
class FileState:
    """The facts about a file. ``identity`` is the same as long as the file exists."""

    identity: tuple[int, int]
    links: int
    size: int
    mode: int
    changed_ns: int

    @property
    def is_regular(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)


class Linux:
    """The calls of this machine. Names are relative to an open directory. All raise
    ``MediumError``."""

    def open_directory(self, path: str) -> Descriptor:
        """Open the directory at ``path``."""
        with _translate(path):
            return Descriptor(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def open_folder(self, directory: Descriptor, name: str, *, create: bool) -> Descriptor | None:
        """Open a directory in ``directory``; without ``create``, return None if there is none."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        with _translate(directory.path, name):
            for left in reversed(range(_TRIES if create else 1)):
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=directory.number)
                try:
                    return Descriptor(name, flags, directory=directory)
                except FileNotFoundError:  # another process removed it, empty
                    if create and not left:
                        raise
            return None

    def create(self, directory: Descriptor, name: str) -> Descriptor:
        """Create a file for reading and writing. ``MediumError`` (EEXIST) if the name is taken."""
        with _translate(directory.path, name):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            return Descriptor(name, flags, directory=directory)

    def open(self, directory: Descriptor, name: str, *, writable: bool) -> Descriptor | None:
        """Open a regular file, never through a symbolic link; return None if it does not exist."""
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK
        with _translate(directory.path, name):
            try:
                return Descriptor(name, flags, directory=directory)
            except FileNotFoundError:
                return None

    def close(self, file: Descriptor) -> None:
        """Close a file, and release its lock. A second call does nothing."""
        file.close()

    def read(self, file: Descriptor, length: int) -> bytes:
        """Return the first ``length`` bytes of a file, or all of them."""
        with _translate(file.path):
            return os.pread(file.number, length, 0)

    def write(self, file: Descriptor, data: bytes) -> None:
        """Write ``data`` at the beginning of a file."""
        with _translate(file.path):
            write_all(file.number, memoryview(data), 0)

    def sync(self, file: Descriptor) -> None:
        """Make a file durable, or the names in a directory. Returns when the medium has them."""
        with _translate(file.path):
            os.fsync(file.number)

    def status(self, file: Descriptor) -> FileState:
        """Return the status of an open file."""
        with _translate(file.path):
            return _status(os.fstat(file.number))

    def look(self, directory: Descriptor, name: str) -> FileState | None:
        """Return the status of a name, without following a link; None if it does not exist."""
        with _translate(directory.path, name):
            try:
                return _status(os.stat(name, dir_fd=directory.number, follow_symlinks=False))
            except FileNotFoundError:
                return None

    def set_mode(self, file: Descriptor, mode: int) -> None:
        """Set the permissions of a file."""
        with _translate(file.path):
            os.fchmod(file.number, mode)

    def names(self, directory: Descriptor) -> list[str]:
        """Return the names in a directory."""
        with _translate(directory.path):
            return os.listdir(directory.number)

    def path_of(self, directory: Descriptor) -> str | None:
        """Return the present path of an open directory; None if it was deleted."""
        with _translate(directory.path):
            path = os.readlink(f"/proc/self/fd/{directory.number}")
            # Linux appends " (deleted)" to a deleted path, which may be another directory's name.
            is_there = os.fstat(directory.number).st_nlink and os.path.exists(path)
            return path if is_there else None

    def link(self, source: tuple[Descriptor, str], target: tuple[Descriptor, str]) -> None:
        """Give a file a second name. ``MediumError`` (EEXIST) if that is taken."""
        with _translate(target[0].path, target[1]):
            os.link(
                source[1],
                target[1],
                src_dir_fd=source[0].number,
                dst_dir_fd=target[0].number,
                follow_symlinks=False,
            )

    def note(self, directory: Descriptor, name: str, text: bytes) -> None:
        """Create a symbolic link with the target ``text``. Unlike the bytes of a file, a file
        system has it in its journal, in order with changes of names."""
        with _translate(directory.path, name):
            os.symlink(text, name, dir_fd=directory.number)

    def read_link(self, directory: Descriptor, name: str) -> bytes | None:
        """Return the target of a symbolic link; None if it does not exist."""
        with _translate(directory.path, name):
            try:
                return os.fsencode(os.readlink(name, dir_fd=directory.number))
            except FileNotFoundError:
                return None

    def rename(self, source: tuple[Descriptor, str], target: tuple[Descriptor, str]) -> None:
        """Rename a file, over any file at ``target``."""
        with _translate(target[0].path, target[1]):
            os.rename(
                source[1], target[1], src_dir_fd=source[0].number, dst_dir_fd=target[0].number
            )

    def unlink(self, directory: Descriptor, name: str) -> None:
        """Remove a name, if it exists."""
        with _translate(directory.path, name), contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory.number)

    def remove_folder(self, directory: Descriptor, name: str) -> bool:
        """Remove a directory if it is empty. Return False if it is not, or does not exist."""
        with _translate(directory.path, name):
            try:
                os.rmdir(name, dir_fd=directory.number)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    return False
                raise
        return True

    def lock(self, file: Descriptor) -> bool:
        """Lock a file for this process, without waiting. Return False if another process has it."""
        with _translate(file.path):
            try:
                # Not a lock of fcntl, which ends when any descriptor of the file is closed:
                # ``in_flight`` opens and closes the records of its own process, too.
                fcntl.flock(file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def unlock(self, file: Descriptor) -> None:
        """Release the lock of a file at once, though a mapping of it may outlive its close."""
        with _translate(file.path):
            fcntl.flock(file.number, fcntl.LOCK_UN)

    def is_local(self, file: Descriptor) -> bool:
        """Return True if this kernel knows of all who open the file."""
        with _translate(file.path):
            return linux.file_system_type(file.number) in linux.LOCAL_TYPES

    def is_unused(self, file: Descriptor) -> bool:
        """Return True if the kernel knows of no other process with the file open or mapped."""
        # Ask for a write lease: it is granted only if no one else has the file open.
        try:
            # A lease knows nothing of other machines that mount the file system.
            if not self.is_local(file):
                return False
            # If the file is opened now, the kernel would send SIGIO, which ends a process; SIGURG
            # is ignored by default.
            fcntl.fcntl(file.number, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file.number, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError:
            return False
        with _translate(file.path):
            fcntl.fcntl(file.number, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True

    def is_whole(self, file: Descriptor, path: str) -> bool:
        """Return True if an open file, for ``path``, is as it was saved. Reads all of it."""
        return integrity.is_whole(file.number, path)


def _status(found: os.stat_result) -> FileState:
    return FileState(
        (found.st_dev, found.st_ino),
        found.st_nlink,
        found.st_size,
        found.st_mode,
        found.st_mtime_ns,
    )


@contextlib.contextmanager
def _translate(*path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise medium_error(error, os.path.join(*path)) from error


def medium_error(error: OSError, path: str) -> MediumError:
    """Return ``error`` of the system at ``path``, as ours. An exhausted quota is a full disk."""
    number = errno.ENOSPC if error.errno in OUT_OF_SPACE else error.errno
    return MediumError(number, f"{printable(path)}: {error.strerror or error}")
