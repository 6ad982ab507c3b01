"""A version of a shelf or of tables, or a part of it, as a torch file: streamed, and verified on
the way.

``torch.save`` wants the state in memory. A torch file is a zip archive, not compressed: the state
as a pickle that names its storages (``data.pkl``), and a file of bytes for each of them
(``data/0``, ``data/1``...). So the state is outlined first, over memory that nobody touches; torch
itself says how its tensors are pickled; and then each storage goes from the pool to the archive, a
unit (16 MiB) at a time. What comes out holds what ``torch.save`` of the loaded state would have
written: the same pickle, the same names, the same bytes.

Source: https://docs.pytorch.org/docs/stable/notes/serialization.html#torch-save-format
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, BinaryIO, Final

from portus.engine.loading.patterns import Matcher
from portus.engine.state.pickling import pickle_state
from portus.errors import CorruptionError
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry
from portus.reach.pools import restore
from portus.reach.pools.contents import Storages
from portus.reach.pools.restore import Outline

_ARCHIVE: Final = "archive"
"""The directory that all is in, as torch calls it in a file that it has no name for."""

_ALIGNMENT: Final = 64
"""What the bytes of a storage are aligned to, as torch does: whoever maps the file uses them where
they lie."""

_HEADER: Final = 30
_WIDE: Final = 20
_FIELD: Final = 4
"""Bytes of a zip archive: a local header without its name; its field of 64-bit sizes; the head of a
field of padding."""

_PADDING: Final = b"FB"
"""What torch calls that field."""

_ROOM: Final = 512
"""Bytes of an archive for each file in it, at most, besides its content: header, name, padding, and
its row in the directory at the end."""


def write(
    pool: PoolReader,
    entry: VersionEntry,
    target: BinaryIO,
    *,
    keep: Matcher | None = None,
    fits: Callable[[int], None] = lambda size: None,
) -> None:
    """Write the state of a version to ``target``, which can be sought in; or what of it has key
    paths to ``keep``.

    One unit is in memory at a time, and what of the state is no tensor. ``fits`` gets the size of
    the file, rounded up, before anything is written, and may raise.

    Raises ``CorruptionError`` and ``MediumError``: then something was written; ``StaleError``; and
    ``UsageError`` for what torch cannot write, and before anything is written.
    """
    with restore.outline_version(pool, entry, keep) as outline:
        storages = Storages(pool, outline.record, outline.logged)
        found = pickle_state(outline.state)
        pickled, order = found.pickle, [outline.indices[each._cdata] for each in found.storages]
        lengths = [storages.length(index) for index in order]
        fits(sum(lengths) + len(pickled) + _ROOM * (len(order) + 4))
        with zipfile.ZipFile(target, "w") as archive:

            def add(name: str, content: Iterable[memoryview], size: int) -> None:
                with open_aligned(archive, name, size, target.tell()) as file:
                    for piece in content:
                        file.write(piece)

            add("data.pkl", [memoryview(pickled)], len(pickled))
            add("byteorder", [memoryview(sys.byteorder.encode())], len(sys.byteorder))
            for name, (index, length) in enumerate(zip(order, lengths, strict=True)):
                add(f"data/{name}", _read(storages, index, outline), length)
            add("version", [memoryview(b"3\n")], 2)


def _read(storages: Storages, index: int, outline: Outline) -> Iterator[memoryview]:
    try:
        yield from storages.read(index, 0, storages.length(index))
    except CorruptionError as error:
        raise CorruptionError(f"{outline.name(index)}: {error}") from error


def open_aligned(archive: zipfile.ZipFile, name: str, size: int, place: int) -> IO[bytes]:
    """Begin a file of ``size`` bytes in the archive, at ``place``; its content is aligned."""
    about = zipfile.ZipInfo(f"{_ARCHIVE}/{name}")
    about.file_size = size
    # As zipfile decides: before it has to, since deflated data may be longer.
    is_wide = size * 1.05 > zipfile.ZIP64_LIMIT
    wide = _WIDE if is_wide else 0
    gap = -(place + _HEADER + len(about.filename) + wide + _FIELD) % _ALIGNMENT
    about.extra = _PADDING + gap.to_bytes(2, "little") + b"Z" * gap
    return archive.open(about, "w", force_zip64=is_wide)
