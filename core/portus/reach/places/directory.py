"""``DirectoryPlace``: a directory with checkpoint files, or one such file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from portus.engine.directory.folder import FOLDER, HiddenFolder
from portus.engine.directory.publisher import Publication, Publisher
from portus.engine.directory.recovery import recover_directory
from portus.engine.directory.system import Linux
from portus.engine.image.torch_zip import ZIP
from portus.engine.loading.open_file import open_file as opened_file
from portus.engine.media.file_calls import file_system_of
from portus.engine.media.read_file import Pace
from portus.engine.pipeline.draft import Labels
from portus.engine.spec import VersionInfo
from portus.engine.writer.image_file import base_of
from portus.errors import CorruptionError, MediumError, PortusError, UsageError, printable
from portus.reach.files.reference import read_reference
from portus.reach.format.reference import Reference
from portus.reach.formats.safetensors import LENGTH_SIZE, SUFFIX, is_safetensors
from portus.reach.index.directory import JOURNAL_SUFFIX
from portus.reach.index.journals import names_in
from portus.reach.index.place import Place
from portus.reach.media.local import LocalFiles, naming_call
from portus.reach.mirror.objects import step_in
from portus.reach.places.base import (
    Abilities,
    Check,
    CheckPace,
    Collection,
    Commit,
    CopyOptions,
    Files,
    Garbage,
    GarbageOptions,
    OpenCheckpoint,
    OpenPlace,
    Progress,
    Removal,
    StoredCheckpoint,
    Verdict,
)
from portus.reach.shards.rank_file import DISTCP, METADATA

_SUFFIXES: Final = (".ckpt", ".pt", ".pth", ".bin", ".pkl", SUFFIX, DISTCP, METADATA)
_END: Final = b"PK\x05\x06"
_END_SIZE: Final = 22
"""The first bytes of the last record of a zip file, and its size."""

CHECKS: Final = {
    "digests": "checksums of Portus",
    "crc32": "CRC32s of the zip",
    "structure": "structure alone: it has no checksums",
}
"""The ways to verify a file, in words."""


class StoredFile(StoredCheckpoint):
    """A checkpoint file. ``step``: that of the pointer or in the name. ``pointer``: its contents,
    if the file is one; then ``size`` is the pointer's own."""

    def __init__(self, place: Place, path: str) -> None:
        try:
            status = os.stat(path)
        except OSError as error:
            _raise(error)
        self.pointer: Reference | None = None
        with contextlib.suppress(CorruptionError):
            self.pointer = read_reference(path)
        named = step_in(os.path.basename(path))
        step = self.pointer.step if self.pointer else named
        info = VersionInfo(
            model="",
            id=0,
            commit=0,
            step=step or 0,
            token=bytes(16),
            time_ns=status.st_mtime_ns,
            size=status.st_size,
        )
        super().__init__(place, info, path)
        self.step = step

    @property
    def leads_to(self) -> str:
        its = self.pointer
        return "" if its is None else f"{its.model}@{its.step} in {its.pool_path}"

    @contextlib.contextmanager
    def open(self) -> Iterator[OpenCheckpoint]:
        with opened_file(self.path, as_torch=False) as file:
            yield OpenCheckpoint({os.path.basename(self.path): file})

    def check(self, reading: Pace | None, verdict: Verdict, progress: Progress) -> None:
        """Read every byte of the file, or of the one that the pointer refers to."""
        from portus.engine.loading.checkpoint_file import has_digests, verify_file  # torch, too

        verdict.by = CHECKS[verification_of(self.path, has_digests(self.path))]
        verdict.size = verify_file(self.path, reading)
        progress(verdict.size, verdict.size)


class DirectoryPlace(OpenPlace):
    """A directory of checkpoint files. ``path`` may be that of one file. Hidden files, and
    directories, are no checkpoints; links are not followed."""

    parts, piece = "directories", "file"
    after_removal = "their space is free"

    @classmethod
    def at(cls, path: str) -> DirectoryPlace:
        """Return the place for the directory, or the one file, at a path."""
        return cls(Place.of_files(path))

    @property
    def abilities(self) -> Abilities:
        number = os.open(self.place.path, os.O_RDONLY)
        try:
            traits, _ = file_system_of(number, self.place.path)
        finally:
            os.close(number)
        return Abilities(volatile=traits.volatile, durable=1, addressable=False)

    def list(
        self, model: str | None = None, skipped: dict[str, PortusError] | None = None
    ) -> list[StoredCheckpoint]:
        found = [] if model else list(self.find_files())
        return sorted(found, key=lambda each: (each.info.time_ns, each.path))

    def find_files(self) -> Iterator[StoredFile]:
        """Yield the files, in the order of their paths. Raises ``MediumError``."""
        if not os.path.isdir(self.place.path):
            yield StoredFile(self.place, self.place.path)
            return
        for directory, names, files in os.walk(self.place.path, onerror=_raise):
            names[:] = sorted(name for name in names if not name.startswith("."))
            for name in sorted(files):
                each = os.path.join(directory, name)
                if name.endswith(_SUFFIXES) and not os.path.islink(each) and is_checkpoint(each):
                    yield StoredFile(self.place, each)

    @contextlib.contextmanager
    def draft(self, labels: Labels, files: Files, options: CopyOptions) -> Iterator[Commit]:
        """Yield the commit, see ``OpenPlace``. Directories are made. The files of each become
        visible together, after those of the directories in it."""
        together: dict[str, dict[str, str]] = {}
        for name in files:
            # From the log of a mirror, perhaps: it does not choose what is overwritten (V6).
            if os.path.isabs(name) or os.pardir in name.split("/"):
                raise CorruptionError(f"{printable(name)} is no path below {self.place}")
            path = os.path.realpath(os.path.join(self.place.path, name))
            together.setdefault(os.path.dirname(path), {})[path] = name
        drafts: list[Publication] = []
        with contextlib.ExitStack() as stack:
            for directory in together:
                stack.enter_context(_provide_directory(directory))
            publisher = Publisher(Linux())
            stack.callback(publisher.close)
            for _, own in sorted(together.items(), reverse=True):
                draft = publisher.begin(*own, base=base_of(self.place.path, next(iter(own))))
                stack.callback(draft.abandon)
                drafts.append(draft)
                for (path, name), made in zip(own.items(), draft.files, strict=True):
                    number = made.file.number
                    files[name].write(number, name, options.advance)
                    if name in options.times:
                        with contextlib.suppress(OSError):
                            os.utime(number, ns=(options.times[name],) * 2)
                    with naming_call("sync", path):
                        os.fsync(number)

            def commit() -> None:
                for draft in drafts:
                    draft.publish()

            yield commit

    @contextlib.contextmanager
    def removal(self, chosen: Sequence[StoredCheckpoint]) -> Iterator[Removal]:
        """Yield the removal, see ``OpenPlace``. Removing a pointer leaves its version in place."""
        paths = [os.path.abspath(each.path) for each in chosen]
        gone = [path for path in paths if not os.path.lexists(path)]
        if gone:
            raise UsageError(f"{gone[0]} is not there any more, and nothing was removed")

        def act() -> int:
            remove_files(paths)
            return 0

        yield act

    def checks(self, chosen: Sequence[StoredCheckpoint] | None, pace: CheckPace) -> Iterator[Check]:
        # One pace for all files: many small ones are as much to read as a large one.
        reading = None if pace.bytes_per_s is None else Pace(pace.bytes_per_s)
        for each in self.find_files() if chosen is None else chosen:
            assert isinstance(each, StoredFile)
            title = os.path.basename(each.path)
            yield Check(each.path, title, partial(each.check, reading), each)

    def collections(self, options: GarbageOptions) -> Iterator[Collection]:
        """Yield the remains of processes that ended, beside checkpoints, see ``OpenPlace``.
        Collecting restores a checkpoint that was removed before its replacement was complete."""
        for directory, names, _ in os.walk(self.place.path, onerror=_raise):
            if FOLDER in names:
                real = os.path.realpath(directory)
                yield Collection(real, "", partial(_leftovers, real), partial(_recover, real))
            names[:] = sorted(name for name in names if not name.startswith("."))

    def journals(self, links: str | None) -> Sequence[str]:
        return journals_inside(self.place.path)

    def close(self) -> None:
        """Do nothing: no file stays open."""


@contextlib.contextmanager
def _provide_directory(path: str) -> Iterator[None]:
    """Make a directory, and those above it, durably; in the end remove those that are empty."""
    from portus.engine.paths.request import make_directory  # and torch with it

    made = [each for each in (Path(path), *Path(path).parents) if not each.is_dir()]
    make_directory(path)
    for each in made:
        LocalFiles().sync(str(each.parent))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            for each in made:
                each.rmdir()


def _leftovers(directory: str) -> Garbage:
    """Return the remains of processes that ended in a directory."""
    folder = HiddenFolder(Linux(), directory)
    try:
        left = [name for names in folder.abandoned_saves() for name in names]
        paths = [os.path.join(directory, FOLDER, name) for name in left]
        sizes = [os.lstat(path).st_size for path in paths if os.path.lexists(path)]
        return Garbage(pieces=len(sizes), freed=sum(sizes))
    finally:
        folder.leave()


def _recover(directory: str, found: Garbage) -> Garbage:
    if found.pieces:
        recover_directory(directory)
    return found


def journals_inside(directory: str) -> Sequence[str]:
    """Return the directories of journals in a directory; none if it does not exist."""
    names = [name for name in names_in(directory) if name.endswith(JOURNAL_SUFFIX)]
    return [os.path.join(directory, name) for name in names]


def verification_of(path: str, has_digests: bool) -> str:
    """Return the way to verify a file: a key of ``CHECKS``."""
    if has_digests:
        return "digests"
    with open(path, "rb") as file:
        return "structure" if is_safetensors(file.read(LENGTH_SIZE + 1)) else "crc32"


def is_checkpoint(path: str) -> bool:
    """Return whether a file is one of safetensors or ``torch.save``, or a pointer: by its first
    bytes, or by its end or its name if those are damaged."""
    if path.endswith(SUFFIX):
        return True
    try:
        with open(path, "rb") as file:
            begin = file.read(LENGTH_SIZE + 1)
            # A check has to find a file whose beginning is damaged, not skip it.
            file.seek(-min(_END_SIZE, os.path.getsize(path)), os.SEEK_END)
            end = file.read(len(_END))
    except OSError:
        return False
    return is_safetensors(begin) or begin.startswith(ZIP) or end == _END


def remove_files(paths: Sequence[str]) -> None:
    """Remove these files, durably. Raises ``MediumError``."""
    system = LocalFiles()
    for path in paths:
        system.remove(path)
    # Each directory once, after all: a removal lasts when its directory is synced.
    for directory in dict.fromkeys(map(os.path.dirname, paths)):
        system.sync(directory)


def _raise(error: OSError) -> NoReturn:
    raise MediumError(error.errno, f"{error.filename}: {error.strerror}") from error
