"""Versions that are open for reading, of a pool or a storage host."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from portus.engine.copying.segments import Stop
from portus.engine.format.pointer_marks import POINTER_MAX
from portus.errors import CorruptionError, MediumError, PortusError, UsageError
from portus.reach.files.reference import read as pointer_at
from portus.reach.index.file_table import FileTable
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry, VersionRecord
from portus.reach.media.local import LocalFiles
from portus.reach.pools.version_file import VersionFile, file_in, table_of
from portus.reach.versions.file_bytes import FileBytes


@dataclass(frozen=True, slots=True)
class OpenVersion:
    """A pinned version of a pool, open for reading. ``table``: None if it has no files."""

    reader: PoolReader
    entry: VersionEntry
    record: VersionRecord
    table: FileTable | None

    @property
    def files(self) -> Mapping[str, VersionFile]:
        if self.table is None:
            return {}
        packed = self.table.files
        return {
            each.name: file_in(self.reader, self.record, packed, number)
            for number, each in enumerate(packed)
        }

    def write(self, name: str, path: str, advance: Callable[[int], None]) -> None:
        """Write a file, see ``OpenCheckpoint``. One unit (16 MiB) is in memory at a time, and a few
        units of the bytes around storages."""
        files = [] if self.table is None else list(self.table.files)
        names = [each.name for each in files]
        if name not in names:
            raise UsageError(f"there is no file {name!r} in this version; it has {names!r:.500}")
        number = names.index(name)
        found = FileBytes(self.reader, self.record, files, Stop())
        try:
            with open(path, "wb") as out:
                for piece in found.read(number, 0, files[number].size):
                    out.write(piece)
                    advance(len(piece))
                out.flush()
                # The caller may remove the version once it was written.
                os.fsync(out.fileno())
        except CorruptionError as error:
            raise CorruptionError(f"{name}: {error}") from error


@contextlib.contextmanager
def open_version(reader: PoolReader, entry: VersionEntry) -> Iterator[OpenVersion]:
    """Yield a version that is pinned meanwhile. Raises ``CorruptionError``, ``MediumError``,
    ``StaleError``."""
    with reader.pin(entry.info.id) as current:
        record = reader.record(current)
        yield OpenVersion(reader, current, record, table_of(reader, record))


def pointers_of(table: FileTable, token: bytes) -> list[str]:
    """Return the paths of the existing pointers of a version. Raise ``CorruptionError``,
    ``MediumError``."""
    paths = [os.path.join(table.directory, each.name) for each in table.files]
    found = [(path, pointer_at(path)) for path in paths if table.directory]
    return [path for path, said in found if said is not None and said.token == token.hex()]


def tokens_below(directories: Sequence[str]) -> tuple[set[str], list[PortusError]]:
    """Return the tokens of the versions that pointers in these directories, or below, refer to,
    whatever the names of the pointers; and the errors of all files that could not be read."""
    tokens, errors, seen = set[str](), list[PortusError](), set[str]()

    def note(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # a directory may be gone, or a link broken
            text = f"cannot read {error.filename}: {error.strerror}"
            errors.append(MediumError(error.errno, text))

    for root in directories:
        for directory, names, files in os.walk(root, onerror=note, followlinks=True):
            real = os.path.realpath(directory)
            if real in seen:  # a link may point to a directory above it
                names.clear()
                continue
            seen.add(real)
            for path in (os.path.join(directory, name) for name in files):
                try:
                    status = os.stat(path)
                    # Size first: a file that is no pointer need not be readable.
                    if stat.S_ISREG(status.st_mode) and status.st_size <= POINTER_MAX:
                        said = pointer_at(path)
                        tokens.update([said.token] if said is not None else [])
                except OSError as error:
                    note(error)
                except PortusError as error:
                    errors.append(error)
    return tokens, errors


def remove_files(paths: Sequence[str]) -> None:
    """Remove these files, durably. Raises ``MediumError``."""
    system = LocalFiles()
    for path in paths:
        system.remove(path)
    # Each directory once, after all: a removal lasts when its directory is synced.
    for directory in dict.fromkeys(map(os.path.dirname, paths)):
        system.sync(directory)
