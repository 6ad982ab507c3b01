"""``MirroredFiles``: the checkpoint files of one run in a store, whole, under their own names.

A file counts once the log of the mirror says so, with its digest. Until then what it replaces is
there and counts, under another name. Whoever was superseded may overwrite an object, and nobody
takes that for the file: its digest is another one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from portus.engine.copying.segments import Stop
from portus.errors import CorruptionError, PortusError, StaleError, printable
from portus.reach.index.file_table import PackedFile
from portus.reach.mirror.mirror import Mirror
from portus.reach.mirror.object_file import ObjectFile
from portus.reach.mirror.objects import (
    AGAIN,
    DIGEST_SUFFIX,
    FACTS_MAX,
    FILES,
    LOG,
    QUOTED,
    FileAdded,
    FileObject,
    FileRemoved,
    State,
    file_name,
)
from portus.reach.mirror.opening import key_from_environment
from portus.reach.mirror.store import FileStore, ListedObject, MissingError
from portus.reach.mirror.whole import check_file, digest_of, naming_store, put_file, read_at
from portus.reach.mirror.writer import GRACE_S

PIECE: Final = 16 << 20
"""Bytes that are read at once."""


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """A file to upload. ``time_ns``: when it was changed last. ``read``: reads a range of it, and
    returns fewer bytes only at its end. ``is_same``: whether it has not been written to since."""

    size: int
    time_ns: int
    read: Callable[[int, int], bytes]
    is_same: Callable[[], bool]

    @classmethod
    def from_descriptor(cls, number: int, path: str, time_ns: int) -> UploadedFile:
        """Return the open file ``number``, which nobody else writes to."""
        size = os.fstat(number).st_size
        return cls(
            size, time_ns, lambda at, length: read_at(number, at, length, path), lambda: True
        )


class MirroredFiles(Mirror):
    """The mirror of a run that saves files. One thread at a time. All raise as those of ``Mirror``
    do."""

    def __init__(self, store: FileStore, model: str, name: str) -> None:
        """Asks nothing. name: of the store, for messages."""
        super().__init__(store, model, key=key_from_environment(), name=name)
        self._files: Final = store

    def upload(
        self, path: str, file: UploadedFile, step: int, stop: Stop, *, term: int | None = None
    ) -> FileAdded:
        """Upload ``file`` as the one at ``path``; what ``count`` is to say of it. term: in which it
        was saved, if not in this one.

        Raises ``SupersededError``; ``StoppedError`` within a piece after ``stop`` is set;
        ``StaleError`` if the file was written to meanwhile.
        """
        self.require()
        replaced = self.state.file(path)
        # Not the name of the file that counts: a kill before the entry must not lose that one
        # (decision 0208).
        name = file_name(path, "" if replaced is None else replaced.name)
        size = file.size

        def pieces() -> Iterator[bytes]:
            for start in range(0, size, PIECE):
                stop.check()
                data = file.read(start, min(PIECE, size - start))
                if len(data) < min(PIECE, size - start):
                    raise StaleError(f"{printable(path)}: it became shorter while it was mirrored")
                yield data
                stop.add(len(data))

        sent = put_file(self._files, self._prefix + name, pieces(), size)
        # If it was written to meanwhile, what was sent is of no single moment.
        if not file.is_same():
            raise StaleError(f"{printable(path)}: it was written to while it was mirrored")
        return FileAdded(
            path=path,
            name=name,
            digest=sent,
            size=size,
            step=step,
            time_ns=file.time_ns,
            term=self.state.term if term is None else term,
        )

    def count(self, files: Sequence[FileAdded], gone: Sequence[str] = ()) -> None:
        """Make uploaded files count from now on, those of one entry of the log together, and the
        files at ``gone`` no longer."""
        replaced = [self.state.file(each.path) for each in files]
        replaced += [self.state.file(path) for path in gone]
        # The entry first, then the deletion: the log never names an object that was deleted.
        self._say([*files, *map(FileRemoved, gone)])
        self._sweep_away([each.name for each in replaced if each is not None and not each.link])

    def mend_file(self, filed: FileAdded, file: UploadedFile, stop: Stop) -> bool:
        """Upload again a file that is not there as it was uploaded; ``file`` has its bytes. False
        if it does not count any more. It is uploaded twice: what counts is never written over, and
        in the end it has its name again. Raises as ``upload``, and ``StaleError`` if the bytes are
        others."""
        while True:  # ends: of two uploads one has the name of the file
            now = self.state.file(filed.path)
            if now is None or now.digest != filed.digest:
                return False
            sent = self.upload(filed.path, file, filed.step, stop, term=filed.term)
            if sent.digest != filed.digest:
                raise StaleError(f"{printable(filed.path)}: it was written to while it was read")
            self.count([sent])
            if sent.name == file_name(filed.path):
                return True

    def recognize(self, name: str, path: str, number: int, step: int) -> FileAdded | None:
        """Return what ``count`` is to say of the object ``name``, which does not count, if it is
        the open file ``number``, that at ``path``; else None."""
        status = os.fstat(number)
        digest, term = digest_of(number, status.st_size, path), self.state.term
        found = FileAdded(path, name, digest, status.st_size, step, status.st_mtime_ns, term)
        try:
            self.check_file(found, lambda _: None)
        except CorruptionError:
            return None
        return found

    def link(self, path: str, target: str) -> None:
        """Say that the link at ``path`` leads to ``target``, which is relative to it."""
        before = self.state.file(path)
        said = FileAdded(path, file_name(path), bytes(16), 0, 0, 0, self.state.term, target)
        self.note([said])
        if before is not None and not before.link:
            self._sweep_away([before.name])

    def remove(self, paths: Sequence[str]) -> None:
        """Remove files; those that are not there are no error. Raises ``SupersededError``, and
        ``UsageError`` without the right to delete: they do not count any more then."""
        there = {each.path: each for each in self.state.files}
        gone = [there[path] for path in dict.fromkeys(paths) if path in there]
        self._say([FileRemoved(each.path) for each in gone])
        self._delete([each.name for each in gone if not each.link])

    def objects_without_entry(self) -> list[ListedObject]:
        """Return the objects of files that no file which counts needs, by their names below the
        run: uploads that are under way or were cut off, or whose entry of the log is lost."""
        there = list(self._objects())  # first: what counts by then is no find
        return self._without_name(there, self.read())

    def sweep(self) -> int:
        """Delete what was uploaded a day ago or before that, and never counted; how many objects.
        Call it after ``claim``: the entry of that says what time it is in the store."""
        entries = self._list(LOG)
        # The store's clock: those of the machines may be wrong.
        now = next((each.modified for each in entries), 0.0)
        nameless = self._without_name(self._objects(), self.state)
        found = [self._prefix + e.name for e in nameless if e.modified < now - GRACE_S]
        if found:
            self._store.delete(found)
        return len(found)

    def _objects(self) -> Iterator[ListedObject]:
        return (each for folder in (FILES, QUOTED, AGAIN) for each in self._list(folder))

    def _without_name(self, there: Iterable[ListedObject], state: State) -> list[ListedObject]:
        named = {each.name for each in state.files}
        named |= {name + DIGEST_SUFFIX for name in named}
        return [each for each in there if each.name not in named]

    def open(self, filed: FileAdded) -> ObjectFile:
        """Return a file, open for reading; close it. Its loads raise ``CorruptionError`` if it is
        not there (any more): then ``read`` says what is."""
        own = PackedFile(filed.path, filed.size, *(np.zeros((2, 0), np.int64)))
        objects = [FileObject(filed.name, filed.size, filed.digest)]

        def load(name: str, start: int, into: memoryview) -> None:
            try:
                self._store.get_range(self._prefix + name, start, into)
            except MissingError as error:
                raise CorruptionError(f"{self.name}: {name} is missing") from error

        return ObjectFile(self.name, own, objects, load)

    def fetch(self, filed: FileAdded, number: int, advanced: Callable[[int], None]) -> None:
        """Write a file into the open and empty file ``number``, as ``ObjectFile.write`` does."""
        self.open(filed).write(number, filed.path, advanced)

    def check_file(self, filed: FileAdded, advanced: Callable[[int], None]) -> None:
        """Read all of a file, and what is beside it. Raises ``CorruptionError`` if one of them is
        not there as it was uploaded."""
        name = self._prefix + filed.name
        with naming_store(self.name):
            check_file(self._store, name, filed.size, filed.digest, advanced)

    def _say(self, facts: Sequence[FileAdded | FileRemoved]) -> None:
        """Note facts, by one entry of the log if it has room."""
        for start in range(0, len(facts), FACTS_MAX):
            self.note(facts[start : start + FACTS_MAX])

    def _sweep_away(self, names: Sequence[str]) -> None:
        """Delete what does not count any more. What fails is done by ``sweep``, a day later."""
        with contextlib.suppress(PortusError):
            self._delete(names)

    def _delete(self, names: Sequence[str]) -> None:
        if names:
            self._store.delete(
                [self._prefix + name + more for name in names for more in ("", DIGEST_SUFFIX)]
            )
