"""``MirroredFiles``: the checkpoint files of one run in a store, whole, under their own names.

A file counts once the log of the mirror has its entry, with its digest. Until then the file that it
replaces exists and counts, under another name. A superseded writer may overwrite an object, but no
reader takes that for the file: its digest differs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from msgspec.structs import replace

from portus.engine.copying.segments import Stop
from portus.errors import CorruptionError, PortusError, StaleError, TransportError, printable
from portus.reach.mirror.mirror import Mirror
from portus.reach.mirror.object_file import digest_of
from portus.reach.mirror.objects import (
    BEFORE,
    DIGEST_SUFFIX,
    FACTS_MAX,
    LOG,
    MANIFESTS,
    OWN,
    PIECES,
    VERSIONS,
    WRITER_SIZE,
    FileAdded,
    FileRemoved,
    State,
    entry_name,
    file_name,
    name_before,
    prefix_of,
)
from portus.reach.mirror.opening import key_from_environment
from portus.reach.mirror.store import PART_SIZE, FileStore, ListedObject
from portus.reach.mirror.writer import GRACE_S
from portus.reach.versions.parallel import Rooms

BY_HAND: Final = (
    "Copy them into the directory of the run with any client of the store, check them with xxhsum "
    "-c *.xxh128, and start the run: it mirrors them anew. To begin without, use another mirror"
)
"""The advice about files whose log is lost."""

_COPIES: Final = 3
"""Tries of a copy in the store. Each has another name: a late copy has the bytes that replaced the
file meanwhile."""


class FileToUpload(Protocol):
    """An open file: an ``OpenFile``, or an object with these parts of one."""

    @property
    def size(self) -> int:
        """The present size in bytes."""

    def load(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset``; the file has all of these bytes."""


class MirroredFiles(Mirror):
    """The mirror of a run that saves files. One thread at a time. All methods raise as those of
    ``Mirror``."""

    def __init__(self, store: FileStore, model: str, name: str) -> None:
        """Make no request. name: of the store, for messages."""
        super().__init__(store, model, key=key_from_environment(), name=name)
        self._uncounted: Final[set[str]] = set()
        """Uploaded objects that ``count`` did not make count."""

    def upload(
        self,
        path: str,
        file: FileToUpload,
        stop: Stop,
        *,
        step: int,
        time_ns: int,
        term: int | None = None,
    ) -> FileAdded:
        """Upload a file as the one at ``path``, which was changed last at ``time_ns``; return its
        fact for ``count``. term: the term of the save, if not this one.

        Raises ``SupersededError``; ``StoppedError`` within a piece after ``stop`` is set;
        ``StaleError`` if the file became shorter meanwhile.
        """
        self.confirm()
        replaced = self.state.file(path)
        # Never over the file that counts: a kill before the entry must not lose that one
        # (decision 0208).
        name = file_name(path, "" if replaced is None else replaced.name)
        self._uncounted.add(name)
        return FileAdded(
            path=path,
            name=name,
            digest=self._upload(path, name, file, stop),
            size=file.size,
            step=step,
            time_ns=time_ns,
            term=self.state.term if term is None else term,
        )

    def _upload(self, path: str, name: str, file: FileToUpload, stop: Stop) -> bytes:
        size, rooms = file.size, Rooms(PART_SIZE)

        def parts() -> Iterator[memoryview]:
            for start in range(0, size, PART_SIZE):
                stop.check()
                part = rooms.give(min(PART_SIZE, size - start))
                if file.size < start + len(part):
                    raise StaleError(f"{printable(path)}: it became shorter while it was mirrored")
                file.load(start, part)
                yield part
                stop.add(len(part))

        # An upload that began before another writer's claim must not replace a file of that one.
        following = entry_name(self.state.number + 1)
        try:
            return self._objects.put_file(name, parts(), size, unless=following)
        except StaleError:
            self.confirm()
            raise

    def set_aside(self, paths: Sequence[str]) -> None:
        """Have the files at ``paths`` count under other names, if the store copies objects that
        large: then their own names are free for the files that replace them. Raises
        ``SupersededError``."""
        self.confirm()
        counted = filter(None, map(self.state.file, paths))
        own = [each for each in counted if not each.link and each.name == file_name(each.path)]
        self._say([each for each in map(self._copy_aside, own) if each is not None])

    def _copy_aside(self, filed: FileAdded) -> FileAdded | None:
        # A file that cannot be copied stays, and the one that replaces it gets another name.
        with contextlib.suppress(CorruptionError):
            for _ in range(_COPIES):
                name = name_before(filed.name, self._random(WRITER_SIZE))
                with contextlib.suppress(TransportError):
                    there = self._objects.copy_file(filed.name, name, filed.size, filed.digest)
                    return replace(filed, name=name) if there else None
        return None

    def count(self, files: Sequence[FileAdded], gone: Sequence[str] = ()) -> None:
        """Make uploaded files count from now on, all by one entry of the log if it has room, and
        the files at ``gone`` no longer."""
        replaced = [self.state.file(each.path) for each in files]
        replaced += [self.state.file(path) for path in gone]
        # The entry first, then the deletion: the log never names an object that was deleted.
        self._say([*files, *map(FileRemoved, gone)])
        self._uncounted.difference_update(each.name for each in files)
        self._sweep_away([each.name for each in replaced if each is not None and not each.link])

    def drop_uncounted(self) -> None:
        """Delete the uploaded objects that are not going to count. Raises ``SupersededError``."""
        if self._uncounted:
            self.confirm()  # else some may be of the present holder of the term
            self._uncounted.difference_update(each.name for each in self.state.files)
            self._sweep_away(list(self._uncounted))
            self._uncounted.clear()

    def mend_file(self, filed: FileAdded, file: FileToUpload) -> bool:
        """Upload a damaged file again, from ``file``, to its object. Return False if it does not
        count any more. Raises as ``upload``, and ``StaleError`` if the bytes differ."""
        now = self.state.file(filed.path)
        if now is None or now.digest != filed.digest:
            return False
        if self._upload(filed.path, now.name, file, Stop()) != filed.digest:
            raise StaleError(f"{printable(filed.path)}: it was written to while it was read")
        return True

    def recognize(
        self, name: str, path: str, file: FileToUpload, *, step: int, time_ns: int
    ) -> FileAdded | None:
        """Return the fact for ``count`` of the object ``name``, which does not count, if it is
        ``file``, the one at ``path``; else None."""
        digest, term = digest_of(partial(_read, file), 0, file.size), self.state.term
        found = FileAdded(path, name, digest, file.size, step, time_ns, term)
        with contextlib.suppress(CorruptionError):
            for _ in self._objects.read(found.object):
                pass
            return found
        return None

    def link(self, path: str, target: str) -> None:
        """Note that the link at ``path`` refers to ``target``, which is relative to it."""
        nothing = bytes(16), 0, 0, 0
        self.count([FileAdded(path, file_name(path), *nothing, self.state.term, target)])

    def remove(self, paths: Sequence[str]) -> None:
        """Remove files, and ignore those that are not there. Raises ``SupersededError``, and
        ``UsageError`` without the right to delete: then the files do not count any more."""
        there = {each.path: each for each in self.state.files}
        gone = [there[path] for path in dict.fromkeys(paths) if path in there]
        self._say([FileRemoved(each.path) for each in gone])
        # For one that was set aside, also the uncounted object that was to replace it.
        own = [file_name(each.path) for each in gone if each.name.startswith(BEFORE)]
        self._delete([*(each.name for each in gone if not each.link), *own])

    def retire(self, checkpoints: Mapping[str, Sequence[str]], keep: int) -> None:
        """Remove checkpoints, each the paths of its files, but for the newest ``keep`` of all that
        were ever retired: the store has these still, and no machine fetches them. Raises as
        ``remove``."""
        checkpoint_of = {path: name for name, paths in checkpoints.items() for path in paths}
        checkpoint_of |= {each.path: each.retired for each in self.state.files if each.retired}
        files = [each for each in self.state.files if each.path in checkpoint_of and not each.link]
        saved_ns: dict[str, int] = {}
        for each in files:
            name = checkpoint_of[each.path]
            saved_ns[name] = max(saved_ns.get(name, 0), each.time_ns)
        kept = sorted(saved_ns, key=saved_ns.__getitem__, reverse=True)[:keep]
        new = [each for each in files if not each.retired and checkpoint_of[each.path] in kept]
        self._say([replace(each, retired=checkpoint_of[each.path]) for each in new])
        self.remove([path for path, name in checkpoint_of.items() if name not in kept])

    def objects_without_entry(self) -> list[ListedObject]:
        """Return the objects that no counted file needs, by their names below the run: running or
        interrupted uploads, and files whose entry of the log is lost."""
        there = list(self._uploads())  # first: an object that counts by then is not reported
        return self._without_name(there, self.read())

    def require_no_files(self) -> None:
        """Raise ``CorruptionError`` if there are files of a run whose log is lost: a machine
        without files must not begin anew over them."""
        found = {each.name for each in self._uploads()}
        files = sorted(name for name in found if name + DIGEST_SUFFIX in found)
        if files:
            where = f"{self.name}/{prefix_of(self.model)}"
            raise CorruptionError(
                f"{where}: {LOG} is lost, and nothing says which of the {len(files)} files there "
                f"count, such as {files[-1]}. {BY_HAND}"
            )

    def sweep(self) -> int:
        """Delete uploads that are a day old or older, and never counted; return the number of
        objects. Call it after ``claim``, whose entry shows the store's time."""
        # The store's clock: those of the machines may be wrong.
        now = next((each.modified for each in self._objects.list(LOG)), 0.0)
        found = self._without_name(self._uploads(), self.state)
        old = {each.name for each in found if each.modified < now - GRACE_S}
        files = {name for name in old if name.startswith(OWN) or name + DIGEST_SUFFIX in old}
        # Objects elsewhere without a digest beside them are of another program.
        ours = sorted(old & {name + more for name in files for more in ("", DIGEST_SUFFIX)})
        if ours:
            self._objects.delete(ours)
        return len(ours)

    def _uploads(self) -> Iterator[ListedObject]:
        for after in ("", f"{LOG[:-1]}0"):  # the log may be long, and is skipped
            for each in self._objects.list("", after):
                if each.name.startswith(LOG):
                    break
                if not each.name.startswith((MANIFESTS, PIECES, VERSIONS)):
                    yield each

    def _without_name(self, there: Iterable[ListedObject], state: State) -> list[ListedObject]:
        named = {each.name for each in state.files}
        named |= {name + DIGEST_SUFFIX for name in named}
        return [each for each in there if each.name not in named]

    def _say(self, facts: Sequence[FileAdded | FileRemoved]) -> None:
        """Note facts, by one entry of the log if it has room."""
        for start in range(0, len(facts), FACTS_MAX):
            self.note(facts[start : start + FACTS_MAX])

    def _sweep_away(self, names: Sequence[str]) -> None:
        """Delete objects that do not count any more. ``sweep`` repeats it, a day later."""
        with contextlib.suppress(PortusError):
            self._delete(names)

    def _delete(self, names: Sequence[str]) -> None:
        if names:
            self._objects.delete([name + more for name in names for more in ("", DIGEST_SUFFIX)])


def _read(file: FileToUpload, start: int, length: int) -> bytes:
    """Return ``length`` bytes of a file from ``start`` on, or fewer at its end."""
    data = bytearray(max(0, min(length, file.size - start)))
    if data:
        file.load(start, memoryview(data))
    return bytes(data)
