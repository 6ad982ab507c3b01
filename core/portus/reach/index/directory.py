"""Pool files and pool directories: where a pool is, how it is made, and which process has it open.

A pool directory holds a pool file for each writer (a run, a rank), ``<name>.portus``. A new pool
file is made under a hidden name, formatted, persisted, and only then linked to its own name. So any
file of that name is a complete pool, and of two makers one wins.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import shutil
import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from portus.engine.copying import native
from portus.engine.media.process import NUMBERS
from portus.errors import BusyError, MediumError, PortusError, UsageError
from portus.reach.format.layout import DATA_START
from portus.reach.index.place import DEFAULT_DIRECTORY, SUFFIX, Place
from portus.reach.index.pool import PoolWriter
from portus.reach.index.reader import PoolReader
from portus.reach.index.roots import format_pool, is_blank, read_holder, store_failure
from portus.reach.media.dax import is_device
from portus.reach.media.file import PlainFile
from portus.reach.media.local import LocalFiles
from portus.reach.media.lock import FileLocks
from portus.reach.media.names import hidden_name
from portus.reach.media.pool import FileStatus, FileSystem, Locks

_log: Final = logging.getLogger("portus")

_CACHE_TAG: Final = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# Checkpoints of Portus. Not a cache to clear: but backups of running pools are of no use.\n"
)

_TRIES: Final = 100

HELD_S = 10.0
"""Seconds to wait for a pool that another process writes."""

JOURNAL_SUFFIX: Final = ".journal"
"""The suffix of the journal directory beside a pool file."""


def pools_at(place: Place) -> list[Place]:
    """Return all pools of a place: itself, or those in the directory. No host is asked. Raise
    ``UsageError`` if there is nothing of that name."""
    if place.hosts:
        return place.hosts
    if os.path.isdir(place.path):
        # No hidden ones: drafts of files may be beside pools, see ``portus.engine.directory``.
        names = [
            each for each in os.listdir(place.path) if each.endswith(SUFFIX) and each[0] != "."
        ]
        pools = map(place.pool_in, sorted(names))
        return [pool for pool in pools if os.path.isfile(pool.path)]
    if not os.path.exists(place.path):
        raise UsageError(f"{place}: there is no file or directory of this name")
    return [place]


def writer_of(pool: Place) -> str:
    """Return the name of the writer that owns a pool file in a directory, as passed to
    ``Place.pool_of``."""
    return urllib.parse.unquote(os.path.basename(pool.path).removesuffix(SUFFIX))


def on_disk(path: str) -> int:
    """Return the bytes that a pool file takes of its file system: fewer than its size, if it has
    holes. 0 for an address, for a device, and if there is no file."""
    try:
        return os.stat(path).st_blocks * 512
    except OSError:
        return 0


def journal_directory(pool_path: str) -> str:
    """Return the directory of the journals of the pool at ``pool_path``: beside a pool file.
    Nothing lasts beside a device, and its name may change, so its journals are in
    ``<uuid>.journal``, in the state directory of this user. Journals outlast the pool: the one of a
    training that ended can still be read. Raises as opening the pool does."""
    if not is_device(pool_path):
        return os.path.splitext(pool_path)[0] + JOURNAL_SUFFIX
    reader = open_reader(pool_path)
    try:
        uuid = reader.uuid.hex()
    finally:
        reader.close()
    return os.path.join(state_directory(), uuid + JOURNAL_SUFFIX)


def state_directory() -> str:
    """Return the directory of Portus's state, for this user on this machine."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(home, "portus")


def make_directory(directory: str, *, is_inside: bool = False) -> bool:
    """Make a pool directory, or one of journals in it, if there is none; return True. Mark the
    hidden one so that git and backups skip it. is_inside: make the hidden directory, but none
    above; return False if that one is not there: a user may have moved or removed it. Raises
    ``MediumError``."""
    directory = os.path.abspath(directory)
    above = os.path.dirname(directory)
    is_hidden = os.path.basename(above) == DEFAULT_DIRECTORY
    home = os.path.dirname(above) if is_hidden else above
    for left in reversed(range(_TRIES)):
        try:
            if not is_inside or home == state_directory():
                os.makedirs(home, exist_ok=True)
            for each in (above, directory) if is_hidden else (directory,):
                try:
                    os.mkdir(each)
                except FileExistsError:
                    if not os.path.isdir(each):
                        raise
                if os.path.basename(each) == DEFAULT_DIRECTORY:
                    _mark(each)
            return True
        except OSError as error:
            if is_inside and not os.path.isdir(home):
                return False
            # The end of a save, in any process, removes the directory while it is empty.
            if not left or not isinstance(error, FileExistsError | FileNotFoundError):
                raise MediumError(
                    error.errno, f"{directory}: cannot make the pool directory: {error.strerror}"
                ) from error
    raise AssertionError("the last try returns or raises")


def _mark(directory: str) -> None:
    for name, text in ((".gitignore", "*\n"), ("CACHEDIR.TAG", _CACHE_TAG)):
        path = os.path.join(directory, name)
        if not os.path.exists(path):  # an adapter may have made the directory
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)


def has_pool(path: str, files: FileSystem | None = None) -> bool:
    """Return False if there is nothing at ``path``, or a blank DAX device.

    Raises ``MediumError``, and ``UsageError`` for a device that is too small.
    """
    if not is_device(path):
        return os.path.exists(path)
    medium = (files or LocalFiles()).open(path, writable=False)
    try:
        return not is_blank(medium)
    finally:
        medium.close()


_unfinished: Final[set[str]] = set()
"""Pool files that threads of this process are making."""


def create_pool(path: str, files: FileSystem) -> None:
    """Make an empty pool file at ``path``, durable with its name; do nothing if one is there.

    Its directory exists. Raises ``MediumError``; then there is no pool, and no remains of one. On a
    DAX device the pool is made in place, if the device is blank.
    """
    if is_device(path):
        format_device(path, files)
        return
    directory, name = os.path.split(path)
    # So that the drafts of killed makers can be told from those of living ones.
    maker = f"{os.getpid()}-{threading.get_ident()}"
    fresh = os.path.join(directory, hidden_name(name, f".{maker}.new"))
    _remove_unfinished(directory, name, files)
    _unfinished.add(fresh)
    try:
        medium = files.create(fresh, DATA_START)
        try:
            format_pool(medium)
        finally:
            medium.close()
        _publish(fresh, path, files)
    finally:
        _unfinished.discard(fresh)
        files.remove(fresh)  # after the link: the pool keeps its other name
    # Only now is the name durable; no caller knows of the pool before.
    files.sync(directory)


def format_device(path: str, files: FileSystem, *, force: bool = False) -> bool:
    """Make an empty pool on the DAX device at ``path`` if it is blank, and return whether that was
    done.

    force: overwrite whatever the device holds. Raises ``BusyError`` while another process writes to
    a pool there.
    """
    with contextlib.ExitStack() as undo:
        # Locked before the device is looked at: two processes could find it blank.
        undo.callback(lock(path, files).close)
        medium = files.open(path, writable=True)
        undo.callback(medium.close)
        if not force and not is_blank(medium):
            return False
        format_pool(medium)
        return True


def _remove_unfinished(directory: str, name: str, files: FileSystem) -> None:
    """Remove the drafts of makers that were killed. Those of living processes stay."""
    for entry in files.entries(directory):
        maker = entry.removesuffix(".new").rpartition(".")[2]
        process, path = maker.partition("-")[0], os.path.join(directory, entry)
        if (
            not process.isdigit()
            or entry != hidden_name(name, f".{maker}.new")
            or path in _unfinished
        ):
            continue
        # A living process may be about to link its own.
        if not _is_alive(int(process)):
            files.remove(path)


def _is_alive(process: int) -> bool:
    """Return whether another process is alive. False for this one, whose drafts are known."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's
    return True


def remove_pool(path: str, files: FileSystem) -> None:
    """Remove a pool file, and its directory if that is empty otherwise.

    The writer does this before it releases the pool: a process that waits for it finds that the
    file is gone, and saves nothing into it. A device stays, with the empty pool on it.
    """
    if is_device(path):
        return
    files.remove(path)
    home = os.path.dirname(path)
    left = set(files.entries(home))
    if left and left <= {".gitignore", "CACHEDIR.TAG"}:
        for name in left:
            files.remove(os.path.join(home, name))
    with contextlib.suppress(OSError):
        os.rmdir(home)


def is_at(writer: PoolWriter, path: str | None) -> bool:
    """Return False if the open pool file is not the one at ``path`` any more: it was removed or
    moved, and another pool may be there."""
    return path is None or not isinstance(writer.medium, PlainFile) or writer.medium.is_at(path)


def remove_journals(pool_path: str) -> None:
    """Remove the journals of the runs in the pool at ``pool_path``. Files that cannot be removed
    stay. Raises as ``journal_directory``."""
    shutil.rmtree(journal_directory(pool_path), ignore_errors=True)


def _publish(fresh: str, path: str, files: FileSystem) -> None:
    try:
        files.link(fresh, path)  # a second maker's link fails; a rename would take our place
    except MediumError as error:
        if error.errno == errno.EEXIST:
            return
        if error.errno not in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        files.replace(fresh, path)


@functools.cache
def _leave_in_children() -> None:
    """Close the descriptors of this process in children of C's ``fork()`` too, as in those of
    Python. Without the helper in C this does nothing."""
    helper = native.helper()
    if helper is not None:
        helper.close_in_children(NUMBERS)


def open_reader(path: str, files: FileSystem | None = None) -> PoolReader:
    """Open the pool file at ``path`` for reading, while another process may write it."""
    _leave_in_children()
    with contextlib.ExitStack() as undo:
        medium = (files or LocalFiles()).open(path, writable=False)
        undo.callback(medium.close)
        locks = FileLocks(path, writable=False)
        undo.callback(locks.close)
        reader = PoolReader(medium, locks)
        undo.pop_all()
        return reader


@dataclass(slots=True)
class _WriterOfPool:
    writer: PoolWriter
    users: int


class Writers:
    """The pools that this process writes. One opened twice is shared; each user closes it."""

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._shared: dict[tuple[int, int], _WriterOfPool] = {}
        self._opening: dict[tuple[int, int], threading.Lock] = {}
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def open(
        self,
        path: str,
        *,
        timeout_s: float | None = None,
        max_bytes: int | None = None,
        mapped: bool = True,
    ) -> PoolWriter:
        """Return the one writer of the pool file at ``path``, which exists.

        Waits up to ``timeout_s`` (None: ``HELD_S``) for another process to release it. Raises
        ``BusyError`` naming that process.
        mapped: False to leave holes as they are, if the file is not open yet: a mapped file must
        have none.
        """
        files = LocalFiles(mapped=mapped)
        for is_last in (False, False, True):
            try:
                return self._open(path, files, timeout_s, max_bytes)
            except MediumError as error:  # its holder removed it, and a third process made it again
                if is_last or error.errno != errno.ENOENT or files.status(path) is None:
                    raise
        raise AssertionError("the last try returns or raises")

    def _open(
        self, path: str, files: FileSystem, timeout_s: float | None, max_bytes: int | None
    ) -> PoolWriter:
        status = files.status(path)
        if status is None:
            raise UsageError(f"{path}: there is no pool file of this name")
        with self._guard:
            opening = self._opening.setdefault(status.identity, threading.Lock())
        with opening:  # one at a time for each pool; other pools do not wait for it
            with self._guard:
                shared = self._shared.get(status.identity)
            if shared is None:
                opened = open_writer(path, files, timeout_s=timeout_s, max_bytes=max_bytes)
                shared = _WriterOfPool(opened, 0)
            with self._guard:
                self._shared[status.identity] = shared
                shared.users += 1
            return shared.writer

    def close(self, writer: PoolWriter, last: Callable[[], object] = lambda: None) -> None:
        """Release a writer that ``open`` returned. The last user closes the pool, and calls
        ``last`` before, while no other process can open it."""
        with self._guard:
            # By the writer itself: the path may be another file by now.
            found = [key for key, each in self._shared.items() if each.writer is writer]
        for identity in found:
            with self._opening[identity]:
                shared = self._shared[identity]
                shared.users -= 1
                if shared.users:
                    return
                with self._guard:
                    del self._shared[identity]
                try:
                    last()
                finally:
                    writer.close()

    def _forget(self) -> None:
        # In a forked child the pools belong to the parent; media and locks closed themselves.
        self._guard, self._shared, self._opening = threading.RLock(), {}, {}


WRITERS: Final = Writers()
"""The writers of this process."""


def open_writer(
    path: str,
    files: FileSystem,
    *,
    timeout_s: float | None = None,
    max_bytes: int | None = None,
    locks: Locks | None = None,
    reads: str = "portus.open({!r})",
) -> PoolWriter:
    """Open the pool file at ``path`` for writing. ``Writers`` shares one writer between all users.

    locks: instead of those of the file, for tests on files of another kind.
    reads: the call that opens it for reading meanwhile, for the message of a ``BusyError``.
    """
    _leave_in_children()
    before = files.status(path)  # the holder of the lock may remove the file meanwhile
    with contextlib.ExitStack() as undo:
        try:
            held = locks or lock(path, files, HELD_S if timeout_s is None else timeout_s)
            undo.callback(held.close)
            medium = files.open(path, writable=True)
            undo.callback(medium.close)
            if max_bytes is not None and medium.info.kind.is_device:
                raise UsageError(
                    f"{path}: max_bytes applies to files only; a pool on a device uses the whole "
                    "device. Make a smaller namespace, or omit max_bytes"
                )
            writer = PoolWriter(medium, held, max_bytes=max_bytes)
        except BusyError as error:
            hint = f"{error.strerror}. To read it meanwhile: {reads.format(path)}"
            raise BusyError(error.errno, hint) from error
        except MediumError:
            _check_unchanged(path, before, files.status(path))
            raise
        _check_unchanged(path, before, files.status(path))
        # The maker of the pool may have been killed before its name was durable.
        if not medium.info.kind.is_device:
            files.sync(os.path.dirname(path))
        undo.pop_all()
        return writer


class _PoolLocks(FileLocks):
    """The locks of a pool file, with the name of their holder."""

    def __init__(self, path: str, files: FileSystem) -> None:
        super().__init__(path, writable=True)
        self._files: Final = files

    def describe_holder(self) -> str:
        with contextlib.closing(self._files.open(self.path, writable=False)) as medium:
            return read_holder(medium)


def lock(path: str, files: FileSystem, timeout_s: float = HELD_S) -> FileLocks:
    """Lock the pool file at ``path`` for its only writer, until these locks are closed.

    Open the file for writing only after that: until its earlier writer released the lock, it may
    have grown the file, or given space back. Raises ``BusyError`` naming the holder, after
    ``timeout_s``.
    """
    locks = _PoolLocks(path, files)
    try:
        locks.acquire_writer(timeout_s)
    except BaseException:
        locks.close()
        raise
    return locks


def note_failure(writer: PoolWriter | None, text: str, path: str | None) -> None:
    """Record which save failed, for ``read_failure``; not in a pool that others have changed.

    writer: the pool, if it is open. path: of the pool; None: it is in memory. Raises
    ``MediumError``.
    """
    with contextlib.suppress(PortusError):
        if writer is not None and not writer.medium.is_poisoned:
            writer.look()  # another program may be the reason
    if writer is not None and (writer.changed_by_others or not is_at(writer, path)):
        return
    if path is None:
        assert writer is not None, "a pool in memory is open"
        store_failure(writer.medium, text)
        return
    # Opened again: the open medium may be poisoned, which is the failure to record.
    medium = LocalFiles(mapped=False).open(path, writable=True)
    with contextlib.closing(medium):
        store_failure(medium, text)


def _check_unchanged(path: str, before: FileStatus | None, after: FileStatus | None) -> None:
    if before is None or after is None or after.identity != before.identity:
        raise MediumError(
            errno.ENOENT, f"{path}: removed or replaced while it was opened; open it again"
        )
