"""The tables of the pool format, version 1. ``docs/format.md`` holds them too, and is tested.

All numbers are little-endian. Every reserved byte is zero. A digest is xxh3_128, 16 bytes, most
significant first, of everything before it in its record unless its row says otherwise.
"""

from __future__ import annotations

import enum
from typing import Final

from portus.engine.format.record import Field, Record
from portus.engine.spec import PAGE

FORMAT_VERSION: Final = 1
KIND_VERSION: Final = 1
MAGIC: Final = b"PORTUS POOL\r\n\x1a\n\x00"
RECORD_MAGIC: Final = b"PREC"
ENTRY_MAGIC: Final = b"PLOG"

SLOT_OFFSETS: Final = (0 * PAGE, 1 * PAGE, 4 * PAGE, 5 * PAGE)
"""Slots 0 and 1, then their copies."""

HOLDER_OFFSET: Final = 2 * PAGE
HOLDER_SIZE: Final = 512
DATA_START: Final = 8 * PAGE

VERSION_ID_MAX: Final = 1 << 61
NAME_SIZE_MAX: Final = 4096
RECORD_SIZE_MAX: Final = 1 << 36

UNDO: Final = 1
"""A flag of a log entry: it has bytes of storages before they were changed in place, and counts as
long as no entry without the flag comes after it."""


class RecordKind(enum.IntEnum):
    """The kind of a record. A writer that meets an unknown kind refuses to write."""

    CATALOGUE = 1
    VERSION = 2


SLOT: Final = Record(
    "root slot",
    120,
    (
        Field("magic", "16s", "`PORTUS POOL` CR LF 1A LF 00"),
        Field("format_version", "Q", "1"),
        Field("uuid", "16s", "names this pool: random"),
        Field("sequence", "Q", "the commit number; a pool just made has 0 and 1"),
        Field("next_version", "Q", "the id that the next version gets; over every id below"),
        Field("size", "Q", "bytes of the pool that this root may reach into"),
        Field("catalogue_offset", "Q", "catalogue record; 0 when there is none yet"),
        Field("catalogue_length", "Q", "its bytes, header included"),
        Field("catalogue_digest", "16s", "its digest"),
        Field("catalogue_copy", "Q", "its copy; 0 when there is none"),
        Field("digest", "16s", "of the 104 bytes before"),
    ),
)

HEADER: Final = Record(
    "record header",
    64,
    (
        Field("magic", "4s", "`PREC`"),
        Field("kind", "H", "1 catalogue, 2 version"),
        Field("kind_version", "H", "1"),
        Field("reserved", "Q", "zero"),
        Field("length", "Q", "bytes of payload that follow"),
        Field("commit", "Q", "the commit that wrote it"),
        Field("uuid", "16s", "that of the pool"),
        Field("digest", "16s", "of the 48 bytes before and the payload"),
    ),
)

STORAGE: Final = Record(
    "storage entry",
    24,
    (
        Field("length", "Q", "bytes"),
        Field("extents", "Q", "number of its extent entries, which add up to its length"),
        Field("born", "Q", "the commit that copied the bytes; an older one if they are shared"),
    ),
)

EXTENT: Final = Record(
    "extent entry",
    16,
    (
        Field("offset", "Q", "bytes from the start of the pool"),
        Field("length", "Q", "bytes, over 0"),
    ),
)

UNIT_DIGEST: Final = Record(
    "unit digest", 16, (Field("digest", "16s", "xxh3_128 of up to 16 MiB of a storage"),)
)

LOG_ENTRY: Final = Record(
    "log entry",
    80,
    (
        Field("magic", "4s", "`PLOG`"),
        Field("flags", "I", "1: undo; the other bits are zero"),
        Field("number", "Q", "1 for the first entry of the log, and so on"),
        Field("commit", "Q", "that of the version that it stands on, or is stored for"),
        Field("length", "Q", "bytes of the entry, this header included: whole pages"),
        Field("contents_length", "Q", "bytes of its contents; 0: they stay as they were"),
        Field("name", "16s", "that of the log"),
        Field("bunches", "Q", "number of its bunches"),
        Field("digest", "16s", "of the 64 bytes before and all that follows in the entry"),
    ),
)

BUNCH: Final = Record(
    "bunch",
    16,
    (
        Field("length", "Q", "bytes of each of its patches"),
        Field("patches", "Q", "how many it has"),
    ),
)

TABLES: Final = (SLOT, HEADER, STORAGE, EXTENT, UNIT_DIGEST, LOG_ENTRY, BUNCH)
