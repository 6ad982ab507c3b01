"""The writer of a mirror, and the order of its requests.

- **M1** A version counts when its entry does, and the writer puts that only after the version's
  files and its manifest.
- **M2** A version relies on no earlier objects but its own: those of its manifest, and those that
  this writer has put since its claim, with an answer.
- **M3** Objects to delete were listed before an entry that counts, no manifest of then names them,
  and none ever will: names have a random tag, and collecting ends its use.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from portus.engine.copying.segments import Column, Digests, Stop
from portus.engine.spec import VersionInfo
from portus.errors import CorruptionError, printable
from portus.reach.index.file_table import PackedFile
from portus.reach.mirror.log import MirrorLog
from portus.reach.mirror.manifest import ReadManifest
from portus.reach.mirror.model_objects import ModelObjects
from portus.reach.mirror.objects import (
    LOG,
    MANIFESTS,
    VERSIONS,
    WHO_SIZE_MAX,
    WRITER_SIZE,
    Added,
    Claimed,
    Collected,
    Fact,
    FileObject,
    Manifest,
    Seal,
    State,
    entry_number,
    version_file_name,
)
from portus.reach.mirror.store import ListedObject

GRACE_S: Final = 24 * 3600.0
"""Seconds, by the clock of the store, for which readers find the objects of their start."""

_MANIFESTS_MAX: Final = 16
"""Manifests in memory at once while their objects are gathered."""

_DELETED_MAX: Final = 1000
"""Names in one request."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version to mirror: one of a pool, as its record has it. ``files``: its files."""

    info: VersionInfo
    pool: bytes
    lengths: Column
    digests: Digests
    contents: bytes
    files: Sequence[PackedFile]


@dataclass(frozen=True, slots=True)
class DeletedObjects:
    """The number of deleted objects, and their bytes together."""

    objects: int
    size: int


class Writer(MirrorLog):
    """One writer of the mirror of one model. One thread at a time.

    A call that raises may be made again, with the same arguments or with others.
    """

    def __init__(self, objects: ModelObjects, seal: Seal, newest: int | None = None) -> None:
        """newest: as of ``MirrorLog``."""
        super().__init__(objects, seal, newest)
        self._tag = b""
        """A part of the names of new objects: random, of this claim, and new after each
        collection."""
        self._sending = b""
        """The token of the version that was sent last."""
        self._arrived: dict[int, FileObject] = {}
        """Objects of it that may be relied on, by the numbers of its files (M2)."""
        self._collected_ns = 0
        """The time of the last ``Collected`` of this writer; no two are the same."""

    def claim(
        self,
        who: str,
        pool: bytes,
        commit: int = 0,
        *,
        passing: bool = False,
    ) -> State:
        """Take the term; its former holder is superseded.

        Call it when a run is opened, before its first commit; and again after ``SupersededError``
        with ``passing``. who: for messages. pool, commit: the identity of the pool, and its newest
        commit; or the identity of a run of files. passing: only to remove and to collect.
        """
        # Nothing known before is relied on: another writer may have deleted it (M2).
        self._sending = b""
        self._tag = writer = self._random(WRITER_SIZE)
        claimed = Claimed(printable(who)[:WHO_SIZE_MAX], pool, commit, passing)
        # Collecting is due a day after the very first claim.
        self._begin_term(claimed, writer, [Collected(0, self._now_ns())])
        return self.state

    def add(
        self,
        version: Version,
        put: Callable[[int, str], FileObject],
        facts: Sequence[Fact] = (),
        damaged: Collection[str] = (),
    ) -> Added:
        """Mirror a version, and note ``facts`` with it. When this returns, it counts. put: puts the
        file of a number under a name, and returns the object. damaged: of a version that is there,
        the missing and damaged objects, which are put again. Its other objects stay where its
        manifest has them; if that cannot be read, all are put."""
        self.require()
        info, before = version.info, self.state.version(version.info.token)
        there = {} if before is None else self._objects_of(before)
        if self._sending != info.token or there:
            kept = {number: each for number, each in there.items() if each.name not in damaged}
            self._sending, self._arrived = info.token, kept

        def put_one(number: int) -> None:
            # Known only now: an object that the store did not confirm is sent again.
            own = version_file_name(info.step, version.files[number].name, info.token, self._tag)
            # A damaged one keeps its name, and gets the same bytes as before.
            name = there[number].name if number in there else own
            self._arrived[number] = put(number, name)

        # Files, then the manifest, then the entry: what counts is complete (M1).
        numbers = range(len(version.files))
        self._objects.for_each(put_one, [each for each in numbers if each not in self._arrived])
        said = Manifest(
            model=self.model,
            token=info.token,
            lengths=version.lengths.astype("<i8").tobytes(),
            digests=version.digests.tobytes(),
            contents=version.contents,
            files=tuple(self._arrived[number] for number in numbers),
        )
        name, data = self._seal.manifest(said, self._tag)
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
        self.note((added, *facts))  # M1
        self._sending = b""
        return added

    def collect(self, grace_s: float = GRACE_S, stop: Stop | None = None) -> DeletedObjects:
        """Delete objects that no version needs, nor a reader that began within ``grace_s`` seconds.
        Raises ``SupersededError``; ``UsageError`` without the right to delete; ``StoppedError``
        within a request after ``stop`` is set; and ``CorruptionError``, and deletes nothing, if a
        manifest cannot be read. After any error the next call does the rest."""
        stop = stop or Stop()
        stop.check()
        self.require()
        # By the store's clock: a wrong clock of this machine must not delete anything.
        now, number = self._times(grace_s)
        # Listed before the entry, so nothing that is put after it can be in the list (M3).
        entries = self._list_before(now - grace_s)
        # M3: the entry comes after the list. Its time is new, so that an entry of an earlier call,
        # which was given up, is not taken for it.
        self._collected_ns = max(self._now_ns(), self._collected_ns + 1)
        state = self.note((Collected(number, self._collected_ns),))
        named = self._needed_objects(state, stop)
        unneeded = [each for each in entries if each.name not in named]
        if unneeded:
            self._sending = b""
            self._tag = self._random(WRITER_SIZE)  # M3: no earlier name is used again
        names = [each.name for each in unneeded]
        for start in range(0, len(names), _DELETED_MAX):
            stop.check()
            self._objects.delete(names[start : start + _DELETED_MAX])
        return DeletedObjects(len(names), sum(each.size for each in unneeded))

    def find_unneeded(self, grace_s: float = GRACE_S) -> DeletedObjects:
        """Return what ``collect`` would delete. Takes no term, changes nothing, raises the same."""
        now, number = self._times(grace_s)
        entries = self._list_before(now - grace_s)
        state = self.read()
        gone = tuple(each for each in state.gone if each[1] > number)
        named = self._needed_objects(replace(state, gone=gone), Stop())
        found = [each.size for each in entries if each.name not in named]
        return DeletedObjects(len(found), sum(found))

    def suspects(self) -> list[Added]:
        """Return the versions that lack an object, or whose manifest is damaged, as far as a list
        of the store shows, which may lack the newest. Takes no term, and changes nothing."""
        versions, there = self.read().versions, {}
        there.update({each.name: each.size for each in self._objects.list(VERSIONS)})
        manifests = self._object_sizes([each.manifest for each in versions])
        return [
            added
            for added, sizes in zip(versions, manifests, strict=True)
            if isinstance(sizes, CorruptionError) or not sizes.items() <= there.items()
        ]

    def _objects_of(self, added: Added) -> Mapping[int, FileObject]:
        """Return the objects of a version, by the numbers of its files; none if its manifest is
        damaged."""
        with contextlib.suppress(CorruptionError):
            manifest = read_manifest(self._objects, self._seal, added.manifest).manifest
            return dict(enumerate(manifest.files))
        return {}

    def _times(self, grace_s: float) -> tuple[float, int]:
        """Return a time that the clock of the store has reached, and the number of the newest entry
        that is older than ``grace_s``."""
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
        for folder in (MANIFESTS, VERSIONS):
            entries = self._objects.list(folder)
            found += [each for each in entries if each.modified <= before]
        return found

    def _needed_objects(self, state: State, stop: Stop) -> set[str]:
        """Return the objects that versions need, and those that readers may need."""
        kept = dict.fromkeys(each.manifest for each in state.versions)
        names, needed = [*kept, *(name for name, _ in state.gone)], set[str]()
        for name, sizes in zip(names, self._object_sizes(names), strict=True):
            stop.check()
            needed.add(MANIFESTS + name)
            if not isinstance(sizes, CorruptionError):
                needed.update(sizes)
            elif name in kept:  # else no reader can use that version
                raise CorruptionError(
                    f"{sizes}; Portus cannot tell what it needs, so nothing is deleted. Mirror "
                    "that version again, or remove it"
                )
        return needed

    def _object_sizes(self, names: Sequence[str]) -> Iterator[Mapping[str, int] | CorruptionError]:
        """Yield for each manifest the sizes of its objects, or the error of reading it."""
        for start in range(0, len(names), _MANIFESTS_MAX):
            some = names[start : start + _MANIFESTS_MAX]
            found = self._objects.get_all([MANIFESTS + name for name in some])
            for name, data in zip(some, found, strict=True):
                try:
                    if data is None:
                        raise CorruptionError(f"{MANIFESTS}{name} is missing")
                    sizes = self._seal.read_manifest(name, data, self.model).object_sizes()
                except CorruptionError as error:
                    yield error
                else:
                    yield sizes

    @staticmethod
    def _now_ns() -> int:
        return time.time_ns()

    @staticmethod
    def _random(size: int) -> bytes:
        return os.urandom(size)


def read_manifest(objects: ModelObjects, seal: Seal, name: str) -> ReadManifest:
    """Return a manifest, checked. Raises ``CorruptionError``, also if it does not exist."""
    data = objects.get(MANIFESTS + name)
    if data is None:
        where = f"the mirror of model {objects.model!r}"
        raise CorruptionError(f"{MANIFESTS}{name} of {where} is missing")
    return ReadManifest.of(seal.read_manifest(name, data, objects.model))
