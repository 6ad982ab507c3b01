"""The exploration finds what is wrong with an engine: each mistake here is one somebody could make.

Each replaces one part of the process that ``test_explore`` runs. The right parts pass the same
searches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import pytest

from portus.engine.spec import PAGE, Extent
from portus.errors import CorruptionError, MediumError, PortusError
from portus.reach.format.layout import DATA_START, SLOT_OFFSETS
from portus.reach.index.catalogue import Catalogue
from portus.reach.index.commit_records import Change
from portus.reach.index.directory import create_pool
from portus.reach.index.free_space import FreeSpace
from portus.reach.index.pool import PoolWriter
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import NOWHERE, VersionRecord
from portus.reach.index.roots import Root, format_pool, store_root
from portus.reach.index.space import Runs
from portus.reach.media.lock import ProcessLocks
from portus.reach.media.pool import FileSystem, Locks
from tests.crash.trainer import (
    POOL,
    Fact,
    Plan,
    Trainer,
    disk,
    give_back,
    grow,
    process,
    retire_by_itself,
    save_and_retire,
    save_one,
    save_three,
    save_together,
    verified,
    verify,
)
from tests.simulation.crash import NO_FAULTS, CrashMedium, Faults
from tests.simulation.explore import Explorer, ImageError


def is_root(ranges: Sequence[Extent]) -> bool:
    return any(extent.offset in SLOT_OFFSETS for extent in ranges)


# --- wrong orders of persists ---------------------------------------------------------------


class DataNotPersisted(CrashMedium):
    def persist(self, ranges: Sequence[Extent]) -> None:
        super().persist(ranges[-1:])  # the records, or the root


class NothingPersistedBeforeTheRoot(CrashMedium):
    def persist(self, ranges: Sequence[Extent]) -> None:
        if is_root(ranges):
            super().persist(ranges)


class RootNotPersisted(CrashMedium):
    def persist(self, ranges: Sequence[Extent]) -> None:
        if not is_root(ranges):
            super().persist(ranges)


class DataAndRootInOnePersist(CrashMedium):
    waiting: tuple[Extent, ...] = ()

    def persist(self, ranges: Sequence[Extent]) -> None:
        self.waiting = (*self.waiting, *ranges)
        if is_root(ranges):
            super().persist(self.waiting)


class RootBeforeData(CrashMedium):
    waiting: Sequence[Extent] = ()

    def persist(self, ranges: Sequence[Extent]) -> None:
        if is_root(ranges):
            super().persist(ranges)
            super().persist(self.waiting)
        else:
            self.waiting = ranges


class RootNotStoredAgainAtOpen(CrashMedium):
    """A root that is found is believed, though it may be in caches only."""

    opened = False

    def store(self, offset: int, data: bytes | memoryview) -> None:
        if self.opened or offset not in SLOT_OFFSETS:
            super().store(offset, data)

    def persist(self, ranges: Sequence[Extent]) -> None:
        if self.opened or not is_root(ranges):
            super().persist(ranges)
        self.opened = True


class RetryAfterEio(CrashMedium):
    def persist(self, ranges: Sequence[Extent]) -> None:
        try:
            super().persist(ranges)
        except MediumError:
            self._poison = ""
            super().persist(ranges)


class GrowthNotDurable(CrashMedium):
    """Neither grow nor persist syncs the size, as with msync."""

    def grow(self, size: int) -> None:
        before = self._file().sizes
        super().grow(size)
        self._file().sizes = tuple(dict.fromkeys((*before, self.size)))

    def persist(self, ranges: Sequence[Extent]) -> None:
        sizes = self._file().sizes
        super().persist(ranges)
        self._file().sizes = sizes


def on(medium: type[CrashMedium]) -> type[Trainer]:
    """A process whose pool is on such a medium."""

    class Wrong(Trainer):
        def open_pool(self) -> PoolWriter:
            self.files.sync("/pools")
            number = self.files.disk.names.now[POOL]
            opened = medium(self.files, number, POOL, writable=True)
            return PoolWriter(opened, self.locks(), max_bytes=self.max_bytes)

    return Wrong


class OnlyTheFirstPersisted(PoolWriter):
    """Of commits that share a persist, it covers the bytes of one."""

    def commit_together(self, changes: Sequence[Change]) -> list[VersionRecord | None]:
        return super().commit_together([changes[0], *(replace(c, data=()) for c in changes[1:])])


class SharerToldOtherwise(PoolWriter):
    """The error of a shared persist goes to somebody else."""

    def commit_together(self, changes: Sequence[Change]) -> list[VersionRecord | None]:
        try:
            return super().commit_together(changes)
        except MediumError:
            return [None for _ in changes]


# --- wrong use of space ---------------------------------------------------------------------


def with_space(space: type[FreeSpace]) -> type[Trainer]:
    """A process whose writer takes that for free."""

    class Wrong(PoolWriter):
        def _recover(self) -> None:
            self._space = space(self.medium, self.locks)  # type: ignore[misc]
            super()._recover()

    return with_pool(Wrong)


class SpaceUsedAgainTooEarly(FreeSpace):
    """What the other slot still reaches counts as free."""

    def free(self) -> Runs:
        roots, self.roots = self.roots, self.roots[:1]
        try:
            return super().free()
        finally:
            self.roots = roots


class SpaceGivenBackTooEarly(PoolWriter):
    """What the other slot still reaches goes back to the file system."""

    def give_back(self, at_most: int | None = None) -> int:
        roots, self._space.roots = self._space.roots, self._space.roots[:1]
        try:
            return super().give_back(at_most)
        finally:
            self._space.roots = roots


class OlderSlotForgottenAtOpen(PoolWriter):
    """What only the older slot reaches is taken for free, and that slot stays as it is."""

    _open = False

    def _older(self, current: Catalogue) -> list[Catalogue]:
        return []

    def _recover(self) -> None:
        super()._recover()
        self._open = True

    def _commit_again(self) -> None:
        if self._open:
            super()._commit_again()


class RecordsShareAPage(PoolWriter):
    """The records of a commit begin where those of the one before end."""

    _rest = Extent(0, 0)

    def reserve(self, length: int, *, contiguous: bool = False) -> list[Extent]:
        if not contiguous:
            return super().reserve(length)
        if length <= self._rest.length:
            [area] = [Extent(self._rest.offset, length)]
            self.hold([area.offset], [area.length])
        else:
            [area] = super().reserve(length, contiguous=True)
        end = area.offset + length + -length % 8
        self._rest = Extent(end, -end % PAGE)
        return [Extent(area.offset, length)] if area.length == length else [area]


class SpaceOfANewVersionNotHeld(FreeSpace):
    """What was reserved for a save can be reserved again by its own records."""

    def free(self) -> Runs:
        held = list(self._held)
        self._held.clear()
        try:
            return super().free()
        finally:
            self._held.extend(held)


def with_pool(pool: type[PoolWriter]) -> type[Trainer]:
    """A process with such a writer."""

    class Wrong(Trainer):
        def open_pool(self) -> PoolWriter:
            self.files.sync("/pools")
            medium = self.files.open(POOL, writable=True)
            return pool(medium, self.locks(), max_bytes=self.max_bytes)

    return Wrong


class BlindLocks(ProcessLocks):
    def pins(self) -> set[int]:
        return set()


class Reading(Trainer):
    """A process in which somebody reads, while others save and retire."""

    new_locks: Callable[[], ProcessLocks] = ProcessLocks

    def locks(self) -> Locks:
        self.shared = type(self).new_locks()
        return self.shared


class PinIgnored(Reading):
    new_locks = BlindLocks


def save_while_read(trainer: Trainer) -> None:
    assert isinstance(trainer, Reading)
    trainer.save()
    reader = PoolReader(trainer.files.open(POOL, writable=False), trainer.shared)
    [version] = trainer.ids("a", trainer.steps())
    with reader.pin(version) as entry:
        save_and_retire(trainer)
        verified(reader, entry)


# --- wrong order of names -------------------------------------------------------------------


class Unsynced:
    """Files whose directories are never synced."""

    def __init__(self, files: FileSystem) -> None:
        self._files = files

    def __getattr__(self, name: str) -> object:
        return getattr(self._files, name)

    def sync(self, directory: str) -> None:
        pass


def unsynced(files: FileSystem) -> FileSystem:
    return cast(FileSystem, Unsynced(files))


class DirectoryNotSyncedAtOpen(Trainer):
    def open_pool(self) -> PoolWriter:
        medium = self.files.open(POOL, writable=True)
        return PoolWriter(medium, self.locks(), max_bytes=self.max_bytes)


class DirectoryNeverSynced(DirectoryNotSyncedAtOpen):
    def create(self) -> None:
        create_pool(POOL, unsynced(self.files))


class FormattedInPlace(Trainer):
    """The pool has its name before it is whole."""

    def create(self) -> None:
        medium = self.files.create(POOL, DATA_START)
        self.files.sync("/pools")
        format_pool(medium)


class NamedBeforePersisted(Trainer):
    def create(self) -> None:
        medium = self.files.create("/pools/new", DATA_START)
        for sequence in (0, 1):
            store_root(medium, bytes(16), Root(sequence, 1, DATA_START, NOWHERE))
        self.files.replace("/pools/new", POOL)
        self.files.sync("/pools")
        medium.persist([Extent(0, DATA_START)])


class RetiredBeforeCommit(Trainer):
    def write(self, model: str, step: int, keep: int | None) -> None:
        self.writer.retire(self.ids(model, self.surplus(model, keep)))
        super().write(model, step, None)


# --- they are found -------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """A wrong process, what it does before and after a crash, what is found then, and what fails
    meanwhile."""

    trainer: type[Trainer]
    plans: tuple[Plan, ...]
    found: str
    faults: Faults = NO_FAULTS


TORN = r"\.pt of step|digest|table of files"
LOST = "found .*, expected"

MISTAKES = {
    "data is not persisted": Mistake(on(DataNotPersisted), (save_three,), TORN),
    "nothing is persisted before the root": Mistake(
        on(NothingPersistedBeforeTheRoot), (save_three,), TORN
    ),
    "the root is not persisted": Mistake(on(RootNotPersisted), (save_three,), LOST),
    "data and root go in one persist": Mistake(on(DataAndRootInOnePersist), (save_three,), TORN),
    "the root is persisted before the data": Mistake(on(RootBeforeData), (save_three,), TORN),
    "the root is not stored again at open": Mistake(
        on(RootNotStoredAgainAtOpen),
        (save_and_retire, save_one),
        f"{LOST}|of another writer",
    ),
    "a failed persist is tried again": Mistake(
        on(RetryAfterEio), (save_three,), TORN, Faults(persist=frozenset({8}))
    ),
    "growth is not durable when it is used": Mistake(on(GrowthNotDurable), (grow,), "truncated"),
    "a shared persist covers one client's bytes": Mistake(
        with_pool(OnlyTheFirstPersisted), (save_together,), TORN
    ),
    "one who shared a failed persist is told that all is well": Mistake(
        with_pool(SharerToldOtherwise), (save_together,), LOST, Faults(persist=frozenset({7}))
    ),
    "space is used again too early": Mistake(
        with_space(SpaceUsedAgainTooEarly), (save_and_retire,), TORN
    ),
    "space is given back too early": Mistake(with_pool(SpaceGivenBackTooEarly), (give_back,), TORN),
    "the older slot is forgotten at open": Mistake(
        with_pool(OlderSlotForgottenAtOpen), (save_and_retire, save_one), TORN
    ),
    "records of two commits share a page": Mistake(
        with_pool(RecordsShareAPage), (retire_by_itself,), f"{LOST}|V1: page"
    ),
    "space in use is not held": Mistake(with_space(SpaceOfANewVersionNotHeld), (save_three,), TORN),
    "a pin is ignored": Mistake(PinIgnored, (save_while_read,), TORN),
    "the directory is never synced": Mistake(DirectoryNeverSynced, (save_one,), LOST),
    "the directory is not synced at open": Mistake(
        DirectoryNotSyncedAtOpen, (save_one, save_one), LOST
    ),
    "a pool is formatted in place": Mistake(FormattedInPlace, (save_one,), "not a P|not a p"),
    "a pool is named before it is persisted": Mistake(
        NamedBeforePersisted, (save_one,), "not a P|not a p"
    ),
    "a version is retired before the next commit": Mistake(
        RetiredBeforeCommit, (save_and_retire,), LOST
    ),
}


def explorer(mistake: Mistake) -> Explorer[Fact]:
    return Explorer(
        processes=[process(plan, mistake.trainer) for plan in mistake.plans],
        verify=verify,
        start=lambda: disk(mistake.faults),
        budgets=(40, 6),
        noise=True,
    )


@pytest.mark.long
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str) -> None:
    search = explorer(MISTAKES[name])
    # A reader that meets what a pin was to keep raises by itself.
    with pytest.raises((AssertionError, CorruptionError)) as caught:
        search.explore()
    print(caught.value)
    reason = caught.value.__cause__ or caught.value  # without a crash there is no image to name
    assert re.search(MISTAKES[name].found, str(reason)), reason
    if isinstance(caught.value, ImageError):
        with pytest.raises((AssertionError, PortusError)):
            search.replay(caught.value.case)


@pytest.mark.long
def test_who_reads_while_others_save_and_retire_is_safe() -> None:
    print(explorer(Mistake(Reading, (save_while_read,), "nothing")).explore())
