"""Objects as files below a directory, on a network file system as a rule.

Theory. A writer first writes and syncs a file of its own in ``.partial``; then it makes the file's
name, and syncs the directory. ``put`` renames, which replaces; ``create`` links, which fails if the
name exists. So an object is either complete or absent, whenever the power fails, and of several
makers one wins, on any number of hosts. Without hard links nothing is created: the alternative
(O_EXCL) shows half of an object, or keeps it forever.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, Final

from portus.engine.media.file_calls import file_error, write_all
from portus.errors import MediumError, StaleError, TransportError, UsageError
from portus.reach.media.local import LocalFiles, naming_call
from portus.reach.mirror.store import (
    ListedObject,
    MissingError,
    Part,
    UnwritableError,
    check_name,
    check_prefix,
    is_name,
    short,
)

PARTIAL: Final = ".partial"
"""The folder, below the root, of unfinished files."""

PARTIAL_S_MAX: Final = 24 * 3600.0
"""Seconds. Older unfinished files have no writer; a folder's first write removes them."""

_NO_LINKS: Final = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)
_AWAY: Final = (
    *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNRESET),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
)
"""Errors of a network file system whose server does not answer."""

_REFUSED: Final = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG),
    *(errno.ELOOP, errno.EXDEV),
)
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class Folder:
    """``Store`` below the directory ``root``, an absolute path; the first object makes it. No file
    stays open."""

    def __init__(self, root: str) -> None:
        self._root: Final = root
        self._files: Final = LocalFiles()
        self._safe: Final[set[str]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"Folder({self._root!r})"

    def put(self, name: str, data: bytes) -> None:
        self.put_stream(name, [data], len(data))

    def put_stream(self, name: str, parts: Iterable[Part], size: int, *, unless: str = "") -> None:
        with self._translate_errors(UnwritableError):
            target = self._path(name)
            with self._write_partial(parts) as partial:
                if unless and os.path.exists(self._path(unless)):
                    raise StaleError(f"{self}: {unless} is there by now")
                self._make_safe(os.path.dirname(target))
                self._files.replace(partial, target)
                self._files.sync(os.path.dirname(target))

    def copy(self, name: str, target: str, size: int) -> bool:
        with self._translate_errors(UnwritableError), self._open(name) as (path, _):
            # No write changes an object in place, so two may share one file.
            new = self._path(target)
            self._make_safe(os.path.dirname(new))
            self._files.link(path, new)
            self._files.sync(os.path.dirname(new))
        return True

    def create(self, name: str, data: bytes) -> bool:
        with self._translate_errors(UnwritableError):
            target = self._path(name)
            with self._write_partial([data]) as partial:
                self._make_safe(os.path.dirname(target))
                is_ours = self._link(partial, target)
                # Also if another writer won: it may have died before its sync.
                self._files.sync(os.path.dirname(target))
                return is_ours

    def get(self, name: str) -> bytes:
        with self._translate_errors(), self._open(name) as (path, file):
            with naming_call("read", path):
                length, data = os.fstat(file.fileno()).st_size, file.read()
            if len(data) < length:
                raise TransportError(f"{path}: it became shorter while it was read; read it again")
            return data

    def get_range(self, name: str, start: int, length: int) -> Part:
        with self._translate_errors(), self._open(name) as (path, file), naming_call("read", path):
            file.seek(start)
            found = file.read(length)
        if len(found) < length:
            raise short(path, start, length, len(found))
        return found

    def list(self, prefix: str, after: str = "") -> Iterator[ListedObject]:
        self._check_open()
        below = check_prefix(prefix, self)
        directory = os.path.join(self._root, below) if below else self._root
        with self._translate_errors():
            yield from self._walk(directory, prefix, after)

    def delete(self, names: Sequence[str]) -> None:
        with self._translate_errors():
            paths = [self._path(name) for name in names]
            for path in paths:
                with _absent_is_fine():
                    self._files.remove(path)
            for directory in {os.path.dirname(path) for path in paths}:
                with _absent_is_fine():
                    self._files.sync(directory)

    def close(self) -> None:
        self._closed = True

    @contextlib.contextmanager
    def _translate_errors(self, refusal: type[UsageError] = UsageError) -> Iterator[None]:
        """Raise errors of the system as those of a store. refusal: the class for a missing
        right."""
        try:
            yield
        except MediumError as error:
            if error.errno == errno.ENOENT:  # another process removed a directory: make it again
                # Not the root: if it is gone, a mount may be missing.
                self._safe.intersection_update({self._root, os.path.join(self._root, PARTIAL)})
            if error.errno in _AWAY:
                raise TransportError(f"{error.strerror}; it is tried again") from error
            if error.errno in _REFUSED:
                raise refusal(error.strerror) from error
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self}: it is closed; open it again")

    def _path(self, name: str) -> str:
        self._check_open()
        return os.path.join(self._root, check_name(name, self))

    @contextlib.contextmanager
    def _write_partial(self, parts: Iterable[Part]) -> Iterator[str]:
        """Write a file of ``parts``, sync it, and yield its path, which is removed at the end."""
        home = os.path.join(self._root, PARTIAL)
        is_first = home not in self._safe
        self._make_safe(home)
        path = os.path.join(home, f"{os.getpid()}-{secrets.token_hex(8)}")
        # Errors name the directory: a run that tries again reports each cause once.
        with naming_call("create a file in", home):
            number = os.open(path, _NEW, 0o666)
        try:
            try:
                with naming_call("write a file in", home):
                    _write(number, parts)
            finally:
                os.close(number)
            # ``path`` was just written, so its time is the server's clock, not this machine's.
            if is_first:
                self._sweep(home, path)
            yield path
        finally:
            self._files.remove(path)

    def _link(self, partial: str, target: str) -> bool:
        try:
            self._files.link(partial, target)
        except MediumError as error:
            if error.errno == errno.EEXIST:
                # Over a network the first answer may be lost, and the second request finds ours.
                with naming_call("look at", partial):
                    return os.stat(partial).st_nlink > 1
            if error.errno in _NO_LINKS:
                raise UnwritableError(
                    f"{target}: this file system has no hard links, so two writers of one mirror "
                    "cannot be told apart; mirror to a file system that has them, or to a bucket"
                ) from error
            raise
        return True

    def _make_safe(self, directory: str) -> None:
        """Make the directory durable, and all above it up to the root. Does it once for each:
        another process may have made one, and not synced it yet."""
        if directory in self._safe:
            return
        parent = os.path.dirname(directory)
        if len(directory) > len(self._root) or not os.path.exists(parent):
            self._make_safe(parent)
        with naming_call("create", directory), contextlib.suppress(FileExistsError):
            os.mkdir(directory)
        # A new directory is a name in its parent, which must be durable, too.
        self._files.sync(parent)
        self._safe.add(directory)

    def _sweep(self, home: str, fresh: str) -> None:
        """Remove files that killed writers left. ``fresh`` shows the server's time."""
        with naming_call("look at", fresh):
            now = os.stat(fresh).st_mtime_ns
        for name in self._files.entries(home):
            path = os.path.join(home, name)
            status = self._files.status(path)
            if status is not None and now - status.time_ns > PARTIAL_S_MAX * 1e9:
                self._files.remove(path)

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[tuple[str, BinaryIO]]:
        path = self._path(name)
        try:
            file = open(path, "rb")  # noqa: SIM115
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise MissingError(f"{path}: there is no such object") from None
        except OSError as error:
            raise file_error("open", path, error) from error
        with file:
            yield path, file

    def _walk(self, directory: str, before: str, after: str) -> Iterator[ListedObject]:
        """Yield the objects below ``directory``, whose names begin with ``before``, in the order of
        whole names: "a" before "a/b", and "a-b" before both of "a/b"."""
        try:
            with os.scandir(directory) as found:
                entries = sorted((each.name + "/" * each.is_dir(), each.path) for each in found)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise file_error("list", directory, error) from error
        for name, path in entries:
            full = before + name
            if not is_name(name.rstrip("/")):  # unfinished files, and files of other programs
                continue
            if name.endswith("/"):
                if full > after or after.startswith(full):
                    yield from self._walk(path, full, after)
            elif full > after:
                status = self._files.status(path)
                if status is not None:
                    yield ListedObject(full, status.size, status.time_ns / 1e9)


def _write(number: int, parts: Iterable[Part]) -> None:
    offset = 0
    for part in parts:
        write_all(number, memoryview(part), offset)
        offset += len(part)
    os.fsync(number)


@contextlib.contextmanager
def _absent_is_fine() -> Iterator[None]:
    try:
        yield
    except MediumError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
