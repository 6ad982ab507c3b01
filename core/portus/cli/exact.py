"""Files of versions, written as they were saved: every byte, verified on the way."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from portus.cli.progress import adding, bar
from portus.client.pools.contents import Storages
from portus.client.pools.version_file import table_of
from portus.errors import CorruptionError, UsageError
from portus.index.reader import PoolReader
from portus.index.records import VersionEntry
from portus.versions.packed import PackedFile


@dataclass(frozen=True, slots=True)
class VersionFiles:
    """The files of a pinned version, for writing."""

    files: Sequence[PackedFile]
    storages: Storages

    def number(self, name: str) -> int:
        """Return the number of a file. Raises ``UsageError`` if there is none of this name."""
        names = [each.name for each in self.files]
        if name not in names:
            raise UsageError(f"there is no file {name!r} in this version; it has {names!r:.500}")
        return names.index(name)

    def write(self, number: int, path: str) -> None:
        """Write a file to ``path``, synced. One unit (16 MiB) is in memory at a time, and what is
        around the storages. Raises ``CorruptionError``, ``MediumError``, ``OSError``."""
        file = self.files[number]
        counts = [len(each.length) for each in self.files]
        first, around = sum(counts[:number]), sum(counts) + number
        try:
            outside = b"".join(map(bytes, self.storages.read(around, 0, file.around)))
            with bar(file.name) as progress, open(path, "wb") as out:
                add = adding(progress, file.size)
                for storage, inside, length in file.spans().within(0, file.size):
                    if storage == counts[number]:
                        out.write(outside[inside : inside + length])
                    else:
                        for piece in self.storages.read(first + storage, inside, inside + length):
                            out.write(piece)
                    add(length)
                out.flush()
                os.fsync(out.fileno())
        except CorruptionError as error:
            raise CorruptionError(f"{file.name}: {error}") from error


@contextlib.contextmanager
def files_of(reader: PoolReader, entry: VersionEntry) -> Iterator[VersionFiles | None]:
    """Yield the files of a version, which is pinned meanwhile; None if it is one of something else.
    Raises ``CorruptionError``, ``MediumError``, ``StaleError``."""
    with reader.pinned(entry.info.id) as current:
        record = reader.record(current)
        table = table_of(reader, record)
        yield None if table is None else VersionFiles(table.files, Storages(reader, record))
