"""``OpenPlace``: a place for checkpoints of any kind.

A directory has files, a pool and a storage host have versions, a mirror has objects. Each kind is a
class of its own, named in ``reach.index.place.PLACES``, and no other code asks for the kind. A
checkpoint is copied from one place to another by ``draft``, of what ``open`` yields there. Code
that needs a fact asks for that fact (``abilities``, ``usage``), and a place that does not know it
returns None. ``portus.testing.places`` has the tests that each of them passes.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, Protocol

from portus.engine.loading.open_file import DiskFile, OpenFile, open_file
from portus.engine.pipeline.draft import Labels
from portus.engine.spec import VersionInfo
from portus.errors import PortusError, UsageError
from portus.reach.index.check import Finding
from portus.reach.index.file_table import FileTable
from portus.reach.index.place import Place
from portus.reach.media.local import naming_call
from portus.reach.versions.open_version import OpenVersion

if TYPE_CHECKING:
    from typing_extensions import Self

Progress = Callable[[int, int], None]
"""Takes the bytes that are done, and the bytes to do in total."""

Removal = Callable[[], int]
"""Removes the chosen checkpoints, and returns how many pointers were removed with them."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """The abilities of a place. ``volatile``: its data does not survive a power loss. ``durable``:
    how many machines may have a checkpoint before it counts as committed. ``addressable``: its
    durable bytes have addresses, as those of persistent memory do."""

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
        """The bytes that a collection returns, except the records of one commit."""
        return max(0, self.on_disk - self.kept)

    @property
    def free(self) -> int:
        """The bytes that saves can use without removing a version, before the pool grows."""
        return max(0, self.size - self.kept)


class CheckpointFile(OpenFile, Protocol):
    """A file of a checkpoint that is open for reading."""

    def write(self, number: int, path: str, advance: Callable[[int], None]) -> None:
        """Write all of it to the open and empty file ``number``, verified. path: for messages.
        advance: receives the bytes of each piece. Raises ``CorruptionError``, ``MediumError``."""


Files = Mapping[str, CheckpointFile]
"""The files of a checkpoint, by their names."""

Commit = Callable[[], None]
"""Makes a draft a checkpoint."""


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A checkpoint that is open for reading, and does not change meanwhile. ``files``: by their
    names; none if it has other data, such as tables. ``version``: that of a pool."""

    files: Files
    version: OpenVersion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """The options of a copy. ``times``: when files were saved, in nanoseconds, if not now.
    ``advance``: receives the bytes of each piece."""

    times: Mapping[str, int] = field(default_factory=dict)
    advance: Callable[[int], None] = lambda size: None


@dataclass(slots=True)
class Verdict:
    """The findings of a check. ``size``: bytes that were read and compared. ``by``: what a file was
    compared with, in words. ``removed``: how many of ``versions`` the newest commit does not have.
    """

    path: str
    versions: int = 0
    removed: int = 0
    size: int = 0
    by: str = ""
    findings: Sequence[Finding] = ()


@dataclass(frozen=True, slots=True)
class Check:
    """Something to verify: all of a pool, or one checkpoint. ``title``: a short name. ``run``:
    reads every byte, and adds its findings to the verdict; raises ``PortusError``. ``file``: the
    file in a directory, if it is one."""

    path: str
    title: str
    run: Callable[[Verdict, Progress], None]
    file: StoredCheckpoint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPace:
    """The pace of a check: as fast as possible; or from the medium itself, at
    ``bytes_per_s`` at most, reporting each finding immediately."""

    bytes_per_s: int | None = None
    tell: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageOptions:
    """The garbage to collect besides free space. ``missing``: directories; versions whose pointers
    were in them, or below, are garbage if no pointer there refers to them any more. ``empty``: pool
    files without versions."""

    missing: Sequence[str] = ()
    empty: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """The garbage of a collection. ``gone``: versions. ``is_removed``: the pool file itself.
    ``freed``: bytes. ``pieces``: how many files or objects; None if there are none. ``errors``: of
    files that could not be read, and may be pointers to ``gone``; then nothing may be removed."""

    gone: Sequence[VersionInfo] = ()
    errors: Sequence[PortusError] = ()
    is_removed: bool = False
    freed: int = 0
    pieces: int | None = None


@dataclass(frozen=True, slots=True)
class Collection:
    """A part of a place with its own collection. ``path``: of the part. ``model``: its model;
    empty: all models. ``look``: finds the garbage. ``collect``: removes it, and returns what was
    removed. Both raise ``PortusError``."""

    path: str
    model: str
    look: Callable[[], Garbage]
    collect: Callable[[Garbage], Garbage]


class StoredCheckpoint(abc.ABC):
    """A checkpoint in a place. ``info.model`` is empty for a file in a directory.

    ``path``: its path in its place, if it is a file there; else empty. ``step``: None if nothing
    tells that of a file. ``leads_to``: the target of a link or a pointer.
    """

    def __init__(self, place: Place, info: VersionInfo, path: str = "") -> None:
        self.place: Final = place
        self.info: Final = info
        self.path: Final = path
        self.step: int | None = info.step

    @property
    def name(self) -> str:
        """The checkpoint as users name it."""
        return self.path or f"{self.info.model}@{self.info.step}"

    @property
    def leads_to(self) -> str:
        return ""

    @property
    def details(self) -> Mapping[str, str]:
        """More fields about the checkpoint, for JSON documents."""
        return {}

    @abc.abstractmethod
    def open(self) -> AbstractContextManager[OpenCheckpoint]:
        """Open the checkpoint. Raise ``CorruptionError``, ``MediumError``, ``StaleError``."""

    def table(self) -> FileTable | None:
        """Return the files of the checkpoint, if they are known without a download; None if it has
        none. Raise as ``open``."""
        return None

    def unique(self) -> int | None:
        """Return the bytes that no other checkpoint reaches, or None if that is unknown."""
        return None


class OpenPlace(abc.ABC):
    """A place of checkpoints, open. One thread at a time. It opens files and connections at their
    first use, until ``close``.

    All methods raise what the place raises: ``UsageError``, ``MediumError``, ``CorruptionError``,
    ``TransportError``.
    """

    after_removal: str = ""
    """What happens to the space of removed checkpoints, in words."""

    parts: str = "pools"
    """The name of the parts with collections, in JSON documents."""

    piece: str = "page"
    """The unit in which garbage is counted."""

    def __init__(self, place: Place) -> None:
        self.place: Final = place

    @property
    @abc.abstractmethod
    def abilities(self) -> Abilities:
        """The abilities of the place."""

    def usage(self) -> Usage | None:
        """Return how full the place is, or None if that is unknown."""
        return None

    @abc.abstractmethod
    def list(
        self, model: str | None = None, skipped: dict[str, PortusError] | None = None
    ) -> list[StoredCheckpoint]:
        """Return the checkpoints, oldest first; those of one model, or all. skipped: receives the
        models that cannot be read, with their errors, instead of raising."""

    def models(self) -> Sequence[str]:
        """Return the names of all models."""
        return sorted({each.info.model for each in self.list() if each.info.model})

    @contextmanager
    def open(self, name: str) -> Iterator[OpenCheckpoint]:
        """Open the newest checkpoint of that name for reading."""
        with self._find(name)[-1].open() as opened:
            yield opened

    @abc.abstractmethod
    def draft(
        self, labels: Labels, files: Files, options: CopyOptions
    ) -> AbstractContextManager[Commit]:
        """Copy files to the place, verified, and yield a function that makes them a checkpoint:
        visible at once, and durable, all of them or none. Without its call nothing is left of them.

        labels: the place takes those that it has room for. files: by their names, or by their paths
        below the place if that is a directory or a mirror.
        """

    def remove(self, name: str) -> None:
        """Remove the checkpoints of that name, durably."""
        with self.removal(self._find(name)) as act:
            act()

    @abc.abstractmethod
    def removal(self, chosen: Sequence[StoredCheckpoint]) -> AbstractContextManager[Removal]:
        """Lock the place, and yield a function that removes these checkpoints, durably. Raises
        ``UsageError`` if one does not exist any more, before anything is removed."""

    @abc.abstractmethod
    def checks(self, chosen: Sequence[StoredCheckpoint] | None, pace: CheckPace) -> Iterator[Check]:
        """Yield the checks of these checkpoints, or of everything in the place."""

    def details(self, model: str) -> Mapping[str, str | int | bool | None]:
        """Return more fields about a listed model, for JSON documents."""
        return {}

    def collections(self, options: GarbageOptions) -> Iterator[Collection]:
        """Yield the place's collections. Raise ``UsageError`` for options that do not apply."""
        yield from ()

    def journals(self, links: str | None) -> Sequence[str]:
        """Return the directories that may have journals of runs that saved there. links: the
        nearest ``.portus``, which has those of runs that saved elsewhere."""
        return []

    @abc.abstractmethod
    def close(self) -> None:
        """Close the place. A second call does nothing."""

    def _find(self, name: str) -> Sequence[StoredCheckpoint]:
        found = [each for each in self.list() if each.name == name]
        if not found:
            raise UsageError(f"{self.place}: there is no checkpoint {name!r}")
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def copy_files(files: Files, options: CopyOptions) -> Iterator[Mapping[str, DiskFile]]:
    """Yield verified copies of files, which any thread may read, in any order, and again."""
    with ExitStack() as stack:
        directory, found = stack.enter_context(TemporaryDirectory()), dict[str, DiskFile]()
        for number, (name, file) in enumerate(files.items()):
            path = os.path.join(directory, str(number))
            with naming_call("write", path), open(path, "w+b") as copy:
                file.write(copy.fileno(), name, options.advance)
            found[name] = stack.enter_context(open_file(path, as_torch=False))
        yield found


def adding(progress: Progress, total: int) -> Callable[[int], None]:
    """Return a function that takes the bytes of each piece, and shows their sum."""
    done = 0

    def add(size: int) -> None:
        nonlocal done
        done += size
        progress(min(done, total), total)

    return add
