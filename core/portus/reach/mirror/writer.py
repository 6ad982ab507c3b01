"""The writer of a mirror, and the order of its requests.

- **M1** A version counts when its entry does, and the writer puts that only after the version's
  files.
- **M2** A version relies on no earlier objects but those that this writer has put since its claim,
  with an answer.
- **M3** No object is deleted that counts, or ever will: one that counted is deleted after an entry
  has removed it. One that never did was listed before an entry that counts, so each request of this
  writer is settled and no other writer has the term; it is not relied on from then on. Names of
  files of versions have a random tag, and are used once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from portus.engine.spec import VersionInfo
from portus.errors import printable
from portus.reach.mirror.log import MirrorLog
from portus.reach.mirror.model_objects import ModelObjects
from portus.reach.mirror.objects import (
    BEFORE,
    DIGEST_SUFFIX,
    FACTS_MAX,
    LOG,
    OWN,
    VERSIONS,
    WHO_SIZE_MAX,
    WRITER_SIZE,
    Added,
    Claimed,
    Fact,
    FileObject,
    Removed,
    Seal,
    State,
    own_name,
    sizes_of,
    version_file_name,
)
from portus.reach.mirror.store import ListedObject

GRACE_S: Final = 24 * 3600.0
"""The age in seconds, by the clock of the store, from which on an object that never counted is
deleted."""

_DELETED_MAX: Final = 1000
"""Names in one request."""


class Writer(MirrorLog):
    """One writer of the mirror of one model. One thread at a time.

    A call that raises may be made again, with the same arguments or with others.
    """

    def __init__(self, objects: ModelObjects, seal: Seal, newest: int | None = None) -> None:
        """newest: as of ``MirrorLog``."""
        super().__init__(objects, seal, newest)
        self._tag = b""
        """A part of the names of new objects: random, of this claim, and new after each
        deletion."""
        self._sending = b""
        """The token of the version that was sent last."""
        self._arrived: dict[int, FileObject] = {}
        """Objects of it that may be relied on, by the numbers of its files (M2)."""
        self._undecided = set[str]()
        """The names in deletions that failed: they may take effect at any time later."""

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
        commit; or the identity of a run of files. passing: only to remove and to sweep.
        """
        # Nothing known before is relied on: another writer may have deleted it (M2).
        self._sending = b""
        self._tag = writer = self._random(WRITER_SIZE)
        claimed = Claimed(printable(who)[:WHO_SIZE_MAX], pool, commit, passing)
        self._begin_term(claimed, writer)
        return self.state

    def add(
        self,
        info: VersionInfo,
        pool: bytes,
        directory: str,
        files: Sequence[str],
        put: Callable[[int, str], FileObject],
    ) -> Added:
        """Mirror a version, unless it is there. When this returns, it counts. pool: its identity.
        directory: of the pointers. files: the names of its files. put: puts the file of a number
        under a name, and returns the object."""
        self.require()
        before = self.state.version(info.token)
        if before is not None:
            return before
        if self._sending != info.token:
            self._sending, self._arrived = info.token, {}

        def put_one(number: int) -> None:
            # Known only now: an object that the store did not confirm is sent again.
            name = version_file_name(info.step, files[number], info.token, self._tag)
            self._arrived[number] = put(number, name)

        # The files, then the entry: what counts is complete (M1).
        numbers = range(len(files))
        self._objects.for_each(put_one, [each for each in numbers if each not in self._arrived])
        added = Added(
            token=info.token,
            step=info.step,
            term=self.state.term_of(pool, info.commit),
            commit=info.commit,
            time_ns=info.time_ns,
            size=info.size,
            inexact=info.inexact,
            directory=directory.encode(errors="surrogateescape"),
            files={
                name.encode(errors="surrogateescape"): self._arrived[number]
                for number, name in enumerate(files)
            },
            metrics=dict(info.metrics),
        )
        self.note((added,))  # M1
        self._sending = b""
        return added

    def remove(self, tokens: Iterable[bytes]) -> None:
        """Remove checkpoints and links, and ignore those that are not there. Raises
        ``SupersededError``, and ``UsageError`` without the right to delete: then they do not count
        any more."""
        gone = [each for each in map(self.state.version, dict.fromkeys(tokens)) if each is not None]
        self._note_all([Removed(each.token) for each in gone])
        names = [file.name for each in gone for file in each.files.values()]
        # For a file that was set aside, also the uncounted object that was to replace it.
        names += [own_name(name) for name in names if name.startswith(BEFORE)]
        counted = self.state.sizes
        self._delete(name for name in names if name not in counted)

    def retire(self, tokens: Iterable[bytes], keep: int) -> None:
        """Remove checkpoints and links, but for the newest ``keep`` checkpoints of all that were
        ever retired: the store has these still, and no machine fetches them. Raises as
        ``remove``."""
        gone = {*tokens, *(each.token for each in self.state.added if each.retired)}
        old = [each for each in self.state.added if each.token in gone and not each.link]
        kept = sorted(old, key=lambda each: each.place, reverse=True)[:keep]
        self._note_all([replace(each, retired=True) for each in kept if not each.retired])
        self.remove(gone - {each.token for each in kept})

    def suspects(self) -> list[tuple[Added, list[str]]]:
        """Return the versions that lack an object or the digest beside it, or have one of another
        size, and the names of these objects, as far as a list of the store shows, which may lack
        the newest. Takes no term, and changes nothing."""
        versions, found = self.read().added, []
        there = {each.name: each.size for each in self._objects.list(VERSIONS)}
        for added in versions:
            own = added.files.values()
            lost = [each.name for each in own if not sizes_of([each]).items() <= there.items()]
            if lost:
                found.append((added, lost))
        return found

    def objects_without_entry(self) -> list[ListedObject]:
        """Return the objects that no counted checkpoint needs, by their names below the model:
        running or interrupted uploads, and files whose entry of the log is lost. Those of another
        mirror, whose address is below this model, are not among them."""
        there = list(self._uploads())  # first: an object that counts by then is not reported
        needed = self.read().sizes
        others = tuple(
            {each.name.partition(f"/{LOG}")[0] + "/" for each in there if f"/{LOG}" in each.name}
        )
        return [e for e in there if e.name not in needed and not e.name.startswith(others)]

    def find_unneeded(self) -> list[ListedObject]:
        """Return what ``sweep`` would delete. Takes no term, and changes nothing. Raises
        ``CorruptionError`` if entries of the log are damaged."""
        # The store's clock: those of the machines may be wrong.
        now = next((each.modified for each in self._objects.list(LOG)), 0.0)
        found = [e for e in self.objects_without_entry() if e.modified < now - GRACE_S]
        self.require_whole()
        names = {each.name for each in found}
        own = {n for n in names if n.startswith((OWN, VERSIONS)) or n + DIGEST_SUFFIX in names}
        own |= {name + DIGEST_SUFFIX for name in own}
        # Objects elsewhere without a digest beside them are of another program.
        return [each for each in found if each.name in own]

    def sweep(self) -> list[ListedObject]:
        """Delete objects that are a day old or older, and do not count; return them. Raises
        ``SupersededError``, ``UsageError`` without the right to delete, and as ``find_unneeded``.
        After any error the next call does the rest."""
        self.require()
        found = self.find_unneeded()
        if not found:
            return found
        # After the list (M3). It has new bytes, or an earlier request, which was given up, might be
        # taken for it.
        needed = self.note((Removed(self._random(16)),)).sizes
        self._sending = b""
        found = [each for each in found if each.name not in needed]
        self._delete_objects([each.name for each in found])
        return found

    def _uploads(self) -> Iterator[ListedObject]:
        for after in ("", f"{LOG[:-1]}0"):  # the log may be long, and is skipped
            for each in self._objects.list("", after):
                if each.name.startswith(LOG):
                    break
                yield each

    def _note_all(self, facts: Sequence[Fact]) -> None:
        """Note facts, by one entry of the log if it has room."""
        for start in range(0, len(facts), FACTS_MAX):
            self.note(facts[start : start + FACTS_MAX])

    def _delete(self, files: Iterable[str]) -> None:
        """Delete files, and the digests beside them."""
        self._delete_objects([name + more for name in files for more in ("", DIGEST_SUFFIX)])

    def _delete_objects(self, names: Sequence[str]) -> None:
        if names:
            # No earlier name is used again: these requests may take effect late (M3).
            self._tag = self._random(WRITER_SIZE)
        for start in range(0, len(names), _DELETED_MAX):
            some = names[start : start + _DELETED_MAX]
            new = set(some) - self._undecided
            self._undecided |= new
            self._objects.delete(some)
            self._undecided -= new

    @staticmethod
    def _random(size: int) -> bytes:
        return os.urandom(size)
