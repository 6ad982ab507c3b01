"""Directories in memory that can crash: what a power cut may leave of names and of bytes.

``CrashFolder`` has the calls of ``Linux``, by which files are published. Each call is an *event*; a
``Crash`` is raised before the one that ``stop`` names. Then ``kill`` gives the directories as
another process finds them, and ``power_losses`` what a disk may have kept:

* changes of names, each by itself, of those that no sync covered: a rename is one change;
* bytes, sector by sector, of those that no sync covered.

That is more than any file system loses, so what survives here survives there.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from portus.engine.directory.system import FileState, Linux
from portus.engine.media.process import Descriptor
from portus.errors import MediumError
from tests.simulation.crash import Crash

SECTOR: Final = 4
"""Bytes that are written as one."""

EXHAUSTIVE_MAX: Final = 64
"""If a power cut has no more outcomes than this, all are tried."""


def content(step: int) -> bytes:
    """Return the bytes of the whole file of a step."""
    return b"%04d" % step * (2 + step % 3)


def step_of(data: bytes) -> int | None:
    """Return the step of a whole file; None if it is not one."""
    step = int(data[:4]) if data[:4].isdigit() else -1
    return step if data == content(step) else None


@dataclass
class _Node:
    """A file or a directory. ``stored``: what a power cut leaves of the bytes at least."""

    is_directory: bool
    data: bytes = b""
    stored: bytes = b""
    names: dict[str, int] = field(default_factory=dict)
    mode: int = 0o644
    changed_ns: int = 0


@dataclass(frozen=True)
class _Change:
    """A change of names: (directory, name, node, or None to remove it), all or nothing."""

    entries: tuple[tuple[int, str, int | None], ...]


class OpenFile(Descriptor):
    """An open file or directory: a descriptor of nothing."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.is_open = True


def _copied(names: dict[int, dict[str, int]]) -> dict[int, dict[str, int]]:
    return {number: each.copy() for number, each in names.items()}


class CrashFolder(Linux):
    """See the module. ``stop``: the number of the event before which ``Crash`` is raised."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop = stop
        self.events = 0
        self.fails: Callable[[int, str], int | None] = lambda number, text: None
        """Told each event before it happens; the errno with which it fails, if any."""
        self._nodes: dict[int, _Node] = {1: _Node(True)}
        self._durable: dict[int, dict[str, int]] = {1: {}}
        self._pending: list[_Change] = []
        self._locks: dict[int, Descriptor] = {}
        self._opened: list[OpenFile] = []

    def is_whole(self, file: Descriptor, path: str) -> bool:
        return step_of(self.data_of(file)) is not None

    # For tests.

    def mkdir(self, path: str) -> None:
        """Make a directory, durable."""
        parent, name = os.path.split(path)
        number = self._add(True)
        self._nodes[self._find(parent)].names[name] = number
        self._durable[self._find(parent)][name] = number

    def move(self, source: str, target: str) -> None:
        """Rename a file or a directory, as another program does."""
        ends = [self._end(source), self._end(target)]
        number = self._nodes[ends[0][0]].names[ends[0][1]]
        self._change("move", (*ends[1], number), (*ends[0], None))

    def unlink_path(self, path: str) -> None:
        """Remove a file, as another program does."""
        self._change("remove", (*self._end(path), None))

    def visible(self, path: str) -> dict[str, bytes]:
        """Return the files in a directory that are not hidden, and their bytes."""
        names = self._nodes[self._find(path)].names
        return {
            name: self._nodes[number].data
            for name, number in names.items()
            if not name.startswith(".") and not self._nodes[number].is_directory
        }

    def hidden(self, path: str) -> list[str]:
        """Return the names in the hidden folder of a directory."""
        number = self._nodes[self._find(path)].names.get(".portus")
        return [] if number is None else sorted(self._nodes[number].names)

    def read_path(self, path: str) -> OpenFile:
        """Open a file as a reader does, and keep it open."""
        where, name = self._end(path)
        opened = OpenFile(self._nodes[where].names[name])
        self._opened.append(opened)
        return opened

    def data_of(self, opened: Descriptor) -> bytes:
        """Return what a reader sees."""
        return self._nodes[node_of(opened)].data

    def kill(self) -> CrashFolder:
        """Return what the next process finds after ``kill -9``."""
        found = CrashFolder()
        found.events = self.events
        found._nodes = {
            number: replace(node, names=node.names.copy()) for number, node in self._nodes.items()
        }
        found._durable = _copied(self._durable)
        found._pending = self._pending.copy()
        return found

    def power_losses(self, source: random.Random, samples: int) -> Iterator[CrashFolder]:
        """Yield what may be there after a power cut: all of it if that is little, else the
        extremes, each thing lost or kept alone, and ``samples`` more."""
        sectors = [
            (number, start)
            for number, node in self._nodes.items()
            for start in range(0, max(len(node.data), len(node.stored)), SECTOR)
            if node.data[start : start + SECTOR] != node.stored[start : start + SECTOR]
        ]
        axes = len(self._pending) + len(sectors)
        choices: Iterator[tuple[bool, ...]]
        if 2**axes <= EXHAUSTIVE_MAX:
            choices = itertools.product((False, True), repeat=axes)
        else:
            choices = iter(_telling(axes, source, samples))
        for choice in choices:
            yield self._lost(sectors, choice)

    def _lost(self, sectors: list[tuple[int, int]], choice: tuple[bool, ...]) -> CrashFolder:
        found = self.kill()
        names = _copied(self._durable)
        for change, kept in zip(self._pending, choice, strict=False):
            for directory, name, node in change.entries if kept else ():
                if node is None:
                    names[directory].pop(name, None)
                else:
                    names[directory][name] = node
        for number, node_there in found._nodes.items():
            if node_there.is_directory:
                node_there.names = names[number]
            else:
                node_there.data = node_there.stored
        for (number, start), kept in zip(sectors, choice[len(self._pending) :], strict=True):
            if kept:
                node_there, new = found._nodes[number], self._nodes[number].data
                old = node_there.data.ljust(min(len(new), start + SECTOR), b"\0")
                node_there.data = old[:start] + new[start : start + SECTOR] + old[start + SECTOR :]
        found._durable = {n: d.names.copy() for n, d in found._nodes.items() if d.is_directory}
        for node_there in found._nodes.values():
            node_there.stored = node_there.data
        found._pending = []
        return found

    # The system.

    def open_directory(self, path: str) -> Descriptor:
        """See ``Linux``."""
        return self._handle(self._find(path))

    def open_folder(self, directory: Descriptor, name: str, *, create: bool) -> Descriptor | None:
        """See ``Linux``."""
        number = self._nodes[node_of(directory)].names.get(name)
        if number is None:
            if not create:
                return None
            number = self._add(True)
            self._change("mkdir", (node_of(directory), name, number))
        return self._handle(number)

    def create(self, directory: Descriptor, name: str) -> Descriptor:
        """See ``Linux``."""
        self._event(f"create {name}")
        if name in self._nodes[node_of(directory)].names:
            raise MediumError(errno.EEXIST, f"{name}: exists")
        number = self._add(False)
        self._enter((node_of(directory), name, number))
        return self._handle(number)

    def open(self, directory: Descriptor, name: str, *, writable: bool) -> Descriptor | None:
        """See ``Linux``."""
        number = self._nodes[node_of(directory)].names.get(name)
        return None if number is None else self._handle(number)

    def close(self, file: Descriptor) -> None:
        """See ``Linux``."""
        assert isinstance(file, OpenFile)
        file.is_open = False
        if self._locks.get(node_of(file)) is file:
            del self._locks[node_of(file)]
        if file in self._opened:
            self._opened.remove(file)

    def read(self, file: Descriptor, length: int) -> bytes:
        """See ``Linux``."""
        return self._nodes[node_of(file)].data[:length]

    def write(self, file: Descriptor, data: bytes) -> None:
        """See ``Linux``. The file has nothing else then."""
        half = len(data) // 2
        for end in (half, len(data)):
            self._event(f"write {end} bytes")
            node = self._nodes[node_of(file)]
            node.data = data[:end] + (node.data[end : len(data)] if end == half else b"")
            node.changed_ns = self.events

    def sync(self, file: Descriptor) -> None:
        """See ``Linux``."""
        node = self._nodes[node_of(file)]
        self._event("sync directory" if node.is_directory else "sync file")
        if not node.is_directory:
            node.stored = node.data
            return
        kept = []
        for change in self._pending:
            if any(directory == node_of(file) for directory, _, _ in change.entries):
                for directory, name, number in change.entries:
                    self._enter_durable(directory, name, number)
            else:
                kept.append(change)
        self._pending = kept

    def status(self, file: Descriptor) -> FileState:
        """See ``Linux``."""
        return self._status(node_of(file))

    def look(self, directory: Descriptor, name: str) -> FileState | None:
        """See ``Linux``."""
        number = self._nodes[node_of(directory)].names.get(name)
        return None if number is None else self._status(number)

    def set_mode(self, file: Descriptor, mode: int) -> None:
        """See ``Linux``."""
        self._nodes[node_of(file)].mode = mode

    def names(self, directory: Descriptor) -> list[str]:
        """See ``Linux``."""
        return list(self._nodes[node_of(directory)].names)

    def path_of(self, directory: Descriptor) -> str | None:
        """See ``Linux``."""
        if node_of(directory) == 1:
            return "/"
        for number, node in self._nodes.items():
            for name, each in node.names.items():
                if each == node_of(directory):
                    parent = self.path_of(OpenFile(number))
                    return None if parent is None else os.path.join(parent, name)
        return None

    def link(self, source: tuple[Descriptor, str], target: tuple[Descriptor, str]) -> None:
        """See ``Linux``."""
        number = self._entry(source)
        if target[1] in self._nodes[node_of(target[0])].names:
            raise MediumError(errno.EEXIST, f"{target[1]}: exists")
        self._change(f"link {target[1]}", (node_of(target[0]), target[1], number))

    def note(self, directory: Descriptor, name: str, text: bytes) -> None:
        """See ``Linux``. Its bytes come and go with its name."""
        if name in self._nodes[node_of(directory)].names:
            raise MediumError(errno.EEXIST, f"{name}: exists")
        number = self._add(False)
        self._nodes[number].data = self._nodes[number].stored = text
        self._change(f"note {name}", (node_of(directory), name, number))

    def read_link(self, directory: Descriptor, name: str) -> bytes | None:
        """See ``Linux``."""
        number = self._nodes[node_of(directory)].names.get(name)
        return None if number is None else self._nodes[number].data

    def rename(self, source: tuple[Descriptor, str], target: tuple[Descriptor, str]) -> None:
        """See ``Linux``. Two names of one file stay as they are, as POSIX has it."""
        number = self._entry(source)
        if self._nodes[node_of(target[0])].names.get(target[1]) != number:
            self._change(
                f"rename {source[1]} to {target[1]}",
                (node_of(target[0]), target[1], number),
                (node_of(source[0]), source[1], None),
            )

    def unlink(self, directory: Descriptor, name: str) -> None:
        """See ``Linux``."""
        if name in self._nodes[node_of(directory)].names:
            self._change(f"unlink {name}", (node_of(directory), name, None))

    def remove_folder(self, directory: Descriptor, name: str) -> bool:
        """See ``Linux``."""
        number = self._nodes[node_of(directory)].names.get(name)
        if number is None or self._nodes[number].names:
            return False
        self._change(f"rmdir {name}", (node_of(directory), name, None))
        return True

    def lock(self, file: Descriptor) -> bool:
        """See ``Linux``."""
        return self._locks.setdefault(node_of(file), file) is file

    def unlock(self, file: Descriptor) -> None:
        """See ``Linux``."""
        if self._locks.get(node_of(file)) is file:
            del self._locks[node_of(file)]

    def is_local(self, file: Descriptor) -> bool:
        """See ``Linux``."""
        return True

    def is_unused(self, file: Descriptor) -> bool:
        """See ``Linux``."""
        return not any(each.node == node_of(file) and each is not file for each in self._opened)

    def _event(self, text: str) -> None:
        self.events += 1
        if self.stop is not None and self.events >= self.stop:
            raise Crash(text)
        number = self.fails(self.events, text)
        if number is not None:
            raise MediumError(number, f"{text}: {os.strerror(number)}")

    def _handle(self, number: int) -> OpenFile:
        opened = OpenFile(number)
        self._opened.append(opened)
        return opened

    def _add(self, is_directory: bool) -> int:
        number = max(self._nodes) + 1
        self._nodes[number] = _Node(is_directory, changed_ns=self.events)
        if is_directory:
            self._durable[number] = {}
        return number

    def _change(self, text: str, *entries: tuple[int, str, int | None]) -> None:
        self._event(text)
        self._enter(*entries)

    def _enter(self, *entries: tuple[int, str, int | None]) -> None:
        self._pending.append(_Change(entries))
        for directory, name, number in entries:
            names = self._nodes[directory].names
            if number is None:
                names.pop(name, None)
            else:
                names[name] = number

    def _enter_durable(self, directory: int, name: str, number: int | None) -> None:
        if number is None:
            self._durable[directory].pop(name, None)
        else:
            self._durable[directory][name] = number

    def _status(self, number: int) -> FileState:
        node = self._nodes[number]
        links = sum(
            each == number for other in self._nodes.values() for each in other.names.values()
        )
        kind = stat.S_IFDIR if node.is_directory else stat.S_IFREG
        return FileState((1, number), links, len(node.data), kind | node.mode, node.changed_ns)

    def _entry(self, place: tuple[Descriptor, str]) -> int:
        number = self._nodes[node_of(place[0])].names.get(place[1])
        if number is None:
            raise MediumError(errno.ENOENT, f"{place[1]}: not there")
        return number

    def _end(self, path: str) -> tuple[int, str]:
        parent, name = os.path.split(path)
        return self._find(parent), name

    def _find(self, path: str) -> int:
        number = 1
        for name in [part for part in path.split("/") if part]:
            found = self._nodes[number].names.get(name)
            if found is None:
                raise MediumError(errno.ENOENT, f"{path}: not there")
            number = found
        return number


def node_of(file: Descriptor) -> int:
    assert isinstance(file, OpenFile), "every call is of this class"
    return file.node


def _telling(axes: int, source: random.Random, samples: int) -> Iterator[tuple[bool, ...]]:
    for kept in (False, True):
        yield (kept,) * axes
        for axis in range(axes):
            yield tuple((each == axis) != kept for each in range(axes))
    for _ in range(samples):
        yield tuple(source.random() < 0.5 for _ in range(axes))
