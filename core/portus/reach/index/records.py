"""Typed records on a medium: how they are framed, found again, and turned into values.

A record is a header, then a payload. A pointer to a record holds its offset, length and digest
(``Pointer``). So a record that is read is the intended one, and complete. Payloads of catalogues
and versions are in msgpack.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter
from typing import Annotated, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Meta

from portus.engine.copying.segments import Column, Digests, ranges
from portus.engine.format.checksum import DIGEST_SIZE, unit_count, unit_counts
from portus.engine.format.record import Record
from portus.engine.pipeline.plan import Flags
from portus.engine.spec import PAGE, Extent, VersionInfo
from portus.errors import CorruptionError, MediumError, UsageError
from portus.reach.format.layout import (
    EXTENT,
    HEADER,
    KIND_VERSION,
    NAME_SIZE_MAX,
    RECORD_MAGIC,
    RECORD_SIZE_MAX,
    STORAGE,
    UNIT_DIGEST,
    RecordKind,
)
from portus.reach.media.pool import ReadableMedium

_log: Final = logging.getLogger("portus")

ALIGNMENT: Final = 8
"""Records begin at multiples of this."""

_SUM_MAX: Final = 1 << 62
"""A limit for the bytes or extents of a version: far below what a signed 64-bit number holds."""

REFRESH_COMMITS: Final = 64
"""Commits after which shared storages are copied again, since rot in them is in every version that
shares them."""

CELLS: Final = tuple(1 << shift for shift in range(13))
"""Sizes in bytes that a cell may have: each divides a unit."""

Rows = npt.NDArray[np.void]

_Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Bytes16 = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Name = Annotated[str, Meta(max_length=NAME_SIZE_MAX)]


class Pointer(msgspec.Struct, frozen=True, array_like=True):
    """The place of a record, its digest, and the place of its copy; 0 if it has none. Offset 0
    points nowhere."""

    offset: _Number
    length: _Number
    digest: _Bytes16
    copy: _Number = 0

    @property
    def extents(self) -> list[Extent]:
        """The record, and its copy if it has one."""
        return [Extent(each, self.length) for each in (self.offset, self.copy) if each]


NOWHERE: Final = Pointer(0, 0, bytes(16))


@dataclass(frozen=True, slots=True)
class VersionEntry:
    """A version as the catalogue lists it."""

    info: VersionInfo
    pointer: Pointer


@dataclass(frozen=True, slots=True)
class InPlaceStorage:
    """A storage that is changed in place. ``cell``: the bytes that are changed, logged and hashed
    together. ``digests``: the storage with the digests of its units; see ``in_place``."""

    storage: _Number
    cell: _Number
    digests: _Number


@dataclass(frozen=True, slots=True)
class VersionLog:
    """The pages to which changes of a version are appended after its commit: see ``log``.

    ``name``: random, unique to this log. ``born``: the commit that reserved the pages; 0 stands for
    the next one. ``entries``: how many count in any case. ``in_place``: the storages of the version
    that are changed in place.
    """

    extent: Extent
    name: _Bytes16
    born: _Number
    entries: _Number
    in_place: tuple[InPlaceStorage, ...] = ()


@dataclass(frozen=True)
class VersionRecord:
    """The record of one version: everything except its bytes. A ``Previous`` of the next one.

    ``contents``: what its storages are. ``storages``, ``extents`` and ``units``: arrays of the
    format's rows of those names. ``log``: None for a version that cannot change after its commit.
    """

    info: VersionInfo
    contents: bytes
    storages: Rows
    extents: Rows
    units: Rows
    log: VersionLog | None = None

    @property
    def name(self) -> str:
        """The version's id, model and step in words, for findings."""
        return f"version {self.info.id} of {self.info.model!r} (step {self.info.step})"

    @property
    def length(self) -> Column:
        length: Column = self.storages["length"].astype(np.int64)
        return length

    @cached_property
    def first_extent(self) -> Column:
        """The index of the first extent of each storage."""
        counts = self.storages["extents"].astype(np.int64)
        return np.cumsum(counts) - counts

    @cached_property
    def first_unit(self) -> Column:
        """The index of the first unit of each storage."""
        counts = unit_counts(self.length)
        return np.cumsum(counts) - counts

    @cached_property
    def first_byte(self) -> Column:
        """Storages are end to end in the extents of the version: where each begins there."""
        return np.cumsum(self.length) - self.length

    @cached_property
    def _edges(self) -> Column:
        return np.append(0, np.cumsum(self.extents["length"].astype(np.int64)))

    @property
    def may_share(self) -> Flags:
        flags: Flags = self.storages["born"].astype(np.int64) + REFRESH_COMMITS > self.info.commit
        return flags

    def digests(self, indices: Column) -> Digests:
        counts = unit_counts(self.length[indices])
        units = self.units[ranges(self.first_unit[indices], counts)]
        return np.ascontiguousarray(units).view(np.uint8).reshape(-1, UNIT_DIGEST.size)

    def storage_extents(self, index: int) -> tuple[Extent, ...]:
        """Return the extents of one storage, in order."""
        first = int(self.first_extent[index])
        rows = self.extents[first : first + int(self.storages["extents"][index])]
        return tuple(Extent(int(each["offset"]), int(each["length"])) for each in rows)

    @property
    def reach(self) -> Rows:
        """The extents of all storages, and the pages of the log."""
        log = [] if self.log is None else [(self.log.extent.offset, self.log.extent.length)]
        return np.concatenate([self.extents, np.array(log, EXTENT.dtype)])

    def places(self, storage: Column, start: Column, length: Column) -> tuple[Column, Column]:
        """Return the offsets and lengths in the pool of ranges of storages, end to end."""
        extent, inside, size = overlaps(self._edges, self.first_byte[storage] + start, length)
        return self.extents["offset"].astype(np.int64)[extent] + inside, size


def overlaps(edges: Column, offset: Column, length: Column) -> tuple[Column, Column, Column]:
    """Return the parts of ranges that lie in adjacent pieces between ``edges``: the piece, the
    first byte in it, and the length of each part."""
    first = np.searchsorted(edges, offset, "right") - 1
    end = offset + length
    counts = np.maximum(np.searchsorted(edges, end, "left") - first, 0)
    piece = ranges(first, counts)
    low = np.maximum(np.repeat(offset, counts), edges[piece])
    size = np.minimum(np.repeat(end, counts), edges[piece + 1]) - low
    some = size > 0
    return piece[some], (low - edges[piece])[some], size[some]


def frame(kind: RecordKind, commit: int, uuid: bytes, payload: bytes) -> bytes:
    """Return a record: header and payload."""
    start = HEADER.pack(
        magic=RECORD_MAGIC,
        kind=int(kind),
        kind_version=KIND_VERSION,
        length=len(payload),
        commit=commit,
        uuid=uuid,
    )[:-DIGEST_SIZE]
    return start + _digest(start, payload) + payload


def point(places: Sequence[int], record: bytes) -> Pointer:
    """Return the pointer to ``record`` at the first of ``places``, and to its copy at the second,
    if there is one."""
    found = record[HEADER.size - DIGEST_SIZE : HEADER.size]
    return Pointer(places[0], len(record), found, *places[1:])


def read(
    medium: ReadableMedium,
    pointer: Pointer,
    kind: RecordKind,
    say: Callable[[str], None] = _log.error,
) -> memoryview:
    """Return the payload of a record, checked; of its copy if the record is damaged.

    say: receives a message about the damage. Raises ``CorruptionError`` naming kind and place if
    the copy is damaged too, or there is none.
    """
    try:
        return read_whole(medium, pointer, kind, pointer.offset)[HEADER.size :]
    except (CorruptionError, MediumError) as error:
        if not pointer.copy:
            raise
        try:
            record = read_whole(medium, pointer, kind, pointer.copy)
        except (CorruptionError, MediumError):
            raise error from None
        say(f"{error}; read from its copy at byte {pointer.copy}")
        return record[HEADER.size :]


def read_whole(
    medium: ReadableMedium, pointer: Pointer, kind: RecordKind, offset: int
) -> memoryview:
    """Return a record, header and payload, checked: the one at ``offset``, one of the two places
    of a pointer. Raises as ``read``."""
    where = f"{kind.name.lower()} record at byte {offset}"
    # Checked before memory is taken for it.
    if not HEADER.size <= pointer.length <= RECORD_SIZE_MAX:
        raise CorruptionError(f"{where}: length {pointer.length} is out of range")
    if offset + pointer.length > medium.size:
        raise CorruptionError(
            f"{where}: ends at byte {offset + pointer.length}, but the pool "
            f"{medium.info.name} has {medium.size}; was it truncated?"
        )
    data = memoryview(bytearray(pointer.length))
    medium.load(offset, data)
    header = HEADER.unpack(data)
    found = _digest(data[: HEADER.size - DIGEST_SIZE], data[HEADER.size :])
    # Compared with the pointer: an older record at this place matches its own digest, too.
    if found != pointer.digest or header["digest"] != pointer.digest:
        raise CorruptionError(
            f"{where} of {medium.info.name}: expected digest {pointer.digest.hex()}, "
            f"found {found.hex()}"
        )
    if header["kind"] != kind or header["kind_version"] != KIND_VERSION:
        raise UsageError(
            f"{where}: kind {header['kind']!r} version {header['kind_version']!r} is not known "
            f"to this Portus; upgrade it"
        )
    fixed = (header["magic"], header["length"], header["reserved"], offset % ALIGNMENT)
    if fixed != (RECORD_MAGIC, pointer.length - HEADER.size, 0, 0):
        raise CorruptionError(f"{where} of {medium.info.name}: not the header of a record: {fixed}")
    return data.toreadonly()


def _digest(start: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    hasher = xxhash.xxh3_128(start)
    hasher.update(payload)
    return hasher.digest()


_FACTS: Final = attrgetter(*(each.name for each in fields(VersionInfo)))

_Facts = tuple[_Name, _Number, _Number, int, _Bytes16, int, _Number, bool, dict[str, float]]
"""Those of ``VersionInfo``, in its order."""

_encode: Final = msgspec.msgpack.Encoder().encode
_entry_rows: Final = msgspec.msgpack.Decoder(list[tuple[_Facts, Pointer]])
_version_row: Final = msgspec.msgpack.Decoder(
    tuple[_Facts, bytes, bytes, bytes, bytes, VersionLog | None]
)

_Decoded = TypeVar("_Decoded")


def _decode(decoder: msgspec.msgpack.Decoder[_Decoded], payload: memoryview, what: str) -> _Decoded:
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptionError(f"{what}: {error}") from error


def encode_catalogue(entries: Iterable[VersionEntry]) -> bytes:
    """Return the payload of a catalogue."""
    return _encode([(_FACTS(entry.info), entry.pointer) for entry in entries])


def decode_catalogue(payload: memoryview) -> list[VersionEntry]:
    """Return the versions in a catalogue. Raise ``CorruptionError`` if it is damaged."""
    rows = _decode(_entry_rows, payload, "catalogue")
    return [VersionEntry(VersionInfo(*facts), pointer) for facts, pointer in rows]


def encode_version(record: VersionRecord) -> bytes:
    """Return the payload of a version."""
    rows = (record.storages.tobytes(), record.extents.tobytes(), record.units.tobytes())
    return _encode((_FACTS(record.info), record.contents, *rows, record.log))


def decode_version(payload: memoryview) -> VersionRecord:
    """Return the record of a version. Raise ``CorruptionError`` if its parts do not fit."""
    facts, contents, storages, extents, units, log = _decode(_version_row, payload, "version")
    record = VersionRecord(
        VersionInfo(*facts),
        contents,
        _rows(storages, STORAGE),
        _rows(extents, EXTENT),
        _rows(units, UNIT_DIGEST),
        log,
    )
    _check_arrays(record)
    _check_log(record)
    return record


def _rows(data: bytes, table: Record) -> Rows:
    if len(data) % table.size:
        raise CorruptionError(f"version: {len(data)} bytes are no rows of {table.name}")
    return np.frombuffer(data, table.dtype)


def _check_arrays(record: VersionRecord) -> None:
    storages, extents, units, info = record.storages, record.extents, record.units, record.info
    # Before anything is added up: sums of wild numbers wrap around, and then they may look right.
    for column in (storages["length"], extents["length"], storages["extents"]):
        if float(column.sum(dtype=np.float64)) > _SUM_MAX:
            raise CorruptionError(f"version {info.id}: lengths are out of range")
    counts = storages["extents"].astype(np.int64)
    if int(counts.sum()) != len(extents):
        raise CorruptionError(f"version {info.id}: {len(extents)} extent entries are others")
    per_storage = np.zeros(len(storages), np.uint64)
    np.add.at(per_storage, np.repeat(np.arange(len(storages)), counts), extents["length"])
    if not np.array_equal(per_storage, storages["length"]):
        raise CorruptionError(f"version {info.id}: extents do not add up to the storages")
    if int(unit_counts(record.length).sum()) != len(units):
        raise CorruptionError(f"version {info.id}: {len(units)} unit digests are others")
    if not extents["length"].all():
        raise CorruptionError(f"version {info.id}: an extent is empty")
    if int(storages["length"].sum()) != info.size:
        raise CorruptionError(f"version {info.id}: its storages do not add up to {info.size} bytes")
    if ((storages["born"] < 1) | (storages["born"] > info.commit)).any():
        raise CorruptionError(f"version {info.id}: born outside of commits 1 to {info.commit}")


def _check_log(record: VersionRecord) -> None:
    """Raise ``CorruptionError`` unless a log has whole pages, and each storage that is changed in
    place is one extent, of whole cells, with a digest for each unit."""
    lengths, log = record.length, record.log
    if log is None:
        return
    extent, commit = log.extent, record.info.commit
    is_whole = extent.length > 0 and not extent.offset % PAGE and not extent.length % PAGE
    if not is_whole or extent.end > _SUM_MAX or not 1 <= log.born <= commit:
        raise CorruptionError(
            f"version {record.info.id}: expected a log in whole pages, born from commit 1 to "
            f"{commit}, found {extent}, born at {log.born}"
        )
    kinds: dict[int, str] = {}
    for each in log.in_place:
        if each.storage in kinds or each.digests in kinds:
            raise CorruptionError(f"version {record.info.id}: {each} is there twice")
        kinds |= {each.storage: "in place", each.digests: "digests"}
        if max(each.storage, each.digests) >= len(lengths):
            raise CorruptionError(f"version {record.info.id}: has no storages for {each}")
        length = int(lengths[each.storage])
        good = each.cell in CELLS and length % each.cell == 0
        if not good or len(record.storage_extents(each.storage)) != 1:
            raise CorruptionError(
                f"version {record.info.id}: {each} are no cells of {length} bytes"
            )
        if int(lengths[each.digests]) != unit_count(length) * UNIT_DIGEST.size:
            raise CorruptionError(
                f"version {record.info.id}: {each} has not a digest for each unit"
            )
