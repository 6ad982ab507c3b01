"""What a mirror's writer does, one thing after another.

- **M1** A version counts when its entry does, and that is asked for only after its files and its
  manifest are there.
- **M2** Of what was put before, a version relies on nothing but: what a manifest names that was
  there when the term was claimed, or is this writer's own; and objects that this writer put since,
  of which he was told.
- **M3** What is to be deleted was listed before an entry that counts, is not named by what is there
  then, and is never named again: names have the writer and the epoch, and collecting ends an epoch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from portus.engine.copying.segments import Column, Digests, Stop
from portus.engine.spec import VersionInfo
from portus.errors import CorruptionError, printable
from portus.reach.index.file_table import PackedFile
from portus.reach.mirror.log import MirrorLog
from portus.reach.mirror.model_objects import ModelObjects
from portus.reach.mirror.objects import (
    FACTS_MAX,
    LOG,
    MANIFESTS,
    PIECES,
    VERSIONS,
    WHO_SIZE_MAX,
    WRITER_SIZE,
    Added,
    Claimed,
    Collected,
    Fact,
    FileObject,
    Key,
    Manifest,
    Seal,
    State,
    content_name,
    entry_number,
    version_file_name,
    whole_key,
)
from portus.reach.mirror.pieces import Piece, ReadManifest, WantedObject
from portus.reach.mirror.store import ListedObject

GRACE_S: Final = 24 * 3600.0
"""Seconds, by the clock of the store, for which readers find what was there when they began."""

_MANIFESTS_MAX: Final = 16
"""Manifests in memory at once while what they name is gathered."""

_DELETED_MAX: Final = 1000
"""Names in one request."""


@dataclass(frozen=True, slots=True)
class Version:
    """What is to be mirrored: a version of a pool, as its record has it. ``files``: its files.
    ``pieces``: those of each, where objects are small; None: each file is one object."""

    info: VersionInfo
    pool: bytes
    lengths: Column
    digests: Digests
    contents: bytes
    files: Sequence[PackedFile]
    pieces: Sequence[Sequence[Piece]] | None = None


@dataclass(frozen=True, slots=True)
class DeletedObjects:
    """What was deleted: how many objects, and their bytes together."""

    objects: int
    size: int


class Writer:
    """One writer of the mirror of one model. One thread at a time.

    A call that raises may be made again, with what has changed since or without.
    """

    def __init__(self, objects: ModelObjects, seal: Seal, newest: int | None = None) -> None:
        """newest: as of ``MirrorLog``."""
        self._objects: Final = objects
        self._log = MirrorLog(objects, seal, newest=newest)
        self._seal: Final = seal
        self._writer = b""
        self._epoch = 0
        self._known: dict[Key, FileObject] = {}
        """Objects that may be relied on (M2)."""
        self._last: tuple[str, Mapping[Key, FileObject]] = "", {}
        """A manifest that was there in this term, and what it names."""
        self._collected_ns = 0
        """The time that was said last of collecting; no two say the same."""

    @property
    def state(self) -> State:
        """What the log said when this object last claimed, mirrored, noted or collected."""
        return self._log.state

    @property
    def is_claimed(self) -> bool:
        """True from a claim until it was found to be superseded."""
        return self._log.is_claimed

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
        # Nothing known before is relied on: another writer may have deleted it (M2).
        self._known, self._writer, self._epoch = {}, self._random(WRITER_SIZE), 0
        self._last = "", {}
        claimed = Claimed(printable(who)[:WHO_SIZE_MAX], pool, commit, passing)
        # From the first claim of all on, collecting is due a day later.
        first = [Collected((), self._now_ns())]
        state = self._log.claim(claimed, self._writer, first, at)
        if not passing:
            self._rely_on(state)
        return state

    def require(self) -> None:
        """Raise ``SupersededError`` if another writer took the term by now. One small read."""
        self._log.confirm()

    def add(
        self,
        version: Version,
        put: Callable[[WantedObject], FileObject],
        facts: Sequence[Fact] = (),
        damaged: Collection[str] | None = None,
    ) -> Added:
        """Mirror a version, and say ``facts`` with it. When this returns, it counts. put: puts an
        object of it, and returns what was put. damaged: of a version that is there, the objects
        that are not as they were put: what is in them is put again, the others stay where its
        manifest has them; all are, if that cannot be read."""
        self._log.require()
        info = version.info
        before = None if damaged is None else self.state.version(info.token)
        known: Mapping[Key, FileObject] = self._known
        if before is not None:
            manifest = self._manifest_of(before)
            known = {} if manifest is None else manifest.objects()
        wanted = [
            self._wanted_objects(version, number, known) for number in range(len(version.files))
        ]
        objects = {key: each for file in wanted for key, each in file}
        for each in objects.values():
            if each.name in (damaged or ()):
                each.there = None  # it keeps its name: it gets the bytes that it had
        # Files, then the manifest, then the entry: what counts is complete (M1).
        self._put_objects(objects, put)
        files = [[objects[key].there for key, _ in file] for file in wanted]
        said = _manifest(version, files)
        name, data = self._seal.manifest(said, self._writer, self._epoch)
        self._objects.put(MANIFESTS + name, data)
        added = Added(
            token=info.token,
            step=info.step,
            term=self.state.term_of(version.pool, info.commit) if before is None else before.term,
            commit=info.commit if before is None else before.commit,
            time_ns=info.time_ns,
            size=info.size,
            inexact=info.inexact,
            manifest=name,
            metrics=dict(info.metrics),
        )
        self._log.append((added, *facts))  # M1
        self._known = said.objects()
        self._last = name, dict(self._known)
        return added

    def note(self, facts: Sequence[Fact]) -> State:
        """Say ``facts``, all or none: when this returns, they count. Raises ``SupersededError``."""
        return self._log.append(facts)

    def collect(self, grace_s: float = GRACE_S, stop: Stop | None = None) -> DeletedObjects:
        """Delete what no version needs, nor a reader who began within ``grace_s`` seconds. Raises
        ``SupersededError``; ``UsageError`` without the right to delete; ``StoppedError`` within a
        request after ``stop`` is set; and ``CorruptionError``, and deletes nothing, where a
        manifest cannot be read. Whatever it raises, the next call does the rest."""
        stop = stop or Stop()
        stop.check()
        self._log.require()
        # By the store's clock: a wrong clock of this machine must not delete anything.
        now, number = self._times(grace_s)
        # Listed before the entry, so nothing that is put after it can be in the list (M3).
        entries = self._list_before(now - grace_s)
        old = [each.manifest for each in self.state.gone if each.number <= number]
        # M3: after it was listed. So it may not be taken for the entry of a call before, which was
        # given up and may be there.
        self._collected_ns = max(self._now_ns(), self._collected_ns + 1)
        said = Collected(tuple(old[:FACTS_MAX]), self._collected_ns)
        state = self._log.append((said,))
        named = self._needed_objects(state, stop)
        unneeded = [each for each in entries if each.name not in named]
        if unneeded:
            self._rely_on(state)
            self._epoch += 1  # M3: no name of before is used again
        names = [each.name for each in unneeded]
        for start in range(0, len(names), _DELETED_MAX):
            stop.check()
            self._objects.delete(names[start : start + _DELETED_MAX])
        return DeletedObjects(len(names), sum(each.size for each in unneeded))

    def find_unneeded(self, grace_s: float = GRACE_S) -> DeletedObjects:
        """What ``collect`` would delete now. Takes no term, and changes nothing. Raises as it."""
        now, number = self._times(grace_s)
        entries = self._list_before(now - grace_s)
        state = self._log.read()
        gone = tuple(each for each in state.gone if each.number > number)
        named = self._needed_objects(replace(state, gone=gone), Stop())
        found = [each.size for each in entries if each.name not in named]
        return DeletedObjects(len(found), sum(found))

    def suspects(self) -> list[Added]:
        """The versions that lack an object, or whose manifest is damaged, as far as a list of the
        store tells, which may lack what is newest. Takes no term, and changes nothing."""
        state = self._log.read()
        sizes, found = {}, []
        for folder in (PIECES, VERSIONS):
            sizes.update({each.name: each.size for each in self._objects.list(folder)})
        for start in range(0, len(state.versions), _MANIFESTS_MAX):
            some = state.versions[start : start + _MANIFESTS_MAX]
            manifests = self._objects.get_all([MANIFESTS + each.manifest for each in some])
            for added, data in zip(some, manifests, strict=True):
                try:
                    length = dict(self._objects_of(added.manifest, data, needed=True))
                except CorruptionError:
                    length = {"": 0}
                if any(sizes.get(name) != length[name] for name in length):
                    found.append(added)
        return found

    def _wanted_objects(
        self, version: Version, number: int, known: Mapping[Key, FileObject]
    ) -> list[tuple[Key, WantedObject]]:
        """The objects of a file. known: of them, what is there."""
        info, file = version.info, version.files[number]
        if version.pieces is None:
            name = version_file_name(info.step, file.name, info.token, self._writer, self._epoch)
            named = [(Piece(whole_key(info.token, number), 0, file.size), name)]
        else:
            named = [
                (each, PIECES + content_name(*each.key, self._writer, self._epoch))
                for each in version.pieces[number]
            ]
        found = []
        for each, name in named:
            there = known.get(each.key)
            name = name if there is None else there.name
            found.append((each.key, WantedObject(name, number, each.start, each.size, there)))
        return found

    def _put_objects(
        self, objects: Mapping[Key, WantedObject], put: Callable[[WantedObject], FileObject]
    ) -> None:
        def put_one(key: Key) -> None:
            # Known only now: what the store did not confirm is sent again. What is there stays
            # there until this writer collects.
            self._known[key] = objects[key].there = put(objects[key])

        self._objects.for_each(put_one, [key for key in objects if objects[key].there is None])

    def _rely_on(self, state: State) -> None:
        """Take as known the objects that a manifest names: the last one that this writer had, or
        that of the newest version; none if that is damaged."""
        names = {each.manifest for each in state.versions}
        if self._last[0] not in names:
            self._last = "", {}
            if state.newest is not None:
                manifest = self._manifest_of(state.newest)
                self._last = state.newest.manifest, {} if manifest is None else manifest.objects()
        self._known = dict(self._last[1])

    def _manifest_of(self, added: Added) -> Manifest | None:
        """The manifest of a version; None if it is damaged."""
        try:
            return read_manifest(self._objects, self._seal, added.manifest).manifest
        except CorruptionError:
            return None

    def _times(self, grace_s: float) -> tuple[float, int]:
        """What time it is, at least, by the clock of the store; and the newest entry that is older
        than ``grace_s``."""
        now = 0.0
        for each in self._objects.list(LOG):
            number = entry_number(each.name)
            if number is not None:
                now = max(now, each.modified)
                if each.modified <= now - grace_s:
                    return now, number
        return now, 0

    def _list_before(self, before: float) -> list[ListedObject]:
        found = []
        for folder in (PIECES, MANIFESTS, VERSIONS):
            entries = self._objects.list(folder)
            found += [each for each in entries if each.modified <= before]
        return found

    def _needed_objects(self, state: State, stop: Stop) -> set[str]:
        """The objects that versions need, and those that readers may need."""
        kept = [each.manifest for each in state.versions]
        gone = [each.manifest for each in state.gone]
        named = {MANIFESTS + name for name in (*kept, *gone)}
        for names, needed in ((kept, True), (gone, False)):
            for start in range(0, len(names), _MANIFESTS_MAX):
                stop.check()
                some = names[start : start + _MANIFESTS_MAX]
                found = self._objects.get_all([MANIFESTS + name for name in some])
                for name, data in zip(some, found, strict=True):
                    named.update(self._objects_of(name, data, needed=needed))
        return named

    def _objects_of(self, name: str, data: bytes | None, *, needed: bool) -> Mapping[str, int]:
        """The bytes of each object that a manifest names; none if it is damaged, and not needed."""
        try:
            if data is None:
                raise CorruptionError(f"{MANIFESTS}{name} is missing")
            return self._seal.read_manifest(name, data, self._objects.model).object_sizes()
        except CorruptionError as error:
            if not needed:
                return {}  # nobody can read that version
            raise CorruptionError(
                f"{error}; Portus cannot tell what it needs, so nothing is deleted. Mirror "
                "that version again, or remove it"
            ) from error

    @staticmethod
    def _now_ns() -> int:
        return time.time_ns()

    @staticmethod
    def _random(size: int) -> bytes:
        return os.urandom(size)


def read_manifest(objects: ModelObjects, seal: Seal, name: str) -> ReadManifest:
    """A manifest, checked. Raises ``CorruptionError``, also if it is not there."""
    data = objects.get(MANIFESTS + name)
    if data is None:
        where = f"the mirror of model {objects.model!r}"
        raise CorruptionError(f"{MANIFESTS}{name} of {where} is missing")
    return ReadManifest.of(seal.read_manifest(name, data, objects.model))


def _manifest(version: Version, files: Sequence[Sequence[FileObject | None]]) -> Manifest:
    info = version.info
    return Manifest(
        model=info.model,
        pool=version.pool,
        id=info.id,
        commit=info.commit,
        step=info.step,
        token=info.token,
        time_ns=info.time_ns,
        size=info.size,
        inexact=info.inexact,
        lengths=version.lengths.astype("<i8").tobytes(),
        digests=version.digests.tobytes(),
        contents=version.contents,
        files=tuple(tuple(each for each in file if each is not None) for file in files),
        metrics=dict(info.metrics),
    )
