"""The digests of an image, as one record of its file, with a length known before the copy.

The record has the digest of each unit of each storage, one of everything else, and one of itself.
Everything else is every byte of the file that no other digest covers: all bytes outside of the
storages, outside of this record, and outside of the two CRC32s that the zip notes of this record.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from portus.engine.format.checksum import DIGEST_SIZE, digest, unit_counts
from portus.engine.format.record import Field, Record
from portus.engine.image.image import Column, Digests
from portus.errors import CorruptionError, UsageError

FORMAT: Final = 1

MAGIC: Final = b"PORTUSDG"

HEAD: Final = Record(
    "digests of an image",
    56,
    (
        Field("magic", "8s", '`"PORTUSDG"`'),
        Field("format", "I", "1"),
        Field("zero", "I", "0"),
        Field("size", "Q", "of the whole file, in bytes"),
        Field("storages", "Q", "number of storages"),
        Field("units", "Q", "number of units of all storages"),
        Field("rest", "16s", "xxh3_128 of everything else"),
    ),
)


def record_length(lengths: Column) -> int:
    """Return the bytes of the record for storages of these lengths."""
    return HEAD.size + (int(unit_counts(lengths).sum()) + 1) * DIGEST_SIZE


def pack(size: int, lengths: Column, digests: Digests, rest: bytes) -> bytes:
    """Return the record of a file of ``size`` bytes."""
    units = int(unit_counts(lengths).sum())
    if digests.shape != (units, DIGEST_SIZE):
        raise UsageError(f"digests of an image: expected {units} units, found {digests.shape}")
    head = HEAD.row(MAGIC, FORMAT, 0, size, len(lengths), units, rest)
    body = head + np.ascontiguousarray(digests).tobytes()
    return body + digest(body)


def size_noted(record: bytes) -> int | None:
    """Return the size of the file that a record is of; None for a damaged record."""
    body, own = record[:-DIGEST_SIZE], record[-DIGEST_SIZE:]
    if len(body) < HEAD.size or digest(body) != own:
        return None
    size = HEAD.unpack(body)["size"]
    assert isinstance(size, int)
    return size


def unpack(record: bytes, size: int, lengths: Column, where: str) -> tuple[Digests, bytes]:
    """Return the digests of units, and that of everything else, in the record at ``where``, of a
    file of ``size`` bytes with such storages.

    Raises ``CorruptionError`` when it is damaged or is that of another file, and ``UsageError``
    when a later version of Portus wrote it.
    """
    if size_noted(record) is None:
        raise CorruptionError(f"{where}: the record of digests does not match its own digest")
    body = record[:-DIGEST_SIZE]
    head = HEAD.unpack(body)
    if head["magic"] != MAGIC or head["format"] != FORMAT:
        raise UsageError(
            f"{where}: expected digests of format {FORMAT}, found {head['format']!r}; a later "
            "version of Portus wrote this file: upgrade Portus"
        )
    units = int(unit_counts(lengths).sum())
    # Tools copy records into other files; there this one is intact, and wrong.
    expected = (size, len(lengths), units, record_length(lengths))
    found = (head["size"], head["storages"], head["units"], len(record))
    if found != expected:
        raise CorruptionError(
            f"{where}: the record of digests is that of another file: expected bytes, storages, "
            f"units and length {expected}, found {found}"
        )
    rows = np.frombuffer(body, np.uint8, units * DIGEST_SIZE, HEAD.size)
    rest = head["rest"]
    assert isinstance(rest, bytes)
    return rows.reshape(units, DIGEST_SIZE), rest
