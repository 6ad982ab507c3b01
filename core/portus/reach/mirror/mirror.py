"""The mirror of one model in a store, for saves and loads. Decision 0141 says why it is a log."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from portus.engine.copying.segments import Stop
from portus.engine.pipeline.draft import Labels
from portus.errors import CorruptionError, StaleError, UsageError
from portus.reach.index.file_table import is_file_name
from portus.reach.index.pool import PoolWriter
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionRecord
from portus.reach.mirror.model_objects import Advance, ModelObjects
from portus.reach.mirror.object_file import ObjectFile
from portus.reach.mirror.objects import (
    LOG,
    Added,
    FileObject,
    Seal,
    entry_number,
    model_of,
)
from portus.reach.mirror.store import PART_SIZE, ListedObject, Part, Store
from portus.reach.mirror.writer import Writer
from portus.reach.versions.open_version import OpenVersion, VersionFile
from portus.reach.versions.parallel import in_turn
from portus.reach.versions.take_files import FileToTake, take_files

_log: Final = logging.getLogger("portus")


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

    def copy(self, reader: PoolReader, version: int, stop: Stop) -> Added:
        """Mirror a version of a pool, by its id. When this returns, the version counts. Pins it
        meanwhile.

        Raises ``SupersededError``, ``StoppedError`` within a request after ``stop`` is set,
        ``StaleError`` if the version is not in the pool (any more), ``CorruptionError`` if the
        pool's bytes are not those that were saved, and ``NotMirroredError``. After any error the
        same call may be made again; it sends no object that has arrived.
        """
        with self._open_version(reader, version, stop) as opened:
            table, files = opened.table, [*opened.files.values()]
            if table is None:
                raise NotMirroredError(
                    f"{opened.where}: a version without files (a shelf, or tables)"
                )
            try:
                return self.add(
                    opened.record.info,
                    reader.uuid,
                    table.directory,
                    [each.name for each in table.files],
                    lambda number, name: self._send(name, files[number]),
                )
            except CorruptionError as error:
                raise CorruptionError(f"{error}; it is not mirrored") from error

    def mend(
        self, added: Added, damaged: Collection[str], reader: PoolReader, version: int, stop: Stop
    ) -> None:
        """Send objects of a version again, by their names, from a pool that has it under the id
        ``version``. Raises as ``copy``."""
        with self._open_version(reader, version, stop) as opened:
            for name, each in added.objects.items():
                if each.name in damaged and self._send(each.name, opened.file(name)) != each:
                    raise CorruptionError(f"{each.name}: the pool has other bytes")

    @contextlib.contextmanager
    def _open_version(self, reader: PoolReader, version: int, stop: Stop) -> Iterator[OpenVersion]:
        with reader.pin(version) as entry:
            yield OpenVersion(reader, reader.record(entry), stop)

    def _send(self, name: str, file: VersionFile) -> FileObject:
        """Put a file of a version, and its digest beside it; return the object."""
        sent = self._objects.put_file(name, _in_parts(file.read(0, file.size)), file.size)
        return FileObject(name, file.size, sent)

    @contextlib.contextmanager
    def open(self, added: Added) -> Iterator[dict[str, ObjectFile]]:
        """Open the files of a checkpoint for reading; yield them by their names. Their loads raise
        ``CorruptionError``, or ``StaleError`` if it was removed meanwhile: read the log again."""

        def load(name: str, start: int, length: int) -> Part:
            try:
                return self._objects.get_range(name, start, length)
            except CorruptionError:
                self._require_counted(added)
                raise

        files = {
            name: ObjectFile(self.name, name, each, load) for name, each in added.objects.items()
        }
        if odd := [name for name in files if not all(map(is_file_name, name.split("/")))]:
            raise CorruptionError(f"{self.name}: not the name of a file: {odd[0]!r:.80}")
        try:
            yield files
        finally:
            for each in files.values():
                each.close()

    def fill(
        self, writer: PoolWriter, wanted: Sequence[Added], advance: Advance | None = None
    ) -> list[Added]:
        """Fetch ``wanted``, missing versions, oldest first, into the pool of ``writer``; return the
        fetched ones. Blocks. A killed process can repeat it, which does the rest: the mirror has
        all versions of the pool too.

        Skips an older version that is damaged in the mirror, with an error in the log. Raises
        ``CorruptionError`` for the newest one, and what the mirror and the pool raise.
        """
        done = []
        for each in wanted:
            try:
                self.fetch(each, writer, advance)
                done.append(each)
            except CorruptionError as error:
                if each == self.state.newest:
                    # To resume from an older one would lose steps silently.
                    raise
                _log.error(
                    "portus: step %d cannot be fetched from the mirror: %s", each.step, error
                )
        return done

    def fetch(
        self, added: Added, writer: PoolWriter, advance: Advance | None = None
    ) -> VersionRecord:
        """Commit a version to the pool of ``writer``, as the newest one, with the same model, step
        and token. Blocks.

        Raises ``CorruptionError`` if bytes are not those of the version, ``StaleError`` if it was
        removed meanwhile, and what the store and the pool raise. Then the pool is unchanged.
        """
        labels = Labels(
            model=self.model,
            step=added.step,
            token=added.token,
            inexact=added.inexact,
            metrics=dict(added.metrics),
        )
        directory = added.directory.decode(errors="surrogateescape")
        with self.open(added) as opened:
            files = [
                FileToTake(name, file.size, file.read, file.stored.digest)
                for name, file in opened.items()
            ]
            try:
                return take_files(writer, files, labels, directory=directory, advance=advance)
            except CorruptionError as error:
                raise CorruptionError(
                    f"{self.name}: model {self.model!r}, step {added.step}: {error}"
                ) from error

    def find_damage(self, added: Added, advance: Advance) -> dict[str, CorruptionError]:
        """Return the errors of the missing and damaged objects of a checkpoint, by their names.
        Reads all of them. Raises ``StaleError`` as the loads of ``open``. advance: called with
        counts of read bytes; what it raises ends the call."""
        damage: dict[str, CorruptionError] = {}
        tell = in_turn(advance)

        def read(each: FileObject) -> None:
            try:
                for size in self._objects.read(each):
                    tell(size)
            except CorruptionError as error:
                damage[each.name] = error

        self._objects.for_each(read, [*added.objects.values()])
        if damage:
            self._require_counted(added)
        return damage

    def check(self, added: Added, advance: Advance) -> None:
        """Raise ``CorruptionError`` for the first object that ``find_damage`` finds."""
        for error in self.find_damage(added, advance).values():
            raise error

    def _require_counted(self, added: Added) -> None:
        """Raise ``StaleError`` if a checkpoint is not in the mirror any more."""
        if added not in self.read().added:
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
