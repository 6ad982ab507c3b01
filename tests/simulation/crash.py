"""Files in memory that can crash: in every legal way, at every step, again and again.

``CrashFiles`` is a ``FileSystem``, and what it opens is a ``Medium``; ``disk`` says what a
crash may leave of them. Every store, persist, grow, create, link, replace, remove and sync is an
*event*, with a number. ``record`` runs a scenario once and keeps the disk as it was before each
event: a ``Point``, from which follow

* ``power_losses``: what may be there after the power failed;
* ``kills``: what is there after ``kill -9``, caches alive, unsynced changes still undecided.

Both are fresh ``CrashFiles``, on which the next process runs, and may crash in its turn. Nothing
survives of a process but its files: its media, its locks and its poison are gone.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from portus.engine.media.base import PLAIN_FILE, MediumInfo
from portus.engine.media.read_file import SECTOR
from portus.engine.spec import Extent
from portus.errors import MediumError, UsageError
from portus.reach.media.pool import FileStatus
from tests.simulation.disk import Disk, File
from tests.simulation.outcomes import WORD, PowerLossChoice, outcomes, power_loss

Fact = TypeVar("Fact")

_BEGINNING_NS: Final = 1_800_000_000 * 10**9
_TICK_NS: Final = 10**6


class Crash(BaseException):  # not an Exception: the process that it ends must not catch it
    """The simulated process ends here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The operations that fail, each kind counted from 1 over all files.

    persist: with EIO; what was dirty in that file is lost, and looks clean. grow: with ENOSPC.
    stop: the number of an event before which ``Crash`` is raised.
    """

    persist: frozenset[int] = frozenset()
    grow: frozenset[int] = frozenset()
    stop: int | None = None


NO_FAULTS: Final = Faults()


@dataclass(frozen=True, slots=True)
class Event:
    """What a process is about to do. ``store``: file, offset and bytes, if it is a store."""

    number: int
    text: str
    store: tuple[int, int, bytes] | None = None

    @property
    def settles(self) -> bool:
        """True for persist, drain and sync: after it, less may be lost."""
        return self.text.startswith(("persist", "drain", "sync"))


class CrashFiles:
    """Files, names and media on a simulated disk. Threads may share it."""

    def __init__(self, directories: Sequence[str] = ("/",), *, faults: Faults = NO_FAULTS) -> None:
        """directories: they exist, durably, and no others."""
        self.disk = Disk(tuple(os.path.normpath(each) for each in directories))
        self.faults = faults
        self.events = 0
        """How many there were."""
        self.persists = 0
        """How many were tried."""
        self.grows = 0
        """The same."""
        self.witness: Callable[[Event], None] = lambda event: None
        """Told before each event."""
        self.lock: Final = threading.RLock()
        self._changes = 0

    @classmethod
    def on(cls, disk: Disk, *, faults: Faults = NO_FAULTS) -> CrashFiles:
        """Return the files of ``disk``, which they own from now on."""
        files = cls(disk.directories, faults=faults)
        files.disk = disk
        files._changes = max((change.number for change in disk.names.pending), default=0)
        return files

    @property
    def failed(self) -> bool:
        """True once an operation has failed that was to."""
        fails = [(self.faults.persist, self.persists), (self.faults.grow, self.grows)]
        return any(min(numbers, default=count + 1) <= count for numbers, count in fails)

    def create(self, path: str, size: int) -> CrashMedium:
        """Create a file whose size and name become durable no sooner than promised."""
        path = self._new_name("create", path)
        with self.event(f"create {path}, {size} bytes"):
            number = max(self.disk.files, default=0) + 1
            self.disk.files[number] = File((0, size), time=self.events)
            self._change(path, number)
        return CrashMedium(self, number, path, writable=True)

    def open(self, path: str, *, writable: bool) -> CrashMedium:
        """See ``FileSystem``."""
        path = os.path.normpath(path)
        return CrashMedium(self, self._find("open", path), path, writable=writable)

    def link(self, source: str, target: str) -> None:
        """See ``FileSystem``."""
        number = self._find("link", os.path.normpath(source))
        target = self._new_name("link", target)
        with self.event(f"link {source} as {target}"):
            self._change(target, number)

    def replace(self, source: str, target: str) -> None:
        """See ``FileSystem``. As POSIX has it, nothing happens between two names of one file."""
        source, target = os.path.normpath(source), os.path.normpath(target)
        number = self._find("rename", source)
        self._check_directory("rename", target)
        with self.event(f"replace {target} by {source}"):
            if self.disk.names.now.get(target) != number:
                self.disk.names.move(self._changes + 1, source, target)
                self._changes += 2

    def remove(self, path: str) -> None:
        """See ``FileSystem``."""
        path = os.path.normpath(path)
        if path in self.disk.directories:
            raise MediumError(errno.EISDIR, f"{path}: cannot remove a directory")
        if path in self.disk.names.now:
            with self.event(f"remove {path}"):
                self._change(path, None)

    def sync(self, directory: str) -> None:
        """See ``FileSystem``."""
        directory = os.path.normpath(directory)
        self._check_directory("sync", os.path.join(directory, "."))
        with self.event(f"sync {directory}"):
            self.disk.names.sync(directory)

    def entries(self, directory: str) -> list[str]:
        """See ``FileSystem``."""
        directory = os.path.normpath(directory)
        paths = [*self.disk.names.now, *(each for each in self.disk.directories if each != "/")]
        return sorted(
            os.path.basename(each) for each in paths if os.path.dirname(each) == directory
        )

    def status(self, path: str) -> FileStatus | None:
        """See ``FileSystem``. None for a directory too. Times are event numbers."""
        number = self.disk.names.now.get(os.path.normpath(path))
        if number is None:
            return None
        links = sum(each == number for each in self.disk.names.now.values())
        file = self.disk.files[number]
        return FileStatus((1, number), links, file.size, file.time)

    @contextlib.contextmanager
    def event(self, text: str, store: tuple[int, int, bytes] | None = None) -> Iterator[None]:
        """The next event happens inside; one at a time. Raises ``Crash`` if it is not to happen."""
        with self.lock:
            if self.faults.stop == self.events + 1:
                raise Crash(f"stopped before event {self.events + 1}: {text}")
            self.witness(Event(self.events + 1, text, store))
            self.events += 1
            yield

    def _change(self, path: str, file: int | None) -> None:
        self._changes += 1
        self.disk.names.change(self._changes, path, file)

    def _find(self, operation: str, path: str) -> int:
        if path in self.disk.directories:
            raise UsageError(f"{path}: cannot {operation}: expected a file, found a directory")
        number = self.disk.names.now.get(path)
        if number is None:
            raise MediumError(errno.ENOENT, f"{path}: cannot {operation}: no such file")
        return number

    def _new_name(self, operation: str, path: str) -> str:
        path = os.path.normpath(path)
        self._check_directory(operation, path)
        if path in self.disk.names.now or path in self.disk.directories:
            raise MediumError(errno.EEXIST, f"{path}: cannot {operation}: it exists")
        return path

    def _check_directory(self, operation: str, path: str) -> None:
        directory = os.path.dirname(path)
        if directory not in self.disk.directories:
            raise MediumError(
                errno.ENOENT, f"{path}: cannot {operation}: there is no directory {directory}"
            )


class CrashMedium:
    """One open file of ``CrashFiles``. It has no addresses."""

    def __init__(self, files: CrashFiles, number: int, path: str, *, writable: bool) -> None:
        self._files: Final = files
        self._number: Final = number
        self._path: Final = path
        self._writable: Final = writable
        self._poison = ""
        self._closed = False

    @property
    def info(self) -> MediumInfo:
        """See ``Medium``."""
        return MediumInfo(PLAIN_FILE, self._path, SECTOR, False, self._writable)

    @property
    def size(self) -> int:
        """See ``Medium``."""
        return self._file().size

    @property
    def is_poisoned(self) -> bool:
        """See ``Medium``."""
        return bool(self._poison)

    def poison(self, reason: str) -> None:
        """See ``Medium``."""
        self._poison = self._poison or f"{self._path}: not written to any more: {reason}"

    def grow(self, size: int) -> None:
        """See ``Medium``. A failed growth changes nothing, and does not poison."""
        self._check_writable()
        if size <= self.size:
            return
        with self._files.event(f"grow {self._path} from {self.size} to {size} bytes"):
            self._files.grows += 1
            if self._files.grows in self._files.faults.grow:
                raise MediumError(
                    errno.ENOSPC, f"{self._path}: cannot grow to {size} bytes: simulated ENOSPC"
                )
            self._file().sizes = (size,)

    def store(self, offset: int, data: bytes | memoryview) -> None:
        """See ``Medium``."""
        self._check_writable()
        view = memoryview(data)
        if not view.c_contiguous:
            raise UsageError(f"{self._path}: store from memory that has gaps")
        self._check_range(offset, view.nbytes)
        if not view.nbytes:
            return
        content = view.tobytes()
        text = f"store {self._path} at {offset}, {len(content)} bytes"
        with self._files.event(text, (self._number, offset, content)):
            file = self._file()
            file.store(offset, content)
            file.time = self._files.events

    def discard(self, ranges: Sequence[Extent]) -> int:
        """Zeros that nobody persists: any page of them may be on the disk at power loss."""
        self.fill(ranges)
        for extent in ranges:
            self.store(extent.offset, bytes(extent.length))
        return sum(extent.length for extent in ranges)

    def fill(self, ranges: Sequence[Extent]) -> None:
        """Check ``ranges``, and do nothing else: this disk has room for all of its files."""
        self._check_writable()
        for extent in ranges:
            self._check_range(extent.offset, extent.length)

    def holes(self) -> list[Extent]:
        """None: see ``fill``."""
        return []

    def load(self, offset: int, target: memoryview) -> None:
        """See ``Medium``."""
        if target.readonly or not target.c_contiguous:
            raise UsageError(f"{self._path}: load into memory that is read-only or has gaps")
        self._check_range(offset, target.nbytes)
        self._file().load(offset, target.cast("B") if target.nbytes else target)

    def persist(self, ranges: Sequence[Extent]) -> None:
        """See ``Medium``. Ranges without a byte persist nothing, not even the size."""
        self._check_writable()
        for extent in ranges:
            self._check_range(extent.offset, extent.length)
        some = [extent for extent in ranges if extent.length]
        if not some:
            return
        where = ", ".join(f"{extent.offset}+{extent.length}" for extent in some)
        with self._files.event(f"persist {self._path} {where}"):
            self._files.persists += 1
            if self._files.persists in self._files.faults.persist:
                self._file().lose()
                self._poison = f"{self._path}: not written to any more: simulated EIO in persist"
                raise MediumError(errno.EIO, self._poison)
            for extent in some:
                self._file().persist(extent)

    def close(self) -> None:
        """See ``Medium``."""
        self._closed = True

    def _file(self) -> File:
        if self._closed:
            raise UsageError(f"{self._path}: used after it was closed")
        return self._files.disk.files[self._number]

    def _check_writable(self) -> None:
        self._file()
        if not self._writable:
            raise UsageError(f"{self._path}: opened for reading; open it with writable=True")
        if self._poison:
            raise MediumError(errno.EIO, self._poison)

    def _check_range(self, offset: int, length: int) -> None:
        if offset < 0 or offset + length > self.size:
            raise UsageError(
                f"{self._path}: bytes {offset} to {offset + length} are outside the file of "
                f"{self.size} bytes"
            )


class DiskImage:
    """A disk after a crash. ``note`` is one line for each decision that the crash made."""

    def __init__(self, disk: Disk, choices: Sequence[PowerLossChoice] = (), note: str = "") -> None:
        self._disk: Final = disk
        self._choices: Final = choices
        self._note: Final = note

    @property
    def note(self) -> list[str]:
        """What the crash decided."""
        return [self._note] if self._note else [choice.describe() for choice in self._choices]

    def digest(self) -> bytes:
        """The same for all images in which the same can be found."""
        return self._disk.digest()

    def files(self) -> CrashFiles:
        """Return the files as the next process finds them. Each call returns fresh ones."""
        return CrashFiles.on(self._disk.copy())


@dataclass(frozen=True, slots=True)
class Point(Generic[Fact]):
    """A moment at which a process may crash: before ``event``, or at its end (None).

    ``facts``: what it had reported by then. ``failed``: an operation had failed, by ``Faults``.
    """

    number: int
    event: Event | None
    facts: tuple[Fact, ...]
    disk: Disk
    failed: bool = False

    def power_losses(self, seed: random.Random, *, noise: bool = False) -> Iterator[DiskImage]:
        """What the power may leave, the telling images first; some come twice. Maybe endless."""
        lost = self.disk.lost()
        for choices in outcomes(self.disk, seed, noise=noise):
            yield DiskImage(power_loss(lost, choices), choices)

    def kills(self) -> list[DiskImage]:
        """What ``kill -9`` may leave: caches and all; and that with the next store half done."""
        images = [DiskImage(self.disk, note="killed, caches alive")]
        if self.event is not None and self.event.store is not None:
            file, offset, data = self.event.store
            half = len(data) // 2 // WORD * WORD
            if half:
                torn = self.disk.copy()
                torn.files[file].store(offset, data[:half])
                images.append(DiskImage(torn, note=f"killed after {half} bytes of the store"))
        return images


@dataclass(slots=True)
class Recording(Generic[Fact]):
    """Every moment of one run at which it might have crashed; the last is its end."""

    points: list[Point[Fact]] = field(default_factory=list)

    def tail(self, number: int, count: int = 30) -> list[str]:
        """The last events before the point ``number``."""
        events = [point.event for point in self.points[:number] if point.event is not None]
        return [f"{event.number}: {event.text}" for event in events][-count:]


Scenario = Callable[[CrashFiles, Callable[[Fact], None]], object]
"""What a process does. It calls the second argument with each fact that it got to know: that
something is done, or is about to begin."""


@contextlib.contextmanager
def same_each_time(seed: object) -> Iterator[None]:
    """Inside, ``os.urandom`` gives what follows from ``seed``, and the clock begins anew with each
    call of this: a process does the same each time, and what two runs of it leave is compared."""
    chance = random.Random(repr(seed))
    ticks = itertools.count(_BEGINNING_NS, _TICK_NS)
    date = time.strftime
    before = os.urandom, time.time_ns
    now = time.gmtime(_BEGINNING_NS // 10**9)
    os.urandom, time.time_ns = chance.randbytes, ticks.__next__
    time.strftime = lambda form, moment=now: date(form, moment)
    try:
        yield
    finally:
        os.urandom, time.time_ns = before
        time.strftime = date


def record(
    scenario: Scenario[Fact], files: CrashFiles, facts: Sequence[Fact] = ()
) -> Recording[Fact]:
    """Run ``scenario`` on ``files`` to its end, and keep every moment of it.

    facts: known before. Whatever the scenario raises goes through, but not ``Crash``, which ends
    it.
    """
    recording: Recording[Fact] = Recording()
    known = list(facts)

    def witness(event: Event | None) -> None:
        number = len(recording.points)
        point = Point(number, event, tuple(known), files.disk.copy(), files.failed)
        recording.points.append(point)

    files.witness = witness
    with contextlib.suppress(Crash):
        scenario(files, known.append)
    files.witness = lambda event: None
    witness(None)
    return recording
