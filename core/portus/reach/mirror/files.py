"""``MirroredFiles``: the checkpoint files of one run in a store, whole, under their own names.

A file counts once the log of the mirror has its entry, with its digest. Until then the file that it
replaces exists and counts, under another name. A superseded writer may overwrite an object, but no
reader takes that for the file: its digest differs.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

from msgspec.structs import replace

from portus.engine.copying.segments import Stop
from portus.engine.format.checksum import DIGEST_SIZE
from portus.errors import CorruptionError, PortusError, StaleError, TransportError, printable
from portus.reach.mirror.mirror import Mirror
from portus.reach.mirror.objects import (
    BEFORE,
    DIGEST_SUFFIX,
    LOG,
    OWN,
    VERSIONS,
    WRITER_SIZE,
    FileAdded,
    FileRemoved,
    digest_line,
    entry_name,
    file_name,
    name_before,
    path_of,
    prefix_of,
    step_in,
)
from portus.reach.mirror.opening import key_from_environment
from portus.reach.mirror.store import PART_SIZE, Store
from portus.reach.versions.parallel import Rooms

BY_HAND: Final = (
    "portus mirror repair makes them count again, by the digests beside them. Or copy them with "
    "any client of the store, check them with xxhsum -c *.xxh128, and start the run beside them. "
    "To begin without, use another mirror"
)
"""The advice about files whose log is lost."""

_DIGEST: Final = re.compile(rf"[0-9a-f]{{{2 * DIGEST_SIZE}}}")

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

    def __init__(self, store: Store, model: str, name: str) -> None:
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
    ) -> FileAdded:
        """Upload a file as the one at ``path``, which was changed last at ``time_ns``; return its
        fact for ``count``. A file there counts under another name from now on, if the store copies
        objects that large.

        Raises ``SupersededError``; ``StoppedError`` within a piece after ``stop`` is set;
        ``StaleError`` if the file became shorter meanwhile.
        """
        self.confirm()
        replaced = self.state.file(path)
        if replaced is not None and not replaced.link and replaced.name == file_name(path):
            copied = self._copy_aside(replaced)
            if copied is not None:
                self.note([copied])
                replaced = copied
        # Never over the file that counts: a kill before the entry must not lose that one
        # (decision 0208).
        name = file_name(path, "" if replaced is None else replaced.name)
        if not self._undecided.isdisjoint((name, name + DIGEST_SUFFIX)):
            # Nor where a deletion without an answer may take effect once this counts (M3).
            name = name_before(name, self._random(WRITER_SIZE))
        self._uncounted.add(name)
        return FileAdded(
            path=path,
            name=name,
            digest=self._upload(path, name, file, stop),
            size=file.size,
            step=step,
            time_ns=time_ns,
            term=self.state.term_at(time_ns),
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
            return self._objects.put_file(name, parts(), size, unless=following, beside=False)
        except StaleError:
            self.confirm()
            raise

    def _copy_aside(self, filed: FileAdded) -> FileAdded | None:
        """Copy a file to a new name; return its new fact. None if it cannot be copied: then the
        file that replaces it gets another name."""
        with contextlib.suppress(CorruptionError):
            for _ in range(_COPIES):
                name = name_before(filed.name, self._random(WRITER_SIZE))
                with contextlib.suppress(TransportError):
                    there = self._objects.copy_file(filed.name, name, filed.size, filed.digest)
                    return replace(filed, name=name) if there else None
        return None

    def count(self, files: Sequence[FileAdded], gone: Sequence[str] = ()) -> None:
        """Make uploaded files count from now on, all by one entry of the log if it has room, and
        the files at ``gone`` no longer. Delete what they replace, and the uploads that are not
        going to count. Raises ``SupersededError``."""
        for each in files:
            if not each.link:
                self._put_digest(each)
        replaced = filter(None, map(self.state.file, [*(each.path for each in files), *gone]))
        # The entry first, then the deletion: the log never names an object that was deleted.
        self._uncounted.update(each.name for each in replaced if not each.link)
        if files or gone:
            self._note_all([*files, *map(FileRemoved, gone)])
        elif self._uncounted:
            self.confirm()  # else some may be of the present holder of the term
        # ``sweep`` does it a day later, if this fails.
        with contextlib.suppress(PortusError):
            counted = {each.name for each in self.state.files if not each.link}
            self._delete(self._uncounted - counted)
        self._uncounted.clear()

    def _put_digest(self, filed: FileAdded) -> None:
        """Put the digest beside a file. Only once all files of its checkpoint are there:
        ``find_lost`` takes a file with a digest for a part of a whole one."""
        self._objects.put(filed.name + DIGEST_SUFFIX, digest_line(filed.name, filed.digest))

    def mend_file(self, filed: FileAdded, file: FileToUpload) -> bool:
        """Upload a damaged file again, from ``file``, to its object. Return False if it does not
        count any more. Raises as ``upload``, and ``StaleError`` if the bytes differ."""
        now = self.state.file(filed.path)
        if now is None or now.digest != filed.digest:
            return False
        if self._upload(filed.path, now.name, file, Stop()) != filed.digest:
            raise StaleError(f"{printable(filed.path)}: it was written to while it was read")
        self._put_digest(now)
        return True

    def find_lost(self) -> list[FileAdded]:
        """Return facts for ``restore`` of the objects that have a digest beside them, and no entry
        of the log. Of several for one path, the newest one that is as its digest says; these are
        read. Of a directory with a step in its name, none if one of its files has no digest: its
        upload had not ended. ``time_ns``: of the upload."""
        there = {each.name: each for each in self.objects_without_entry()}
        partial = {
            posixpath.dirname(name)
            for name in there
            if not name.startswith(OWN)
            and not name.endswith(DIGEST_SUFFIX)
            and name + DIGEST_SUFFIX not in there
        }
        found: dict[str, list[FileAdded]] = {}
        for each in sorted(there.values(), key=lambda each: each.modified, reverse=True):
            path, beside = path_of(each.name), each.name + DIGEST_SUFFIX
            if path is None or self.state.file(path) is not None or beside not in there:
                continue
            directory = posixpath.dirname(path)
            if directory in partial and step_in(directory) is not None:
                continue
            said = (self._objects.get(beside) or b"").partition(b" ")[0].decode(errors="replace")
            if _DIGEST.fullmatch(said):
                sent, time_ns = bytes.fromhex(said), int(each.modified * 1e9)
                fact = FileAdded(path, each.name, sent, each.size, step_in(path) or 0, time_ns, 0)
                found.setdefault(path, []).append(fact)
        return [some[0] if len(some) == 1 else self._first_whole(some) for some in found.values()]

    def _first_whole(self, files: Sequence[FileAdded]) -> FileAdded:
        """Return the first of the files that is as its digest says; the first one if none is."""
        for each in files:
            with contextlib.suppress(CorruptionError):
                for file in each.objects.values():
                    for _ in self._objects.read(file):
                        pass
                return each
        return files[0]

    def restore(self, lost: Sequence[FileAdded], saved_ns: Mapping[str, int] | None = None) -> None:
        """Make files of ``find_lost`` count again. Call it after ``claim``. saved_ns: when some of
        them were saved, by their paths."""
        known = saved_ns or {}
        timed = [replace(each, time_ns=known.get(each.path, each.time_ns)) for each in lost]
        counted = {each.path: each for each in self.state.files}
        every = sorted([*timed, *counted.values()], key=_step_of, reverse=True)
        facts, before_ns = [], math.inf
        # Uploads go newest first, so the later of two may be of the earlier step.
        for step, files in itertools.groupby(every, _step_of):
            first_ns = before_ns
            for each in files:
                time_ns = each.time_ns
                if step >= 0 and each.path not in known and each.path not in counted:
                    time_ns = int(min(time_ns, before_ns - 1))
                first_ns = min(first_ns, time_ns)
                if each.path not in counted:
                    facts.append(replace(each, time_ns=time_ns, term=self.state.term_at(time_ns)))
            before_ns = first_ns
        self._note_all(facts)

    def link(self, path: str, target: str) -> None:
        """Note that the link at ``path`` refers to ``target``, which is relative to it."""
        nothing = bytes(16), 0, 0, 0
        self.count([FileAdded(path, file_name(path), *nothing, self.state.term, target)])

    def remove(self, paths: Sequence[str]) -> None:
        """Remove files, and ignore those that are not there. Raises ``SupersededError``, and
        ``UsageError`` without the right to delete: then the files do not count any more."""
        there = {each.path: each for each in self.state.files}
        gone = [there[path] for path in dict.fromkeys(paths) if path in there]
        self._note_all([FileRemoved(each.path) for each in gone])
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
        self._note_all([replace(each, retired=checkpoint_of[each.path]) for each in new])
        self.remove([path for path, name in checkpoint_of.items() if name not in kept])

    def require_no_files(self) -> None:
        """Raise ``CorruptionError`` if there are files of a run whose log is lost: a machine
        without files must not begin anew over them."""
        if files := self.files_alone():
            where = f"{self.name}/{prefix_of(self.model)}"
            raise CorruptionError(
                f"{where}: {LOG} is lost, and nothing says which of the {len(files)} files there "
                f"count, such as {files[-1]}. {BY_HAND}"
            )

    def files_alone(self) -> list[str]:
        """Return the objects that have a digest beside them; none where others' mirrors are."""
        found = {e.name for e in self._uploads() if not e.name.startswith(VERSIONS)}
        if any(f"/{OWN}" in name and not name.startswith(OWN) for name in found):
            return []  # a folder of several mirrors is none itself
        return sorted(name for name in found if name + DIGEST_SUFFIX in found)


def _step_of(filed: FileAdded) -> int:
    """Return the step in the path of a file; -1 if there is none."""
    step = step_in(filed.path)
    return -1 if step is None else step
