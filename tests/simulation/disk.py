"""What a crash may leave on a disk, as a model: pages, sizes and names, each with its history.

Theory. What was stored is in a cache until it is persisted. Meanwhile the system may write any
page to the disk at any moment, also in the middle of a store, and a disk writes 512 bytes as one.
So at power loss

* each sector of a page holds any of the states that the page had since the last persist of it,
  and one sector may be cut within the last store to it;
* the size of a file is any that it had since its last persist;
* each change of a name since the last sync of its directory was made or was not. Changes of one
  name are made in their order. A rename within a directory is one change; between directories
  the new name comes first, and the old one goes with the sync of its own directory.

Persistent memory (a ``File`` with ``unit`` 64) is finer: any cache line may be written back at any
moment, and 8 bytes are stored as one. What was flushed is there for sure only after the next drain,
and as it was when it was flushed.

Everything else is as it was persisted. A persist covers the bytes it was asked for and the size,
nothing more, though real systems often write more: who relies on that is wrong elsewhere.

After a persist that failed, the pages it should have written look clean: they load as they were
stored, the disk has any of their states, and a later persist passes them over unless they are
stored to again.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import xxhash

from portus.engine.media.read_file import SECTOR
from portus.engine.spec import PAGE, Extent
from portus.reach.media.pmem import LINE

_IDEALS_MAX: Final = 8
"""With more unsynced changes of names than this, their outcomes are sampled."""

_BLANK: Final = bytes(PAGE)


class Page(NamedTuple):
    """``states``: what the disk may hold, oldest first; the last one is what is loaded.
    ``dirty``: the next persist writes it."""

    states: tuple[bytes, ...]
    dirty: bool

    def stored(self, start: int, piece: bytes) -> Page:
        """Return the page with ``piece`` at ``start``. It is dirty even if nothing changed."""
        before = self.states[-1]
        after = before[:start] + piece + before[start + len(piece) :]
        return Page(self.states if after == before else (*self.states, after), True)

    def persisted(self, start: int, end: int) -> Page:
        """Return the page with its bytes from ``start`` to ``end`` on the disk, if it is dirty."""
        if not self.dirty:
            return self
        now = self.states[-1]
        if end - start == PAGE:
            return Page((now,), False)
        older = (each[:start] + now[start:end] + each[end:] for each in self.states[:-1])
        states = (*(each for each in dict.fromkeys(older) if each != now), now)
        return Page(states, len(states) > 1)

    def drained(self, flushed: dict[int, int]) -> Page:
        """Return the page with each line on the medium at least as new as when it was flushed.
        flushed: the number of the page's state at that time, for each line by index."""
        now = self.states[-1]
        lines = [flushed.get(line, 0) for line in range(PAGE // LINE)]
        older = (
            b"".join(
                self.states[max(place, first)][line * LINE : line * LINE + LINE]
                for line, first in enumerate(lines)
            )
            for place in range(len(self.states) - 1)
        )
        states = (*(each for each in dict.fromkeys(older) if each != now), now)
        return Page(states, len(states) > 1)


_BLANK_PAGE: Final = Page((_BLANK,), False)


@dataclass(slots=True)
class File:
    """One file. Pages never stored to are not listed, and are zero. ``time`` is an event number.

    ``unit``: bytes that are written as one. ``flushed``, of persistent memory: for each page the
    lines that were flushed and not drained, and in which state of the page."""

    sizes: tuple[int, ...]
    pages: dict[int, Page] = field(default_factory=dict)
    time: int = 0
    unit: int = SECTOR
    flushed: dict[int, dict[int, int]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes, as the running system sees it."""
        return self.sizes[-1]

    def copy(self) -> File:
        """One that changes by itself."""
        flushed = {index: dict(lines) for index, lines in self.flushed.items()}
        return File(self.sizes, dict(self.pages), self.time, self.unit, flushed)

    def load(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` with what was stored last."""
        first, start = divmod(offset, PAGE)
        if start + len(target) <= PAGE:  # nearly all loads
            page = self.pages.get(first, _BLANK_PAGE)
            target[:] = page.states[-1][start : start + len(target)]
            return
        for index, start, end, place in _spans(Extent(offset, len(target))):
            page = self.pages.get(index, _BLANK_PAGE)
            target[place : place + end - start] = page.states[-1][start:end]

    def store(self, offset: int, data: bytes) -> None:
        """Put ``data`` at ``offset``."""
        for index, start, end, place in _spans(Extent(offset, len(data))):
            page = self.pages.get(index, _BLANK_PAGE)
            self.pages[index] = page.stored(start, data[place : place + end - start])

    def persist(self, extent: Extent) -> None:
        """What was stored in ``extent``, and the size, are on the disk."""
        self.sizes = (self.size,)
        for index, start, end, _ in _spans(extent):
            page = self.pages.get(index)
            if page is not None:
                self.pages[index] = page.persisted(start, end)

    def flush(self, extent: Extent) -> None:
        """Begin to write back the lines of ``extent``, as they are now."""
        for index, start, end, _ in _spans(extent):
            if index in self.pages:
                newest = len(self.pages[index].states) - 1
                lines = self.flushed.setdefault(index, {})
                lines.update(dict.fromkeys(range(start // LINE, -(-end // LINE)), newest))

    def drain(self) -> None:
        """What was flushed is on the medium."""
        for index, lines in self.flushed.items():
            self.pages[index] = self.pages[index].drained(lines)
        self.flushed = {}

    def lost(self) -> File:
        """One in which nothing is left that was not persisted."""
        pages = {index: Page(page.states[:1], False) for index, page in self.pages.items()}
        return File(self.sizes[:1], pages, self.time, self.unit)

    def cut(self) -> None:
        """Forget what is behind the end: it reads as zero if the file grows again."""
        last, end = divmod(self.size, PAGE)
        for index in [each for each in self.pages if each >= last + (end > 0)]:
            del self.pages[index]
        if last in self.pages:
            content = self.pages[last].states[-1]
            self.pages[last] = Page((content[:end] + bytes(PAGE - end),), False)

    def lose(self) -> None:
        """A persist failed: what was dirty looks clean."""
        for index, page in self.pages.items():
            self.pages[index] = Page(page.states, False)


class NameChange(NamedTuple):
    """A change of names that happens as a whole: each path leads to that file, or to none.
    It needs the change number ``after`` (0: none) to have happened."""

    number: int
    paths: tuple[tuple[str, int | None], ...]
    after: int

    def touches(self, other: NameChange) -> bool:
        """True if both change the same name."""
        return not {path for path, _ in self.paths}.isdisjoint(path for path, _ in other.paths)


@dataclass(slots=True)
class NameTable:
    """Names (paths) of files (numbers). ``synced``: on the disk; ``pending``: not yet, in order."""

    synced: dict[str, int] = field(default_factory=dict)
    now: dict[str, int] = field(default_factory=dict)
    pending: tuple[NameChange, ...] = ()

    def copy(self) -> NameTable:
        """One that changes by itself."""
        return NameTable(dict(self.synced), dict(self.now), self.pending)

    def change(self, number: int, path: str, file: int | None, after: int = 0) -> None:
        """Let ``path`` lead to ``file``, or to nothing."""
        self._add(NameChange(number, ((path, file),), after))

    def move(self, number: int, source: str, target: str) -> None:
        """Rename. Uses up the numbers ``number`` and ``number + 1``."""
        file = self.now[source]
        if os.path.dirname(source) == os.path.dirname(target):
            self._add(NameChange(number, ((source, None), (target, file)), 0))
        else:
            self.change(number, target, file)
            self.change(number + 1, source, None, after=number)

    def sync(self, directory: str) -> None:
        """Changes in ``directory`` are on the disk, with those that they need."""
        wanted = {
            change.number
            for change in self.pending
            if any(os.path.dirname(path) == directory for path, _ in change.paths)
        }
        for change in reversed(self.pending):
            if change.number in wanted:
                wanted.update(self._needs(change))
        done = [change for change in self.pending if change.number in wanted]
        self.synced = _after(self.synced, done)
        self.pending = tuple(each for each in self.pending if each.number not in wanted)

    def outcomes(self, seed: random.Random) -> list[dict[str, int]]:
        """The names that a power loss may leave; none changed first, all changed last."""
        if len(self.pending) <= _IDEALS_MAX:
            chosen = list(self._ideals(len(self.pending)))
        else:
            chosen = [self.pending[:count] for count in range(len(self.pending) + 1)]
            chosen[1:1] = [self._some(seed) for _ in range(1 << _IDEALS_MAX)]
        return [_after(self.synced, changes) for changes in chosen]

    def _add(self, change: NameChange) -> None:
        self.pending = (*self.pending, change)
        self.now = _after(self.now, [change])

    def _needs(self, change: NameChange) -> set[int]:
        """Numbers of the pending changes without which ``change`` cannot have happened."""
        return {
            other.number
            for other in self.pending
            if other.number < change.number
            and (other.number == change.after or other.touches(change))
        }

    def _ideals(self, count: int) -> Iterator[tuple[NameChange, ...]]:
        """Each way in which some of the first ``count`` pending changes can have happened."""
        if count == 0:
            yield ()
            return
        change = self.pending[count - 1]
        needs = self._needs(change)
        for before in list(self._ideals(count - 1)):
            yield before
            if needs <= {each.number for each in before}:
                yield (*before, change)

    def _some(self, seed: random.Random) -> tuple[NameChange, ...]:
        done: tuple[NameChange, ...] = ()
        for change in self.pending:
            if self._needs(change) <= {each.number for each in done} and seed.random() < 0.5:
                done = (*done, change)
        return done


def _after(names: dict[str, int], changes: Sequence[NameChange]) -> dict[str, int]:
    names = dict(names)
    for path, file in itertools.chain.from_iterable(change.paths for change in changes):
        if file is None:
            names.pop(path, None)
        else:
            names[path] = file
    return names


@dataclass(slots=True)
class Disk:
    """Files by number, their names, and the directories, which are always there."""

    directories: tuple[str, ...]
    names: NameTable = field(default_factory=NameTable)
    files: dict[int, File] = field(default_factory=dict)

    def copy(self) -> Disk:
        """One that changes by itself: what a process that is killed leaves, caches alive."""
        files = {number: file.copy() for number, file in self.files.items()}
        return Disk(self.directories, self.names.copy(), files)

    def digest(self) -> bytes:
        """The same for every disk on which the same can be found now."""
        hasher = xxhash.xxh3_128()
        numbers: dict[int, int] = {}
        for path, number in sorted(self.names.now.items()):
            seen = numbers.setdefault(number, len(numbers))
            hasher.update(f"{path}\0{seen}\0{self.files[number].size}\0".encode("utf-8", "replace"))
        for number in numbers:
            pages = self.files[number].pages
            for index in sorted(pages):
                if pages[index].states[-1] != _BLANK:
                    hasher.update(index.to_bytes(8, "little"))
                    hasher.update(pages[index].states[-1])
        return hasher.digest()

    def lost(self) -> Disk:
        """One on which nothing is left that was neither persisted nor synced."""
        files = {number: file.lost() for number, file in self.files.items()}
        names = NameTable(dict(self.names.synced), dict(self.names.synced))
        return Disk(self.directories, names, files)

    def forget_unnamed(self) -> None:
        """Forget files without a name: nobody can open them any more."""
        for number in self.files.keys() - set(self.names.now.values()):
            del self.files[number]


def _spans(extent: Extent) -> Iterator[tuple[int, int, int, int]]:
    """The pages of ``extent``: index, start and end within the page, and where in the extent."""
    for index in range(extent.offset // PAGE, -(-extent.end // PAGE)):
        start = max(extent.offset - index * PAGE, 0)
        end = min(extent.end - index * PAGE, PAGE)
        if end > start:
            yield index, start, end, index * PAGE + start - extent.offset
