"""``OpenPlace``: a place for checkpoints, whatever it is.

A directory has files, a pool and a storage host have versions, a mirror has objects. Each is a
class of its own, named in ``reach.index.place.PLACES``, and nothing else asks which one it has:
whoever needs to know something asks for that (``abilities``, ``usage``), and a place that cannot
tell says None. ``portus.testing.places`` has the tests that each of them passes.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol

from portus.engine.loading.open_file import OpenFile
from portus.engine.spec import VersionInfo
from portus.errors import PortusError, UsageError
from portus.reach.index.check import Finding
from portus.reach.index.file_table import FileTable
from portus.reach.index.place import Place

if TYPE_CHECKING:
    from typing_extensions import Self

Progress = Callable[[int, int], None]
"""Takes the bytes that are done, and the bytes to do in all."""

Removal = Callable[[], int]
"""Removes what was chosen, and returns how many pointers went with it."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a place can do. ``volatile``: what it has does not survive a power loss. ``durable``:
    how many machines may have a checkpoint before it counts as committed. ``addressable``:
    its durable bytes have addresses, as those of persistent memory do."""

    volatile: bool
    durable: int
    addressable: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """The bytes of a pool. ``on_disk``: those that it takes of its file system; 0 if it is on none.
    ``kept``: those that its versions reach. ``failure``: the last save that failed, in words."""

    size: int
    on_disk: int
    kept: int
    uuid: str
    failure: str

    @property
    def reclaimable(self) -> int:
        """Return what a collection gives back, but for the records of one commit."""
        return max(0, self.on_disk - self.kept)

    @property
    def free(self) -> int:
        """Return what saves can use without removing a version, before the pool gets longer."""
        return max(0, self.size - self.kept)


class OpenCheckpoint(Protocol):
    """A checkpoint that is open for reading, and stays as it is meanwhile."""

    @property
    def files(self) -> Mapping[str, OpenFile]:
        """Return the files by their names; none if it has something else, such as tables."""

    def write(self, name: str, path: str, advance: Callable[[int], None]) -> None:
        """Write a file of it to ``path``, verified and synced. advance: told of bytes. Raises
        ``UsageError`` if there is no such file, ``CorruptionError``, ``MediumError``."""


@dataclass(slots=True)
class Verdict:
    """What a check found. ``size``: bytes that were read and compared. ``by``: what a file was
    compared with, in words. ``removed``: how many of ``versions`` the newest commit has no more."""

    path: str
    versions: int = 0
    removed: int = 0
    size: int = 0
    by: str = ""
    findings: Sequence[Finding] = ()


@dataclass(frozen=True, slots=True)
class Check:
    """Something to verify: all of a pool, or one checkpoint. ``title``: in short. ``run``: reads
    every byte, and notes in the verdict what it finds; raises ``PortusError``. ``file``: None, or
    the file in a directory that it is."""

    path: str
    title: str
    run: Callable[[Verdict, Progress], None]
    file: StoredCheckpoint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPace:
    """How a check reads: as fast as it can; or, to scrub, from the medium itself, ``bytes_per_s``
    at most, and telling at once what it finds."""

    bytes_per_s: int | None = None
    tell: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageOptions:
    """What counts as garbage besides free space. ``missing``: directories; versions that had their
    pointers there, or below, and to which none there leads any more. ``empty``: pool files without
    versions."""

    missing: Sequence[str] = ()
    empty: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """What a collection removes. ``gone``: versions. ``is_removed``: the pool file itself.
    ``freed``: bytes. ``pieces``: how many files or objects; None where there are none. ``errors``:
    of what could not be read, and may lead to one of ``gone``; then nothing is to be removed."""

    gone: Sequence[VersionInfo] = ()
    errors: Sequence[PortusError] = ()
    is_removed: bool = False
    freed: int = 0
    pieces: int | None = None


@dataclass(frozen=True, slots=True)
class Collection:
    """One part of a place that is collected by itself. ``path``: where it is. ``model``: whose it
    is; empty: that of all. ``look``: finds the garbage. ``collect``: removes what was found;
    returns what went. Both raise ``PortusError``."""

    path: str
    model: str
    look: Callable[[], Garbage]
    collect: Callable[[Garbage], Garbage]


class StoredCheckpoint(abc.ABC):
    """A checkpoint that a place has. ``info.model`` is empty for a file in a directory.

    ``path``: where it is in its place, if it is a file there; else empty. ``leads_to``: of a link
    or a pointer, what it leads to."""

    def __init__(self, place: Place, info: VersionInfo, path: str = "") -> None:
        self.place: Final = place
        self.info: Final = info
        self.path: Final = path

    @property
    def name(self) -> str:
        """The checkpoint as users name it."""
        return self.path or f"{self.info.model}@{self.info.step}"

    @property
    def leads_to(self) -> str:
        return ""

    @property
    def details(self) -> Mapping[str, str]:
        """Return what else there is to say of it, for machines."""
        return {}

    @abc.abstractmethod
    def open(self) -> AbstractContextManager[OpenCheckpoint]:
        """Open it for reading. Raises ``CorruptionError``, ``MediumError``, ``StaleError``."""

    def table(self) -> FileTable | None:
        """Return the files that it has, if that is known without a download; None if it has none.
        Raises as ``open``."""
        return None

    def unique(self) -> int | None:
        """Return the bytes that no other checkpoint reaches; None where that is not known."""
        return None


class OpenPlace(abc.ABC):
    """A place of checkpoints, open. One thread at a time. What it needs is opened by its first use;
    close it.

    All raise what the place raises: ``UsageError``, ``MediumError``, ``CorruptionError``,
    ``TransportError``.
    """

    after_removal: str = ""
    """What becomes of the space of removed checkpoints, in words."""

    parts: str = "pools"
    """What documents call the parts of a place that are collected."""

    piece: str = "page"
    """What garbage is counted in."""

    def __init__(self, place: Place) -> None:
        self.place: Final = place

    @property
    @abc.abstractmethod
    def abilities(self) -> Abilities:
        """Return what the place can do."""

    def usage(self) -> Usage | None:
        """Return how full the place is; None where that is not known."""
        return None

    @abc.abstractmethod
    def list(
        self, model: str | None = None, skipped: dict[str, PortusError] | None = None
    ) -> list[StoredCheckpoint]:
        """Return the checkpoints, oldest first; those of one model, or all. skipped: gets the
        models that cannot be read, which are passed over then, and why."""

    def models(self) -> Sequence[str]:
        """Return the names of all models."""
        return sorted({each.info.model for each in self.list() if each.info.model})

    @contextmanager
    def open(self, name: str) -> Iterator[OpenCheckpoint]:
        """Open the newest checkpoint of that name for reading."""
        with self._find(name)[-1].open() as opened:
            yield opened

    def remove(self, name: str) -> None:
        """Remove the checkpoints of that name, durably."""
        with self.removal(self._find(name)) as act:
            act()

    @abc.abstractmethod
    def removal(self, chosen: Sequence[StoredCheckpoint]) -> AbstractContextManager[Removal]:
        """Lock the place, and yield what removes these checkpoints of it, durably. Raises
        ``UsageError`` if one is not there any more, before anything is removed."""

    @abc.abstractmethod
    def checks(self, chosen: Sequence[StoredCheckpoint] | None, pace: CheckPace) -> Iterator[Check]:
        """Yield what to verify: these checkpoints of the place, or everything in it."""

    def details(self, model: str) -> Mapping[str, str | int | bool | None]:
        """Return what there is to say of a model that was listed, for machines."""
        return {}

    def collections(self, options: GarbageOptions) -> Iterator[Collection]:
        """Yield what can be collected. Raises ``UsageError`` for options that make no sense."""
        yield from ()

    def journals(self, links: str | None) -> Sequence[str]:
        """Return the directories that may have journals of runs which saved there. links: the
        nearest ``.portus``, which has those of runs that saved elsewhere."""
        return []

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the place. A second call does nothing."""

    def _find(self, name: str) -> Sequence[StoredCheckpoint]:
        found = [each for each in self.list() if each.name == name]
        if not found:
            raise UsageError(f"{self.place}: there is no checkpoint {name!r}")
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def adding(progress: Progress, total: int) -> Callable[[int], None]:
    """Return a function that takes the bytes of each piece, and shows their sum."""
    done = 0

    def add(size: int) -> None:
        nonlocal done
        done += size
        progress(min(done, total), total)

    return add
