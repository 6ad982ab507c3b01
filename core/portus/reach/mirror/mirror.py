"""The mirror of one model in a store: what saves and loads use. Why it is a log: decision 0141."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import numpy as np

from portus.engine.copying.segments import Stop
from portus.engine.format.checksum import UNIT, digest
from portus.errors import CorruptionError, PortusError, StaleError, UsageError, printable
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionRecord
from portus.reach.mirror.log import KnownLog, MirrorLog
from portus.reach.mirror.object_file import ABREAST, ObjectFile
from portus.reach.mirror.objects import (
    LOG,
    WHO_SIZE_MAX,
    WRITER_SIZE,
    Added,
    Claimed,
    Fact,
    FileObject,
    Seal,
    State,
    entry_number,
    model_of,
    prefix_of,
)
from portus.reach.mirror.pieces import Piece, ReadManifest, WantedObject, files_in, pieces_of
from portus.reach.mirror.requests import (
    CreateObject,
    DeleteObjects,
    GetObject,
    GetObjects,
    ListObjects,
    PutObject,
    PutObjects,
    Request,
    Steps,
)
from portus.reach.mirror.store import FileStore, ListedObject, MissingError, Store
from portus.reach.mirror.whole import Advanced, check_file, check_piece, naming_store, put_file
from portus.reach.mirror.writer import GRACE_S, DeletedObjects, Version, Writer, read_manifest
from portus.reach.versions.file_bytes import FileBytes
from portus.reach.versions.parallel import abreast, in_any_order

_log: Final = logging.getLogger("portus")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class MirroringCost:
    """What mirroring a version took. ``put_bytes`` of ``objects`` that were put; the rest of the
    version was there."""

    added: Added
    objects: int
    put_bytes: int


@dataclass(frozen=True, slots=True)
class OpenMirrored:
    """A version that is open for reading. ``parts``: all of its bytes, its files in their order."""

    version: ReadManifest
    parts: Sequence[ObjectFile]

    def files(self) -> dict[str, ObjectFile]:
        """The files by their names. Raises ``UsageError`` for a version of something else, such as
        tables."""
        if not self.version.has_files:
            raise UsageError(
                f"{self.parts[0].info.name}: step {self.version.info.step} of model "
                f"{self.version.info.model!r} has no files: portus pull brings it into a pool of "
                "this machine, where it is read"
            )
        return {each.file.name: each for each in self.parts}


class Mirror:
    """The mirror of one model. Whoever made the store closes it. One thread at a time, but for
    ``read`` and ``open_version``; an object that reads may be another one than the object that
    writes.

    All raise what the store raises, and ``UsageError`` if the mirror needs a key, or a newer Portus
    wrote it.
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
        """Asks nothing. key: ``PORTUS_MIRROR_KEY``. name: of the store, for messages. newest: the
        number of an entry of the log that is there, if that is known: it saves the list."""
        self.model: Final = model
        self.name: Final = name
        self._store: Final = store
        self._prefix: Final = prefix_of(model)
        self._seal: Final = Seal(key)
        self._newest: Final = newest
        self._writer: Final = Writer(model, self._seal, newest)
        self._known: KnownLog | None = None
        """What the log said when it was read or claimed last."""

    @property
    def state(self) -> State:
        """What the log said when this object last claimed, copied, noted or collected."""
        return self._writer.state

    @property
    def damage(self) -> Sequence[CorruptionError]:
        """Why entries of the log could not be read when it was read or claimed last, one for each.
        A claim says anew what is known, and then there are none."""
        return () if self._known is None else self._known.damage

    @property
    def is_claimed(self) -> bool:
        """True from a claim until it was found to be superseded."""
        return self._writer.log.is_claimed

    def read(self) -> State:
        """What the log says now: one page of a list, and up to 17 small reads; from the second call
        on a small read, and one for each entry that was appended since. Entries that are damaged
        are passed over, with an error in the log of Python."""
        log = MirrorLog(self.model, self._seal, self._known, self._newest)
        state = self._perform(log.read())
        self._known = log.last_known
        return state

    def claim(
        self,
        who: str,
        pool: bytes,
        commit: int = 0,
        *,
        passing: bool = False,
        at: int | None = None,
    ) -> State:
        """Take the term; whoever had it is superseded.

        When a run is opened, before its first commit; and again after ``SupersededError`` with
        ``passing``. who: for messages. pool, commit: the identity of the pool, and its newest
        commit; or the identity of a run of files. passing: to remove and to collect alone. at: the
        number of the log's newest entry, as the caller read it; raises ``StaleError`` if there are
        others.
        """
        claimed = Claimed(printable(who)[:WHO_SIZE_MAX], pool, commit, passing)
        writer = os.urandom(WRITER_SIZE)
        state = self._perform(self._writer.claim(claimed, writer, self._known, time.time_ns(), at))
        self._known = self._writer.log.last_known
        return state

    def copy(
        self,
        reader: PoolReader,
        version: int,
        stop: Stop,
        facts: Sequence[Fact] = (),
        *,
        damaged: Collection[str] | None = None,
    ) -> MirroringCost:
        """Mirror a version of a pool, by its id, and say ``facts`` with it, all or none. When this
        returns, it is told.

        damaged: of a version that is there already, the objects that are sent again: it is mended
        so, keeps its place, and what it had before is collected later. Its other objects stay; if
        its manifest cannot be read, all are sent.
        Pins the version meanwhile. Raises ``SupersededError``, ``StoppedError`` within a request
        after ``stop`` is set, ``StaleError`` if the version is not in the pool (any more),
        ``CorruptionError`` if the pool's bytes are not those that were saved, ``UsageError`` for a
        shelf. Whatever it raises,
        the same call may be made again; what arrived is not sent again.
        """
        with reader.pin(version) as entry:
            source = _Source(reader, unchanging(reader.record(entry)), stop)
            try:
                wanted = source.version(in_pieces=not isinstance(self._store, FileStore))
                added = self._perform(self._writer.add(wanted, facts, damaged), source)
            except CorruptionError as error:
                raise CorruptionError(f"{error}; it is not mirrored") from error
            return MirroringCost(added, source.objects, source.put_bytes)

    def require(self) -> None:
        """Raise ``SupersededError`` if another writer took the term by now. One small read."""
        self._perform(self._writer.log.read())
        self._writer.log.require()

    def note(self, facts: Sequence[Fact]) -> State:
        """Say ``facts``, all or none: versions removed. Raises as ``copy``."""
        return self._perform(self._writer.note(facts))

    def collect(self, grace_s: float = GRACE_S, stop: Stop | None = None) -> DeletedObjects:
        """Delete what no version needs, nor a reader who began within ``grace_s`` seconds. Raises
        ``SupersededError``; ``UsageError`` without the right to delete; ``StoppedError`` within a
        request after ``stop`` is set; and ``CorruptionError``, and deletes nothing, where a
        manifest cannot be read. Whatever it raises, the next call does the rest."""
        return self._perform(self._writer.collect(grace_s, time.time_ns()), stop=stop)

    def find_unneeded(self, grace_s: float = GRACE_S) -> DeletedObjects:
        """What ``collect`` would delete now; takes no term. Raises as it."""
        return self._perform(self._writer.find_unneeded(grace_s))

    def manifest(self, added: Added) -> ReadManifest:
        """What is mirrored of a version, and where. Raises ``CorruptionError``, or ``StaleError``
        if it was removed meanwhile: read the log again."""
        with self._meanwhile(added):
            return self._perform(read_manifest(self._seal, self.model, added.manifest))

    @contextlib.contextmanager
    def open_version(self, added: Added) -> Iterator[OpenMirrored]:
        """Open the files of a version for reading. Raises as ``manifest``, and so do their
        loads."""
        version = self.manifest(added)

        def load(name: str, start: int, into: memoryview) -> None:
            with self._meanwhile(added):
                self._store.get_range(self._prefix + name, start, into)

        files = [
            ObjectFile(self.name, file, objects, load)
            for file, objects in zip(version.files, version.manifest.files, strict=True)
        ]
        try:
            yield OpenMirrored(version, files)
        finally:
            for each in files:
                each.close()

    def suspects(self) -> list[Added]:
        """The versions that lack an object, or whose manifest is damaged: by lists, and a read of
        each manifest. ``find_damage`` tells for sure."""
        return self._perform(self._writer.suspects())

    def find_damage(self, added: Added, stop: Stop) -> frozenset[str]:
        """The objects of a version that are not there as they were sent; for ``copy``. Reads all of
        it. Raises as ``manifest``, and ``StoppedError``."""

        def check(each: FileObject) -> str | None:
            try:
                self._check(each, lambda _: stop.check())
            except CorruptionError:
                return each.name
            return None

        objects = self.manifest(added).manifest.objects().values()
        with contextlib.closing(abreast(check, objects, ABREAST)) as names:
            damaged = frozenset(name for name in names if name is not None)
        if damaged:
            self._require(added)
        return damaged

    def check(self, added: Added, advanced: Advanced) -> None:
        """Raise ``CorruptionError``, naming it, if an object of a version is not there as it was
        sent. Reads all of them. Raises as ``manifest``. advanced: told of bytes that were read."""
        with self._meanwhile(added):
            for each in self.manifest(added).manifest.objects().values():
                self._check(each, advanced)

    def mend(self, added: Added, reader: PoolReader, version: int, stop: Stop) -> int:
        """Send again what of a version is not there as it was sent, from a pool that has the same
        one by its id; how many objects. Raises as ``copy``."""
        try:
            damaged = self.find_damage(added, stop)
        except CorruptionError:
            damaged = frozenset()  # it is the manifest: all of it is sent
        else:
            if not damaged:
                return 0
        return self.copy(reader, version, stop, damaged=damaged).objects

    def _check(self, each: FileObject, advanced: Advanced) -> None:
        check = check_file if each.is_whole else check_piece
        with naming_store(self.name):
            check(self._store, self._prefix + each.name, each.size, each.digest, advanced)

    @contextlib.contextmanager
    def _meanwhile(self, added: Added) -> Iterator[None]:
        """What is missing was removed meanwhile, or is lost."""
        try:
            yield
        except (MissingError, CorruptionError) as error:
            # If the version was removed meanwhile, a missing object is no damage.
            self._require(added)
            if isinstance(error, CorruptionError):
                raise
            raise CorruptionError(f"{self.name}: {error}, and a version needs it") from error

    def _require(self, added: Added) -> None:
        """Raise ``StaleError`` if a version is there no more."""
        if all(each.manifest != added.manifest for each in self.read().versions):
            raise StaleError(
                f"{self.name}: step {added.step} of model {self.model!r} was removed while "
                "it was read; load the newest again"
            )

    def _perform(
        self, steps: Steps[_T], source: _Source | None = None, stop: Stop | None = None
    ) -> _T:
        try:
            request = next(steps)
            while True:
                try:
                    if stop is not None:
                        stop.check()
                    answer = self._answer(request, source)
                except PortusError as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as end:
            result: _T = end.value
            return result
        finally:
            steps.close()

    def _answer(self, request: Request, source: _Source | None) -> object:
        if isinstance(request, GetObject):
            return self._store.get(self._prefix + request.name)
        if isinstance(request, GetObjects):
            return list(abreast(self._get, request.names, ABREAST))
        if isinstance(request, CreateObject):
            return self._store.create(self._prefix + request.name, request.data)
        if isinstance(request, PutObjects):
            self._put_all(request.puts, source)
            return None
        if isinstance(request, DeleteObjects):
            self._store.delete([self._prefix + name for name in request.names])
            return None
        assert isinstance(request, ListObjects)
        return self._list(request.prefix)

    def _get(self, name: str) -> bytes | None:
        try:
            return self._store.get(self._prefix + name)
        except MissingError:
            return None

    def _list(self, prefix: str) -> Iterator[ListedObject]:
        for each in self._store.list(self._prefix + prefix):
            yield ListedObject(each.name.removeprefix(self._prefix), each.size, each.modified)

    def _put_all(self, puts: Sequence[PutObject], source: _Source | None) -> None:
        def put_one(put: PutObject) -> None:
            name = self._prefix + put.name
            if isinstance(put.content, bytes):
                self._store.put(name, put.content)
            else:
                assert source is not None
                put.content.there = source.put(put.content, name, self._store)
            # Only now: what the store did not confirm is sent again.
            put.done = True

        in_any_order(put_one, puts, ABREAST)


def unchanging(record: VersionRecord) -> VersionRecord:
    """Return ``record``, of a version that stays as it was committed. Raises ``UsageError`` for one
    with a log: what it is now is in its log as well."""
    if record.log is not None:
        info = record.info
        raise UsageError(
            f"model {info.model!r}, step {info.step} changes in place (a shelf); it cannot be "
            "copied to a mirror"
        )
    return record


def models(store: Store, *, key: bytes | None = None) -> dict[str, int]:
    """The models that have a mirror in a store, sorted, and the newest entry of the log of each. A
    list for each of them, since a log comes first in its folder, and one to see that there are no
    more; of one whose name is long a read, too, which raises ``CorruptionError``, and as
    ``Mirror``."""
    found = {}
    for first in firsts(store):
        prefix, slash, name = first.name.partition("/")
        if slash and name < LOG:  # of somebody else
            first = next(store.list(f"{prefix}/{LOG}"), first)
        number = entry_number(first.name.removeprefix(f"{prefix}/"))
        if number is not None:
            said = model_of(prefix + "/")
            found[said or Seal(key).read_entry(number, store.get(first.name)).model] = number
    return dict(sorted(found.items()))


def firsts(store: Store) -> Iterator[ListedObject]:
    """The first object of each folder of a store, and each object beside them. A list for each, and
    one to see that there are no more."""
    after = ""
    while (first := next(store.list("", after), None)) is not None:
        yield first
        folder, slash, _ = first.name.partition("/")
        after = folder + chr(ord("/") + 1) if slash else first.name


class _Source:
    """The bytes of a pinned version, as the objects that its files are."""

    def __init__(self, reader: PoolReader, record: VersionRecord, stop: Stop) -> None:
        self._reader: Final = reader
        self._info: Final = record.info
        contents = reader.contents(record)
        where = f"{reader.medium.info.name}: {self._info.model}@{self._info.step}"
        files = files_in(contents, record.storages["length"].astype(np.int64), where)
        self._contents: Final = contents
        self._bytes: Final = FileBytes(reader, record, files, stop)
        self.objects = 0
        self.put_bytes = 0

    def version(self, *, in_pieces: bool) -> Version:
        """What there is to mirror."""
        files = self._bytes.files
        return Version(
            info=self._info,
            pool=self._reader.superblock.uuid,
            lengths=self._bytes.lengths,
            digests=self._bytes.digests,
            contents=self._contents,
            files=files,
            pieces=[self._cut(number) for number in range(len(files))] if in_pieces else None,
        )

    def put(self, wanted: WantedObject, name: str, store: Store) -> FileObject:
        """Put an object of the version, and what is beside it; what was put. name: of the object in
        the store."""
        data = self._bytes.read(wanted.number, wanted.start, wanted.size)
        if isinstance(store, FileStore):
            sent = put_file(store, name, _in_parts(data), wanted.size)
        else:
            piece = b"".join(data)
            store.put(name, piece)
            sent = digest(piece)
        self.objects += 1
        self.put_bytes += wanted.size
        return FileObject(wanted.name, wanted.size, sent)

    def _cut(self, number: int) -> list[Piece]:
        """The pieces of a file."""
        digests = [each.tobytes() for each in self._bytes.digests_of(number)]
        return pieces_of(self._bytes.files[number], digests, partial(self._bytes.around, number))


def _in_parts(pieces: Iterable[memoryview]) -> Iterator[bytes]:
    """The same bytes, ``UNIT`` of them at a time."""
    part = bytearray()
    for piece in pieces:
        while piece:
            taken = piece[: UNIT - len(part)]
            part += taken
            piece = piece[len(taken) :]
            if len(part) == UNIT:
                yield bytes(part)
                part.clear()
    if part:
        yield bytes(part)
