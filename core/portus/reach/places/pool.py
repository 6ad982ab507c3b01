"""``PoolPlace``: a pool on a device, or in a file; ``HostPlace``: that of a tenant on a host."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Collection as AnyCollection
from dataclasses import replace
from functools import cached_property, partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from portus.engine.copying.segments import Stop
from portus.engine.format.pointer_marks import POINTER_MAX
from portus.engine.loading.open_file import DiskFile, reads
from portus.engine.media.read_file import Pace
from portus.engine.pipeline.draft import Labels
from portus.engine.pipeline.plan import Snapshot
from portus.engine.spec import VersionInfo
from portus.errors import CorruptionError, MediumError, PortusError, StaleError, UsageError
from portus.reach.files.home import Pool, host_journals, open_home, open_place
from portus.reach.files.reference import read_reference
from portus.reach.index.check import (
    CheckOptions,
    Finding,
    Severity,
    check_pool,
)
from portus.reach.index.directory import (
    WRITERS,
    journal_directory,
    on_disk,
    remove_journals,
    remove_pool,
)
from portus.reach.index.file_table import FileTable, PackedFile, encode_table
from portus.reach.index.place import Place, load_class
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry
from portus.reach.index.roots import read_failure
from portus.reach.media.local import LocalFiles
from portus.reach.places.base import (
    Abilities,
    Check,
    CheckPace,
    Collection,
    Commit,
    CopyOptions,
    Files,
    Garbage,
    GarbageOptions,
    OpenCheckpoint,
    OpenPlace,
    Progress,
    Removal,
    StoredCheckpoint,
    Usage,
    Verdict,
    copy_files,
)
from portus.reach.places.directory import remove_files
from portus.reach.versions.host import HostPool
from portus.reach.versions.open_version import open_version
from portus.reach.versions.take_files import FileToTake, pack_file

WAIT_S: Final = 1.0
"""Seconds to wait for the writer of a pool: a trainer holds it as long as it runs."""


class PoolVersion(StoredCheckpoint):
    """A version of a pool that is open."""

    def __init__(self, pool: PoolPlace, entry: VersionEntry) -> None:
        super().__init__(pool.place, entry.info)
        self._pool: Final = pool
        self._entry: Final = entry

    @contextlib.contextmanager
    def open(self) -> Iterator[OpenCheckpoint]:
        with open_version(self._pool.reader, self._entry) as version:
            yield OpenCheckpoint(version.files, version)

    def table(self) -> FileTable | None:
        return table_in(self._pool.reader, self._entry)

    def unique(self) -> int | None:
        return self._pool.unique_bytes.get(self.info.id, 0)


class PoolPlace(OpenPlace):
    """A pool as a place of checkpoints. It can be read while a trainer writes; removals need its
    lock."""

    after_removal = "the pool file keeps its size, and has holes where the file system allows"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._closing: Final = contextlib.ExitStack()

    @cached_property
    def reader(self) -> PoolReader:
        """The pool, for reading. Raises what opening raises."""
        return self._closing.enter_context(contextlib.closing(open_place(self.place)))

    @cached_property
    def unique_bytes(self) -> dict[int, int]:
        """The bytes that only one version reaches, by its id."""
        return self.reader.unique_bytes()

    @property
    def abilities(self) -> Abilities:
        info = self.reader.medium.info
        return Abilities(
            volatile=info.volatile,
            durable=self._durable,
            addressable=info.kind.is_persistent_memory,
        )

    def usage(self) -> Usage:
        medium = self.reader.medium
        return Usage(
            size=medium.size,
            on_disk=self.disk_bytes(),
            kept=self.reader.kept_bytes(),
            uuid=self.reader.uuid.hex(),
            failure=read_failure(medium),
        )

    def list(
        self, model: str | None = None, skipped: dict[str, PortusError] | None = None
    ) -> list[StoredCheckpoint]:
        entries = self.reader.catalogue().entries()
        found = [PoolVersion(self, each) for each in entries if model in (None, each.info.model)]
        return sorted(found, key=lambda each: (each.info.commit, each.info.id))

    @contextlib.contextmanager
    def draft(self, labels: Labels, files: Files, options: CopyOptions) -> Iterator[Commit]:
        """Yield the commit, see ``OpenPlace``. The version has no pointers, its storages are where
        a save has them, and its time is that of the commit. Makes the pool. Raises ``BusyError`` if
        a trainer writes it, or saves that model."""
        if odd := [name for name in files if "/" in name]:
            raise UsageError(f"{self.place}: a pool has files in no directory, not {odd[0]!r:.200}")
        with copy_files(files, options) as copied, contextlib.ExitStack() as stack:
            packed = [
                pack_file(FileToTake(name, file.size, reads(file))) for name, file in copied.items()
            ]
            table = FileTable(packed)
            storages = _storages_of(packed, list(copied.values()))
            length = np.array(table.lengths, np.int64)
            address = np.array(
                [each.ctypes.data if len(each) else 0 for each in storages], np.int64
            )
            flags = np.zeros(len(length), np.bool_)
            snapshot = Snapshot(
                model=labels.model,
                step=labels.step,
                token=labels.token,
                address=address,
                length=length,
                late=flags,
                steady=flags,
            )
            home = open_home(self.place, labels.model, None, 1)
            stack.callback(home.close)
            draft = home.draft(snapshot)
            stack.callback(draft.release)
            draft.copy(np.arange(len(length)), address, Stop())

            def commit() -> None:
                draft.commit(replace(labels, contents=encode_table(table)))

            yield commit

    @contextlib.contextmanager
    def removal(self, chosen: Sequence[StoredCheckpoint]) -> Iterator[Removal]:
        """Yield the removal, see ``OpenPlace``: first of the pointers, then of the versions."""
        with self.writing() as pool:
            now = pool.catalogue()
            paths = [
                path
                for each in chosen
                for path in self._pointers(pool, now.of_token(each.info.token), each.info)
            ]

            def act() -> int:
                # A kill in between leaves versions without pointers, which `portus gc --missing`
                # lists; the other way round pointers could not be loaded.
                remove_files(paths)
                pool.let_go([each.info.token for each in chosen])
                return len(paths)

            yield act

    def _pointers(
        self, pool: PoolReader, entry: VersionEntry | None, seen: VersionInfo
    ) -> Sequence[str]:
        """Return the existing pointers of a version. Raise ``UsageError`` if it is gone."""
        with contextlib.suppress(StaleError):
            if entry is not None and entry.info.id == seen.id:
                table = table_in(pool, entry)
                return [] if table is None else pointers_of(table, entry.info.token)
        raise UsageError(f"{self.place} changed meanwhile, and nothing was removed: run this again")

    def checks(self, chosen: Sequence[StoredCheckpoint] | None, pace: CheckPace) -> Iterator[Check]:
        """Yield the check, see ``OpenPlace``. A pool keeps the commit before the newest one, so a
        check also reads versions that are not listed."""
        wanted = None if chosen is None else {each.info.id for each in chosen}

        def run(verdict: Verdict, progress: Progress) -> None:
            ids = set[int]()

            def only(info: VersionInfo) -> bool:
                if wanted is not None and info.id not in wanted:
                    return False
                ids.add(info.id)
                return True

            def tell(finding: Finding) -> None:
                if finding.severity is Severity.ERROR:
                    pace.tell(f"{self.place}: {finding}")

            look = CheckOptions(progress=progress, only=only)
            if pace.bytes_per_s is not None:
                look = replace(look, tell=tell, pace=Pace(pace.bytes_per_s))
            verdict.findings = check_pool(self._to_check, look)
            verdict.versions = len(ids)
            with contextlib.suppress(CorruptionError):
                verdict.removed = len(ids - self.reader.catalogue().ids())

        yield Check(self.place.path, os.path.basename(self.place.path), run)

    def collections(self, options: GarbageOptions) -> Iterator[Collection]:
        yield Collection(
            self.place.path, "", lambda: self._garbage(options), partial(self._collect, options)
        )

    def journals(self, links: str | None) -> Sequence[str]:
        return [journal_directory(self.place.path)]

    def _garbage(self, options: GarbageOptions) -> Garbage:
        gone, errors = self._without_pointers(self.reader, options.missing)
        ids = {info.id for info in gone}
        is_removed = options.empty and self._is_file and self.reader.catalogue().ids() == ids
        freed = self.disk_bytes() if is_removed else self._reclaimable_bytes(ids)
        return Garbage(gone=gone, is_removed=is_removed, freed=freed, errors=errors)

    def _reclaimable_bytes(self, gone: AnyCollection[int]) -> int:
        """Return an estimate of the bytes that a pool would return to its file system without the
        versions ``gone``. It ignores pages that readers have pinned, and those of the records of
        the commit before; so a few pages count as none."""
        taken, spare = self.disk_bytes(), self.reader.spare_bytes()
        unneeded = taken - self.reader.kept_bytes(gone) - spare
        return unneeded if taken and unneeded > spare else 0

    def _without_pointers(
        self, reader: PoolReader, directories: Sequence[str]
    ) -> tuple[Sequence[VersionInfo], Sequence[PortusError]]:
        """Return the versions whose pointers were in one of these directories, or below, and are
        gone, and the errors of files that could not be read, which make that unsure. Raises
        ``CorruptionError``, ``MediumError``."""
        roots = [os.path.realpath(os.path.expanduser(each)) for each in directories]
        found = []
        for entry in reader.catalogue().entries() if roots else ():
            if self._is_young(entry.info):
                continue
            with contextlib.suppress(StaleError):
                table = table_in(reader, entry)
                if table is None or not table.directory:
                    continue
                where = os.path.realpath(table.directory)
                if any(os.path.commonpath([where, root]) == root for root in roots):
                    found.append(entry.info)
        # By the token alone: a second host has the versions of the first in a pool of its own.
        tokens, errors = tokens_below(roots) if found else (set[str](), [])
        gone = [info for info in found if info.token.hex() not in tokens]
        return gone, errors if gone else []

    def _still_gone(
        self, reader: PoolReader, gone: Sequence[VersionInfo], missing: Sequence[str]
    ) -> set[bytes]:
        """Return the tokens of these versions. Raise ``UsageError`` if a pointer came back, and the
        error of a file that cannot be read any more."""
        found, errors = self._without_pointers(reader, missing) if gone else ([], [])
        for error in errors:
            raise error
        tokens = {info.token for info in gone}
        # All or nothing: the user agreed to remove this list.
        if not {info.token for info in found} >= tokens:
            raise UsageError(
                f"{self.place} changed meanwhile, and nothing was removed: run this again"
            )
        return tokens

    def close(self) -> None:
        self._closing.close()

    # Methods that a storage host replaces.

    def _is_young(self, info: VersionInfo) -> bool:
        """Return whether a trainer may be about to make the pointers of a version. Never for a pool
        file: its lock keeps trainers out."""
        return False

    @property
    def _is_file(self) -> bool:
        return os.path.isfile(self.place.path)

    def _collect(self, options: GarbageOptions, found: Garbage) -> Garbage:
        """Remove versions, and the pool file if it is empty then; return free space."""
        path, taken = self.place.path, self.disk_bytes()
        with self.writing() as writer:
            # Searched again under the lock: a trainer may have made the pointers since.
            writer.let_go(self._still_gone(writer, found.gone, options.missing))
            is_removed = options.empty and self._is_file and not writer.catalogue().ids()
            if is_removed:  # while it is locked: a process that waits for it finds that it is gone
                remove_journals(path)
                remove_pool(path, LocalFiles())
        freed = max(0, taken - self.disk_bytes())
        return Garbage(gone=found.gone, is_removed=is_removed, freed=freed)

    @property
    def _durable(self) -> int:
        return 1

    @contextlib.contextmanager
    def writing(self) -> Iterator[Pool]:
        """Open the pool for writing; at the end return unreached space to the file system. Raise
        ``BusyError`` naming the writer."""
        path = self.place.path
        writer = WRITERS.open(path, timeout_s=WAIT_S, mapped=False)  # else holes would be filled
        last: Callable[[], object] = lambda: None  # noqa: E731  # after an error nothing is touched
        try:
            yield writer
            if os.path.exists(path):  # else it was removed
                last = writer.give_back
        finally:
            WRITERS.close(writer, last=last)

    def disk_bytes(self) -> int:
        """Return the bytes that the pool takes of its file system; 0 if it is not in a file."""
        return on_disk(self.reader.medium.info.name)

    @property
    def _to_check(self) -> str | PoolReader:
        # The file itself, so that a pool with damaged first pages has findings too.
        return self.place.path


def _storages_of(
    packed: Sequence[PackedFile], files: Sequence[DiskFile]
) -> list[NDArray[np.uint8]]:
    """Return the storages of a version of open files, in its order."""
    own, around = list[NDArray[np.uint8]](), list[NDArray[np.uint8]]()
    for each, file in zip(packed, files, strict=True):
        data = np.zeros(0, np.uint8)
        if each.size:
            data = np.memmap(f"/proc/self/fd/{file.number}", np.uint8, "r")
        own += [data[at:][:size] for at, size in zip(each.offset, each.length, strict=True)]
        spans = each.spans()
        gaps = zip(spans.begin[::2], spans.length[::2], strict=True)
        around.append(np.concatenate([data[at:][:size] for at, size in gaps]))
    return [*own, *around]


def let_go(place: Place, path: str, token: bytes) -> tuple[bool, int]:
    """Remove the pointer at ``path``, and the version of ``token`` in the pool at ``place`` if it
    was the last one. Return whether the version was removed, and how many pointers are left. Raise
    ``UsageError`` if the pointer was replaced meanwhile."""
    opened: PoolPlace = load_class(place.classes.opened)(place)
    with opened.writing() as pool:
        said = read_reference(path)
        if said is None or said.token != token.hex():
            raise UsageError(f"{path} changed meanwhile, and is still there: run this again")
        current = pool.catalogue().of_token(token)
        table = None if current is None else table_in(pool, current)
        # The pointer first, as `removal` does.
        remove_files([path])
        left = [] if table is None else pointers_of(table, token)
        if current is not None and not left:
            pool.let_go([token])
        return current is not None and not left, len(left)


def table_in(reader: PoolReader, entry: VersionEntry) -> FileTable | None:
    """Return the files of a version; None for a version without files. Raises ``CorruptionError``,
    ``MediumError``, ``StaleError``."""
    with open_version(reader, entry) as version:
        return version.table


def pointers_of(table: FileTable, token: bytes) -> list[str]:
    """Return the paths of the existing pointers of a version. Raise ``CorruptionError``,
    ``MediumError``."""
    paths = [os.path.join(table.directory, each.name) for each in table.files]
    found = [(path, read_reference(path)) for path in paths if table.directory]
    return [path for path, said in found if said is not None and said.token == token.hex()]


def tokens_below(directories: Sequence[str]) -> tuple[set[str], list[PortusError]]:
    """Return the tokens of the versions that pointers in these directories, or below, refer to,
    whatever the names of the pointers; and the errors of all files that could not be read."""
    tokens, errors, seen = set[str](), list[PortusError](), set[str]()

    def note(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # a directory may be gone, or a link broken
            text = f"cannot read {error.filename}: {error.strerror}"
            errors.append(MediumError(error.errno, text))

    for root in directories:
        for directory, names, files in os.walk(root, onerror=note, followlinks=True):
            real = os.path.realpath(directory)
            if real in seen:  # a link may point to a directory above it
                names.clear()
                continue
            seen.add(real)
            for path in (os.path.join(directory, name) for name in files):
                try:
                    status = os.stat(path)
                    # Size first: a file that is no pointer need not be readable.
                    if stat.S_ISREG(status.st_mode) and status.st_size <= POINTER_MAX:
                        said = read_reference(path)
                        tokens.update([said.token] if said is not None else [])
                except OSError as error:
                    note(error)
                except PortusError as error:
                    errors.append(error)
    return tokens, errors


YOUNG_S: float = 60
"""Seconds after which a version surely has its pointers: a trainer makes them after the commit."""


class HostPlace(PoolPlace):
    """A pool on a storage host. The host itself changes it, even while trainers save."""

    def journals(self, links: str | None) -> Sequence[str]:
        return host_journals(self.place, links)

    @contextlib.contextmanager
    def writing(self) -> Iterator[Pool]:
        with contextlib.closing(HostPool(self.place.path)) as host:
            yield host
            host.give_back()

    def disk_bytes(self) -> int:
        reader = self.reader
        assert isinstance(reader, HostPool)
        return reader.standing().taken

    def _is_young(self, info: VersionInfo) -> bool:
        return info.time_ns > time.time_ns() - int(YOUNG_S * 1e9)

    @property
    def _durable(self) -> int:
        return len(self.place.address.each)

    @property
    def _to_check(self) -> PoolReader:
        return self.reader
