"""The mirror of one model in a store, for saves and loads. Decision 0141 says why it is a log."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from portus.engine.copying.segments import Stop
from portus.errors import CorruptionError, StaleError, UsageError
from portus.reach.index.file_table import PackedFile
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionRecord
from portus.reach.mirror.manifest import ReadManifest
from portus.reach.mirror.model_objects import Advance, ModelObjects
from portus.reach.mirror.object_file import ObjectFile
from portus.reach.mirror.objects import (
    LOG,
    Added,
    Fact,
    FileAdded,
    FileObject,
    Seal,
    entry_number,
    model_of,
)
from portus.reach.mirror.store import PART_SIZE, ListedObject, Part, Store
from portus.reach.mirror.writer import Version, Writer, read_manifest
from portus.reach.versions.open_version import OpenVersion
from portus.reach.versions.parallel import in_turn


@dataclass(frozen=True, slots=True)
class MirroringCost:
    """The cost of mirroring a version: ``put_bytes`` of ``objects`` that were put. The store had
    the rest of the version."""

    added: Added
    objects: int
    put_bytes: int


@dataclass(frozen=True, slots=True)
class OpenMirrored:
    """A version, or a file of a run, that is open for reading. ``parts``: all of its bytes, its
    files in their order. ``version``: None for a file of a run."""

    version: ReadManifest | None
    parts: Sequence[ObjectFile]

    def files(self) -> dict[str, ObjectFile]:
        """Return the files by their names."""
        return {each.file.name: each for each in self.parts}


class NotMirroredError(UsageError):
    """A version has no files, so it is not mirrored: a shelf, or protected tables."""


class Mirror(Writer):
    """The mirror of one model. The maker of the store closes it. One thread at a time, but for
    ``read`` and ``open``; one object may read while another one writes.

    All methods raise what the store raises, and ``UsageError`` if the mirror needs a key, or a
    newer Portus wrote it.
    """

    def __init__(
        self,
        store: Store,
        model: str,
        *,
        key: bytes | None = None,
        name: str = "mirror",
        newest: int | None = None,
    ) -> None:
        """Make no request. key: ``PORTUS_MIRROR_KEY``. name: of the store, for messages. newest:
        the number of an existing entry of the log, if that is known: it saves the list."""
        super().__init__(ModelObjects(store, model, name), Seal(key), newest)
        self.name: Final = name

    def copy(
        self,
        reader: PoolReader,
        version: int,
        stop: Stop,
        facts: Sequence[Fact] = (),
        damaged: Collection[str] = (),
    ) -> MirroringCost:
        """Mirror a version of a pool, by its id, and note ``facts`` with it, all or none. When this
        returns, the version counts.

        damaged: of a version that is there already, the objects to send again. The repaired version
        keeps its place, and its earlier objects are collected later. Its other objects stay; if its
        manifest cannot be read, all are sent. Pins the version meanwhile.

        Raises ``SupersededError``, ``StoppedError`` within a request after ``stop`` is set,
        ``StaleError`` if the version is not in the pool (any more), ``CorruptionError`` if the
        pool's bytes are not those that were saved, and ``NotMirroredError``. After any error the
        same call may be made again; it sends no object that has arrived.
        """
        with reader.pin(version) as entry:
            source = _Source(reader, reader.record(entry), stop, self._objects)
            try:
                added = self.add(source.version(), source.put, facts, damaged)
            except CorruptionError as error:
                raise CorruptionError(f"{error}; it is not mirrored") from error
            return MirroringCost(added, source.objects, source.put_bytes)

    def manifest(self, added: Added) -> ReadManifest:
        """Return the manifest of a mirrored version. Raises ``CorruptionError``, or ``StaleError``
        if the version was removed meanwhile: read the log again."""
        with self._meanwhile(added):
            return read_manifest(self._objects, self._seal, added.manifest)

    @contextlib.contextmanager
    def open(self, added: Added | FileAdded) -> Iterator[OpenMirrored]:
        """Open the files of a version, or a file of a run, for reading. Raises as ``manifest``; so
        do their loads."""
        version = None
        if isinstance(added, Added):
            version = self.manifest(added)
            own = zip(version.files, version.manifest.files, strict=True)
        else:
            name, nowhere = posixpath.basename(added.path), np.zeros(0, np.int64)
            file = PackedFile(name, added.size, nowhere, nowhere)
            own = zip([file], [added.object], strict=True)

        def load(name: str, start: int, length: int) -> Part:
            with self._meanwhile(added):
                return self._objects.get_range(name, start, length)

        files = [ObjectFile(self.name, file, each, load) for file, each in own]
        try:
            yield OpenMirrored(version, files)
        finally:
            for each in files:
                each.close()

    def find_damage(self, added: Added | FileAdded, advance: Advance) -> dict[str, CorruptionError]:
        """Return the errors of the missing and damaged objects of a version, or of a file of a run,
        by their names. Reads all of them. Raises as ``manifest``. advance: called with counts of
        read bytes; what it raises ends the call."""
        damage: dict[str, CorruptionError] = {}
        tell = in_turn(advance)

        def read(each: FileObject) -> None:
            try:
                for size in self._objects.read(each):
                    tell(size)
            except CorruptionError as error:
                damage[each.name] = error

        if isinstance(added, FileAdded):
            objects = [added.object]
        else:
            objects = [*self.manifest(added).manifest.files]
        self._objects.for_each(read, objects)
        if damage:
            self._require_counted(added)
        return damage

    def check(self, added: Added | FileAdded, advance: Advance) -> None:
        """Raise ``CorruptionError`` for the first object that ``find_damage`` finds."""
        for error in self.find_damage(added, advance).values():
            raise error

    def mend(self, added: Added, reader: PoolReader, version: int, stop: Stop) -> int:
        """Send the missing and damaged objects of a version again, from a pool that has it under
        the id ``version``. Return the number of objects. Raises as ``copy``."""
        damage: dict[str, CorruptionError] = {}
        with contextlib.suppress(CorruptionError):  # the manifest is damaged: all objects are sent
            damage = self.find_damage(added, lambda _: stop.check())
            if not damage:
                return 0
        return self.copy(reader, version, stop, damaged=damage).objects

    @contextlib.contextmanager
    def _meanwhile(self, added: Added | FileAdded) -> Iterator[None]:
        """Raise ``StaleError`` in place of damage if the version, or the file, was removed
        meanwhile."""
        try:
            yield
        except CorruptionError:
            self._require_counted(added)
            raise

    def _require_counted(self, added: Added | FileAdded) -> None:
        """Raise ``StaleError`` if a version, or a file, is not in the mirror any more."""
        state = self.read()
        if added not in (*state.versions, *state.files):
            raise StaleError(
                f"{self.name}: step {added.step} of model {self.model!r} was removed while "
                "it was read; load the newest again"
            )


def models(store: Store, *, key: bytes | None = None) -> dict[str, int]:
    """Return the models that have a mirror in a store, sorted, and the number of the newest entry
    of each log. Makes two lists for each model, and one at the end. A long name costs a read, too,
    which raises ``CorruptionError``, and as ``Mirror``."""
    found = {}
    for first in firsts(store):
        prefix, slash, name = first.name.partition("/")
        if slash and not name.startswith(LOG):  # a file of a run, or of another program
            first = next(store.list(f"{prefix}/{LOG}"), first)
        number = entry_number(first.name.removeprefix(f"{prefix}/"))
        if number is not None:
            said = model_of(prefix + "/")
            found[said or Seal(key).read_entry(number, store.get(first.name)).model] = number
    return dict(sorted(found.items()))


def firsts(store: Store) -> Iterator[ListedObject]:
    """Yield the first object of each folder of a store, and each object beside the folders. Makes a
    list for each, and one at the end."""
    after = ""
    while (first := next(store.list("", after), None)) is not None:
        yield first
        folder, slash, _ = first.name.partition("/")
        after = folder + chr(ord("/") + 1) if slash else first.name  # behind all of the folder


class _Source:
    """The files of a pinned version."""

    def __init__(
        self, reader: PoolReader, record: VersionRecord, stop: Stop, objects: ModelObjects
    ) -> None:
        """Open the version. objects: the target. Raises ``NotMirroredError``."""
        self._objects: Final = objects
        self._version: Final = OpenVersion(reader, record, stop)
        self._files: Final = list(self._version.files.values())
        if self._version.table is None:
            raise NotMirroredError(
                f"{self._version.where}: a version without files (a shelf, or tables)"
            )
        self.objects = 0
        self.put_bytes = 0

    def version(self) -> Version:
        """Return the version to mirror."""
        record = self._version.record
        return Version(
            info=record.info,
            pool=self._version.reader.uuid,
            lengths=record.length,
            digests=record.digests(np.arange(len(record.length))),
            contents=record.contents,
            files=[each.packed for each in self._files],
        )

    def put(self, number: int, name: str) -> FileObject:
        """Put a file of the version, and its digest beside it; return the object."""
        file = self._files[number]
        sent = self._objects.put_file(name, _in_parts(file.read(0, file.size)), file.size)
        self.objects += 1
        self.put_bytes += file.size
        return FileObject(name, file.size, sent)


def _in_parts(pieces: Iterable[memoryview]) -> Iterator[Part]:
    """Yield the same bytes, small pieces together."""
    held, size = list[memoryview](), 0
    for piece in pieces:
        if held and size + len(piece) > PART_SIZE:
            yield _join(held)
            held, size = [], 0
        held.append(piece)
        size += len(piece)
    yield _join(held)


def _join(pieces: Sequence[memoryview]) -> Part:
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
