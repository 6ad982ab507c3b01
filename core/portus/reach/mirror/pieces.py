"""The files of a version as objects: each is one, or, where objects are small, several pieces.

Pieces begin and end where large storages do. So an unchanged storage consists of existing pieces,
wherever in its file it is now, and the manifest names them again. The bytes between two storages
are a piece of their own, even if small: a torch file has the name of its archive and the sum of the
storage before there, which change when the storages do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from portus.engine.copying.segments import Column, Digests
from portus.engine.format.checksum import DIGEST_SIZE, UNIT, digest, unit_counts
from portus.errors import CorruptionError
from portus.reach.index.file_table import PackedFile, decode_table
from portus.reach.mirror.objects import FileObject, Key, Manifest

ALONE: Final = 1 << 20
"""Bytes. Smaller storages share pieces."""

SHARED: Final = 4 << 20
"""Bytes of a shared piece, at most: all of it is put again when some of it has changed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file, from its byte ``start`` on. ``key``: determines all of its bytes."""

    key: Key
    start: int
    size: int


@dataclass(slots=True)
class WantedObject:
    """An object of a version: bytes of its file ``number``. ``there``: the object once it exists;
    until then None."""

    name: str
    number: int
    start: int
    size: int
    there: FileObject | None = None


def files_in(contents: bytes, lengths: Column, where: str) -> Sequence[PackedFile]:
    """Return the files of a version with storages of these lengths. Raise ``CorruptionError``,
    naming ``where``, unless the files have the storages of the version."""
    table = decode_table(contents)
    if table is None or table.lengths != lengths.tolist():
        raise CorruptionError(f"{where}: its files do not have the storages that it has")
    return table.files


def pieces_of(
    file: PackedFile, digests: Sequence[bytes], around: Callable[[int, int], bytes]
) -> list[Piece]:
    """Return the pieces of a file. digests: of the units of its storages. around: reads bytes
    around these."""
    spans, counts = file.spans(), unit_counts(file.length)
    first = (np.cumsum(counts) - counts).tolist()
    pieces, start, size, has_large, said = [], 0, 0, False, bytearray()

    def end() -> None:
        nonlocal start, size, has_large
        if size:
            pieces.append(Piece((digest(said), size), start, size))
        start, size, has_large = start + size, 0, False
        said.clear()

    columns = (spans.length, spans.storage, spans.inside)
    for length, storage, inside in zip(*(each.tolist() for each in columns), strict=True):
        is_around = storage == len(file.length)
        # So an unchanged storage is a piece that exists already.
        is_large = not is_around and length >= ALONE
        for at in range(0, length, UNIT):
            part = min(UNIT, length - at)
            # Kept small: if a few bytes of it change, all of a shared piece is sent again.
            if has_large or is_large or size + part > SHARED:
                end()
            if is_around:
                content = digest(around(inside + at, part))
            else:
                content = digests[first[storage] + at // UNIT]
            said += part.to_bytes(8, "little") + content
            size, has_large = size + part, is_large
    end()
    return pieces


@dataclass(frozen=True, slots=True)
class ReadManifest:
    """A manifest, read and checked. ``digests``: of each unit. ``files``: the places of its
    storages in its files."""

    manifest: Manifest
    lengths: Column
    digests: Digests
    files: Sequence[PackedFile]

    @classmethod
    def of(cls, manifest: Manifest) -> ReadManifest:
        """Check a manifest. Raise ``CorruptionError`` if its parts do not fit together."""
        where = f"the manifest of version {manifest.token.hex()} of model {manifest.model!r}"
        if len(manifest.lengths) % 8:
            raise CorruptionError(f"{where}: a column of {len(manifest.lengths)} bytes")
        lengths: Column = np.frombuffer(manifest.lengths, "<i8").astype(np.int64)
        if (lengths < 0).any() or float(lengths.sum(dtype=np.float64)) > _SUM_MAX:
            raise CorruptionError(f"{where}: lengths of storages are out of range")
        count = int(unit_counts(lengths).sum())
        if len(manifest.digests) != count * DIGEST_SIZE:
            raise CorruptionError(
                f"{where}: expected digests of {count} units, found {len(manifest.digests)} bytes"
            )
        digests = np.frombuffer(manifest.digests, np.uint8).reshape(-1, DIGEST_SIZE)
        files = files_in(manifest.contents, lengths, where)
        sizes = [sum(each.size for each in file) for file in manifest.files]
        if sizes != [each.size for each in files]:
            raise CorruptionError(f"{where}: its objects are not as long as its files")
        return cls(manifest, lengths, digests, files)


_SUM_MAX: Final = float(1 << 62)
