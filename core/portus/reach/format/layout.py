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
ROOT_MAGIC: Final = b"ROOT"
RECORD_MAGIC: Final = b"PREC"
ENTRY_MAGIC: Final = b"PLOG"

SUPERBLOCK_OFFSETS: Final = (0 * PAGE, 4 * PAGE)
SLOT_OFFSETS: Final = (1 * PAGE, 2 * PAGE)
HOLDER_OFFSET: Final = 3 * PAGE
HOLDER_SIZE: Final = 512
DATA_START: Final = 8 * PAGE

# An old reader opens a pool with unknown compat bits; reads, but does not write, one with
# unknown read_only_compat bits; and refuses unknown incompat bits.
COPIES: Final = 1
"""A compat bit: roots refer to copies of records. An old program leaves them out of its roots."""

MARKS: Final = 2
"""A compat bit: entries of model indices may have flags. An old program leaves them out of the
indices that it writes."""

METRICS: Final = 8
"""A compat bit: model indices may have metrics behind their entries. An old program leaves them out
of the indices that it writes."""

LOGS: Final = 1
"""An incompat bit: versions may have logs. An old program would take a version for what it was when
its log was empty."""

BUNCHES: Final = 2
"""An incompat bit: entries of logs may have bunches. An old program would skip them."""

IN_PLACE: Final = 4
"""An incompat bit: storages of a version with a log may be changed in place. An old program would
report them as damaged, and undo nothing."""

COMPAT_KNOWN: Final = COPIES | MARKS | METRICS
READ_ONLY_COMPAT_KNOWN: Final = 0
INCOMPAT_KNOWN: Final = LOGS | BUNCHES | IN_PLACE

VERSION_ID_MAX: Final = 1 << 61
NAME_SIZE_MAX: Final = 4096
RECORD_SIZE_MAX: Final = 1 << 36


INEXACT: Final = 1
"""A flag of an entry of a model index."""

WITH_NEXT: Final = 1
"""A flag of a log entry: it belongs to the commit after the one on which it is based."""

UNDO: Final = 2
"""A flag of a log entry: it has bytes of storages before they were changed in place, and counts as
long as no entry without the flag comes after it."""


class RecordKind(enum.IntEnum):
    """The kind of a record. A writer that meets an unknown kind refuses to write."""

    MODEL_TABLE = 1
    MODEL_INDEX = 2
    VERSION = 3
    CONTENTS = 4
    COPIES = 5


SUPERBLOCK: Final = Record(
    "superblock",
    128,
    (
        Field("magic", "16s", "`PORTUS POOL` CR LF 1A LF 00"),
        Field("format_version", "I", "1"),
        Field("page_size", "I", "4096"),
        Field("compat", "Q", "feature bits that an old program may ignore"),
        Field("read_only_compat", "Q", "feature bits that an old program may read but not write"),
        Field("incompat", "Q", "feature bits that an old program must refuse"),
        Field(
            "uuid",
            "16s",
            "names this pool: random",
        ),
        Field("created_ns", "Q", "Unix time in nanoseconds"),
        Field("reserved", "40s", "zero"),
        Field("digest", "16s", "of the 112 bytes before"),
    ),
)

SLOT: Final = Record(
    "root slot",
    128,
    (
        Field("magic", "4s", "`ROOT`"),
        Field("reserved", "4s", "zero"),
        Field(
            "sequence",
            "Q",
            "the commit number; of a pool to which nothing was committed 0, or, if it continues "
            "another pool, an even number above that one's commits",
        ),
        Field("next_version", "Q", "the id that the next version gets; over every id below"),
        Field("size", "Q", "bytes of the pool that this root may reach into"),
        Field("uuid", "16s", "that of the superblock"),
        Field("table_offset", "Q", "model table record; 0 when there is none yet"),
        Field("table_length", "Q", "its bytes, header included"),
        Field("table_digest", "16s", "its digest"),
        Field("copies_offset", "Q", "copies record; 0 when there is none"),
        Field("copies_length", "Q", "its bytes, header included"),
        Field("copies_digest", "16s", "its digest"),
        Field("digest", "16s", "of the 112 bytes before"),
    ),
)

HEADER: Final = Record(
    "record header",
    64,
    (
        Field("magic", "4s", "`PREC`"),
        Field("kind", "H", "1 model table, 2 model index, 3 version, 4 contents, 5 copies"),
        Field("kind_version", "H", "1"),
        Field("reserved", "Q", "zero"),
        Field("length", "Q", "bytes of payload that follow"),
        Field("commit", "Q", "the commit that wrote it"),
        Field("uuid", "16s", "that of the superblock"),
        Field("digest", "16s", "of the 48 bytes before and the payload"),
    ),
)

TABLE_ENTRY: Final = Record(
    "model table entry",
    48,
    (
        Field("offset", "Q", "model index record"),
        Field("length", "Q", "its bytes, header included"),
        Field("digest", "16s", "its digest"),
        Field("name_offset", "Q", "bytes from the start of the names"),
        Field("name_length", "Q", "bytes of UTF-8"),
    ),
)

INDEX_ENTRY: Final = Record(
    "model index entry",
    96,
    (
        Field("id", "Q", "of the version; unique in the pool, grows"),
        Field("commit", "Q", "the commit that made it visible"),
        Field("step", "q", "the caller's"),
        Field("time_ns", "Q", "Unix time in nanoseconds"),
        Field("token", "16s", "random, names the version in pointers"),
        Field("size", "Q", "sum of its storages in bytes, shared ones included"),
        Field("flags", "Q", "1: inexact; the other bits are zero"),
        Field("offset", "Q", "version record"),
        Field("length", "Q", "its bytes, header included"),
        Field("digest", "16s", "its digest"),
    ),
)

VERSION_HEAD: Final = Record(
    "version head",
    120,
    (
        Field("id", "Q", "as in the model index"),
        Field("commit", "Q", "as in the model index"),
        Field("step", "q", "as in the model index"),
        Field("time_ns", "Q", "as in the model index"),
        Field("token", "16s", "as in the model index"),
        Field("size", "Q", "as in the model index"),
        Field("contents_offset", "Q", "contents record"),
        Field("contents_length", "Q", "its bytes, header included"),
        Field("contents_digest", "16s", "its digest"),
        Field("storages", "Q", "number of storage entries"),
        Field("extents", "Q", "number of extent entries"),
        Field("units", "Q", "number of unit digests"),
        Field("name_length", "Q", "bytes of the model's name in UTF-8"),
    ),
)

STORAGE: Final = Record(
    "storage entry",
    56,
    (
        Field("length", "Q", "bytes"),
        Field("first_extent", "Q", "index of its first extent entry"),
        Field("extents", "Q", "number of its extent entries, which add up to its length"),
        Field("first_unit", "Q", "index of its first unit digest; it has one for each 16 MiB"),
        Field("born", "Q", "the commit that copied the bytes; an older one if they are shared"),
        Field("digest", "16s", "of the storage: that of its one unit, or of its units' digests"),
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

COPY: Final = Record(
    "copy entry",
    48,
    (
        Field("offset", "Q", "the copy"),
        Field("length", "Q", "its bytes, header included"),
        Field("digest", "16s", "its digest, which is that of the record it is a copy of"),
        Field("commit", "Q", "the commit that wrote the copy"),
        Field("kind", "Q", "its kind"),
    ),
)

LOG: Final = Record(
    "log",
    56,
    (
        Field("offset", "Q", "its pages, from the start of the pool"),
        Field("length", "Q", "bytes of its pages"),
        Field("name", "16s", "random; its entries have it too"),
        Field("born", "Q", "the commit that reserved its pages"),
        Field("entries", "Q", "how many it had when the version was committed: all of them count"),
        Field("in_place", "Q", "how many in-place rows follow"),
    ),
)

PLACED: Final = Record(
    "in-place row",
    24,
    (
        Field("storage", "Q", "index of a storage that is changed in place"),
        Field("cell", "Q", "bytes of each of its cells: a power of two, up to 4096"),
        Field("digests", "Q", "index of the storage that has the digests of its units"),
    ),
)

LOG_ENTRY: Final = Record(
    "log entry",
    96,
    (
        Field("magic", "4s", "`PLOG`"),
        Field("flags", "I", "1: it belongs to the next commit; 2: undo; the other bits are zero"),
        Field("number", "Q", "1 for the first entry of the log, and so on"),
        Field("commit", "Q", "that of the version that it stands on"),
        Field("length", "Q", "bytes of the entry, this header included: whole pages"),
        Field("patches", "Q", "number of its patches"),
        Field("contents_length", "Q", "bytes of its contents; 0: they stay as they were"),
        Field("name", "16s", "that of the log"),
        Field("bunches", "Q", "number of its bunches"),
        Field("reserved", "Q", "zero"),
        Field("digest", "16s", "of the 80 bytes before and all that follows in the entry"),
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

TABLES: Final = (
    SUPERBLOCK,
    SLOT,
    HEADER,
    TABLE_ENTRY,
    INDEX_ENTRY,
    VERSION_HEAD,
    STORAGE,
    EXTENT,
    UNIT_DIGEST,
    COPY,
    LOG,
    PLACED,
    LOG_ENTRY,
    BUNCH,
)
