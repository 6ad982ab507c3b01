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
    AGAIN,
    DIGEST_SUFFIX,
    LOG,
    OWN,
    VERSIONS,
    WRITER_SIZE,
    Added,
    FileObject,
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

_NAMED_BY_STEP: Final = re.compile(r"step[=_-]?[0-9]")

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

    def upload(self, path: str, file: FileToUpload, stop: Stop, *, time_ns: int) -> FileObject:
        """Upload a file as the one at ``path``, which was changed last at ``time_ns``; return its
        object for ``count``. A file there counts under another name from now on, if the store
        copies objects that large.

        Raises ``SupersededError``; ``StoppedError`` within a piece after ``stop`` is set;
        ``StaleError`` if the file became shorter meanwhile.
        """
        self.confirm()
        # Never over a file that counts: a kill before the entry must not lose that one
        # (decision 0208).
        name = own = file_name(path)
        self._set_aside(own)
        counted = self.state.sizes
        if own in counted:
            name = AGAIN + own
        # Nor where a deletion without an answer may take effect once this counts (M3).
        if name in counted or not self._undecided.isdisjoint((name, name + DIGEST_SUFFIX)):
            name = name_before(own, self._random(WRITER_SIZE))
        self._uncounted.add(name)
        return FileObject(name, file.size, self._upload(path, name, file, stop), time_ns)

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

    def _set_aside(self, name: str) -> None:
        """Have the file that counts under ``name`` count under another one, a copy, if there is one
        and the store copies objects that large."""
        for added in self.state.added:
            for key, each in added.files.items():
                if each.name == name and (copied := self._copy_aside(each)):
                    self.note([replace(added, files=added.files | {key: copied})])
                    return

    def _copy_aside(self, file: FileObject) -> FileObject | None:
        """Copy a file to a new name; return its new object. None if it cannot be copied: then the
        file that replaces it gets another name."""
        with contextlib.suppress(CorruptionError):
            for _ in range(_COPIES):
                name = name_before(file.name, self._random(WRITER_SIZE))
                with contextlib.suppress(TransportError):
                    there = self._objects.copy_file(file.name, name, file.size, file.digest)
                    return replace(file, name=name) if there else None
        return None

    def checkpoint(self, path: str, files: Mapping[str, FileObject], step: int) -> Added:
        """Return the fact for ``count`` of the checkpoint at ``path``. files: by their paths."""
        time_ns = max(each.time_ns for each in files.values())
        return Added(
            token=self._random(16),
            step=step,
            term=self.state.term_at(time_ns),
            commit=0,
            time_ns=time_ns,
            size=sum(each.size for each in files.values()),
            inexact=False,
            directory=b"",
            files={
                b"" if each == path else posixpath.relpath(each, path).encode(): file
                for each, file in files.items()
            },
            path=path,
        )

    def checkpoints(self, files: Mapping[str, FileObject], step: int | None = None) -> list[Added]:
        """Return the facts of uploaded files, by their paths: each that is in a directory with a
        step in its name is of that one. step: None takes those of the names."""
        together: dict[str, dict[str, FileObject]] = {}
        for path, file in files.items():
            together.setdefault(_checkpoint_of(path), {})[path] = file
        return [
            self.checkpoint(path, each, step_in(path) or 0 if step is None else step)
            for path, each in together.items()
        ]

    def count(self, checkpoints: Sequence[Added]) -> None:
        """Make uploaded checkpoints count from now on, all by one entry of the log. Delete what
        they replace, and the uploads that are not going to count. Raises ``SupersededError``."""
        before = self.state.sizes
        for added in checkpoints:
            for each in added.files.values():
                if each.name not in before:
                    self._put_digest(each)
        # The entry first, then the deletion: the log never names an object that was deleted.
        if checkpoints:
            replaced = [each for new in checkpoints for each in self.below(new.path)]
            self._uncounted.update(file.name for old in replaced for file in old.files.values())
            self._note_all(checkpoints)
        elif self._uncounted:
            self.confirm()  # else some may be of the present holder of the term
        # ``sweep`` does it a day later, if this fails.
        with contextlib.suppress(PortusError):
            self._delete(self._uncounted - self.state.sizes.keys())
        self._uncounted.clear()

    def below(self, path: str) -> list[Added]:
        """Return the checkpoints at ``path`` and below."""
        return [each for each in self.state.added if each.is_in(path)]

    def _put_digest(self, file: FileObject) -> None:
        """Put the digest beside a file. Only once all files of its checkpoint are there:
        ``find_lost`` takes a file with a digest for a part of a whole one."""
        self._objects.put(file.name + DIGEST_SUFFIX, digest_line(file.name, file.digest))

    def mend_file(self, added: Added, path: str, file: FileToUpload) -> bool:
        """Upload a damaged file of a checkpoint again, from ``file``, to its object. Return False
        if it does not count any more. Raises as ``upload``, and ``StaleError`` if the bytes
        differ."""
        now, before = self.state.version(added.token), added.paths[path]
        if now is None or (there := now.paths.get(path)) is None or there.digest != before.digest:
            return False
        if self._upload(path, there.name, file, Stop()) != there.digest:
            raise StaleError(f"{printable(path)}: it was written to while it was read")
        self._put_digest(there)
        return True

    def find_lost(self) -> list[Added]:
        """Return facts for ``restore`` of the objects that have a digest beside them, and no entry
        of the log. Of several for one path, the newest one that is as its digest says; these are
        read. Of a directory with a step in its name, none if it counts, or if one of its files has
        no digest: its upload had not ended. ``time_ns``: of the upload."""
        there = {each.name: each for each in self.objects_without_entry()}
        counted = {path for each in self.state.added for path in each.paths}
        partial = {
            _checkpoint_of(name)
            for name in there
            if not name.startswith(OWN)
            and not name.endswith(DIGEST_SUFFIX)
            and name + DIGEST_SUFFIX not in there
        }
        found: dict[str, list[FileObject]] = {}
        for each in sorted(there.values(), key=lambda each: each.modified, reverse=True):
            path, beside = path_of(each.name), each.name + DIGEST_SUFFIX
            if path is None or path in counted or beside not in there:
                continue
            said = (self._objects.get(beside) or b"").partition(b" ")[0].decode(errors="replace")
            above, time_ns = _checkpoint_of(path), int(each.modified * 1e9)
            # What a directory that counts does not have is of another save of it.
            is_part = above != path and (above in partial or self.below(above))
            if not is_part and _DIGEST.fullmatch(said):
                file = FileObject(each.name, each.size, bytes.fromhex(said), time_ns)
                found.setdefault(path, []).append(file)
        files = {
            path: some[0] if len(some) == 1 else self._first_whole(some)
            for path, some in found.items()
        }
        return self.checkpoints(files)

    def _first_whole(self, files: Sequence[FileObject]) -> FileObject:
        """Return the first of the files that is as its digest says; the first one if none is."""
        for each in files:
            with contextlib.suppress(CorruptionError):
                for _ in self._objects.read(each):
                    pass
                return each
        return files[0]

    def restore(self, lost: Sequence[Added], saved_ns: Mapping[str, int] | None = None) -> None:
        """Make checkpoints of ``find_lost`` count again, but those at whose path one counts by now.
        Call it after ``claim``. saved_ns: when some of their files were saved, by their paths."""
        lost = [each for each in lost if not self.below(each.path)]
        known, tokens = saved_ns or {}, {each.token for each in lost}
        # A run that went back may have removed a later step: that bounds no time.
        counting = [each for each in self.state.checkpoints if not each.retired]
        every = sorted([*lost, *counting], key=_step_of, reverse=True)
        facts, before_ns = [], math.inf
        # Uploads go newest first, so the later of two may be of the earlier step.
        for step, some in itertools.groupby(every, _step_of):
            first_ns = before_ns
            for each in some:
                if each.token in tokens:
                    most_ns = before_ns - 1 if step >= 0 else math.inf
                    files = {
                        path: replace(
                            file, time_ns=known.get(path, int(min(file.time_ns, most_ns)))
                        )
                        for path, file in each.paths.items()
                    }
                    each = self.checkpoint(each.path, files, each.step)
                    facts.append(each)
                first_ns = min(first_ns, each.time_ns)
            before_ns = first_ns
        self._note_all(facts)

    def link(self, path: str, target: str) -> None:
        """Note that the link at ``path`` refers to ``target``, which is relative to it."""
        token, term = self._random(16), self.state.term
        self.count([Added(token, 0, term, 0, 0, 0, False, b"", {}, path=path, link=target)])

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


def _step_of(added: Added) -> int:
    """Return the step in the path of a checkpoint; -1 if there is none."""
    step = step_in(added.path)
    return -1 if step is None else step


def _checkpoint_of(path: str) -> str:
    """Return the path of the checkpoint that the file at ``path`` is of: the highest directory with
    a step in its name, unless the file itself is named by its step."""
    *above, name = path.split("/")
    if not _NAMED_BY_STEP.search(name):  # Accelerate's custom_checkpoint_0.pkl is not
        for count, each in enumerate(above, 1):
            if step_in(each) is not None:
                return "/".join(above[:count])
    return path
