"""A DAX device that can crash: persistent memory, whose lines reach it when the processor likes.

``CrashSpace`` is the space of the real ``SpaceMedium``, on a file of ``CrashFiles`` that stands for
the device. So what is explored is the code that flushes and drains, and its order. At power loss
any subset of the lines not drained may have arrived, each as it was at any moment since, torn at
any 8 bytes.
"""

from __future__ import annotations

from typing import Final, cast

from portus.engine.media.base import Medium, MediumInfo
from portus.engine.spec import Extent
from portus.errors import UsageError
from portus.reach.media.dax import DAX_DEVICE
from portus.reach.media.pmem import LINE
from portus.reach.media.pool import FileSystem
from portus.reach.media.space import WORD, SpaceMedium
from tests.simulation.crash import CrashFiles
from tests.simulation.disk import File


def make_device(files: CrashFiles, path: str, size: int, content: bytes = b"") -> None:
    """Make a device of ``size`` bytes at ``path``, as it was before any process: durable, with
    ``content``, and zero behind it."""
    files.create(path, size).close()
    file = _device(files, path)
    file.unit = LINE
    file.store(0, content)
    file.persist(Extent(0, size))
    for directory in files.disk.directories:
        files.sync(directory)


def open_device(
    files: CrashFiles, path: str, medium: type[SpaceMedium] = SpaceMedium
) -> SpaceMedium:
    """Open the device at ``path``, which ``make_device`` made."""
    info = MediumInfo(DAX_DEVICE, path, WORD, volatile=False, writable=True)
    return medium(CrashSpace(files, path), info)


def files_with_device(
    files: CrashFiles, path: str, medium: type[SpaceMedium] = SpaceMedium
) -> FileSystem:
    """Return ``files``, in which the file at ``path`` is opened as a device."""
    return cast(FileSystem, _FilesWithDevice(files, path, medium))


class _FilesWithDevice:
    def __init__(self, files: CrashFiles, path: str, medium: type[SpaceMedium]) -> None:
        self._files: Final = files
        self._path: Final = path
        self._medium: Final = medium

    def open(self, path: str, *, writable: bool) -> Medium:
        assert (path, writable) == (self._path, True)
        return open_device(self._files, path, self._medium)

    def __getattr__(self, name: str) -> object:
        return getattr(self._files, name)


class CrashSpace:
    """The bytes of a device. One process has them open; the same in each of its threads."""

    def __init__(self, files: CrashFiles, path: str) -> None:
        self._files: Final = files
        self._path: Final = path
        self._number: Final = files.disk.names.now[path]
        self._closed = False

    @property
    def size(self) -> int:
        """See ``Space``."""
        return self._file.size

    def store(self, offset: int, data: memoryview) -> None:
        """See ``Space``."""
        content = data.tobytes()
        text = f"store {self._path} at {offset}, {len(content)} bytes"
        with self._files.event(text, (self._number, offset, content)):
            self._file.store(offset, content)

    def load(self, offset: int, target: memoryview) -> None:
        """See ``Space``."""
        self._file.load(offset, target)

    def flush(self, offset: int, length: int) -> None:
        """See ``Space``. A crash right after it may leave what one before it may."""
        with self._files.event(f"flush {self._path} {offset}+{length}"):
            self._file.flush(Extent(offset, length))

    def drain(self) -> None:
        """See ``Space``."""
        with self._files.event(f"drain {self._path}"):
            self._file.drain()

    def close(self) -> None:
        """See ``Space``."""
        self._closed = True

    @property
    def _file(self) -> File:
        if self._closed:
            raise UsageError(f"{self._path}: used after it was closed")
        return self._files.disk.files[self._number]


def _device(files: CrashFiles, path: str) -> File:
    return files.disk.files[files.disk.names.now[path]]
