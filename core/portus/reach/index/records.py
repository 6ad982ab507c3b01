"""Typed records on a medium: how they are framed, found again, and turned into values.

A record is a header, then a payload. A pointer to a record holds its offset, length and digest
(``Pointer``). So a record that is read is the intended one, and complete.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from portus.engine.format.checksum import unit_count
from portus.engine.format.record import Value
from portus.engine.spec import PAGE, Extent, VersionInfo
from portus.errors import CorruptionError, MediumError, UsageError
from portus.reach.format.layout import (
    COPY,
    EXTENT,
    HEADER,
    INDEX_ENTRY,
    INEXACT,
    KIND_VERSION,
    LOG,
    NAME_SIZE_MAX,
    PLACED,
    RECORD_MAGIC,
    RECORD_SIZE_MAX,
    STORAGE,
    TABLE_ENTRY,
    UNIT_DIGEST,
    VERSION_HEAD,
    VERSION_ID_MAX,
    RecordKind,
)
from portus.reach.media.pool import ReadableMedium

_log: Final = logging.getLogger("portus")

_SUM_MAX: Final = 1 << 62
"""A limit for the bytes or extents of a version: far below what a signed 64-bit number holds."""

CELLS: Final = tuple(1 << shift for shift in range(13))
"""Sizes in bytes that a cell may have: each divides a unit."""

Rows = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Pointer:
    """The place of a record, and its digest. Offset 0 points nowhere."""

    offset: int
    length: int
    digest: bytes

    @property
    def extent(self) -> Extent:
        return Extent(self.offset, self.length)


NOWHERE: Final = Pointer(0, 0, bytes(16))


@dataclass(frozen=True, slots=True)
class Copy:
    """Another place of a record that a root reaches. ``commit``: the one that wrote it."""

    pointer: Pointer
    commit: int
    kind: RecordKind


@dataclass(frozen=True, slots=True)
class VersionEntry:
    """A version as its model's index lists it."""

    info: VersionInfo
    pointer: Pointer


@dataclass(frozen=True, slots=True)
class InPlaceStorage:
    """A storage that is changed in place. ``cell``: the bytes that are changed, logged and hashed
    together. ``digests``: the storage with the digests of its units; see ``in_place``."""

    storage: int
    cell: int
    digests: int


@dataclass(frozen=True, slots=True)
class VersionLog:
    """The pages to which changes of a version are appended after its commit: see ``log``.

    ``name``: random, unique to this log. ``born``: the commit that reserved the pages; 0 stands for
    the next one. ``entries``: how many count in any case. ``in_place``: the storages of the version
    that are changed in place.
    """

    extent: Extent
    name: bytes
    born: int
    entries: int
    in_place: tuple[InPlaceStorage, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the log in the record of its version."""
        return LOG.size + len(self.in_place) * PLACED.size


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """The record of one version: everything except its bytes and its contents.

    ``info``: facts that only the model's index holds are set if the record was read with that.
    ``storages``, ``extents`` and ``units``: arrays of the format's rows of those names. ``log``:
    None for a version that cannot change after its commit.
    """

    info: VersionInfo
    contents: Pointer
    storages: Rows
    extents: Rows
    units: Rows
    log: VersionLog | None = None

    def storage_extents(self, index: int) -> tuple[Extent, ...]:
        """Return the extents of one storage, in order."""
        row = self.storages[index]
        first = int(row["first_extent"])
        rows = self.extents[first : first + int(row["extents"])]
        return tuple(Extent(int(each["offset"]), int(each["length"])) for each in rows)


def frame(kind: RecordKind, commit: int, uuid: bytes, payload: bytes) -> bytes:
    """Return a record: header and payload."""
    start, found = _start(kind, commit, uuid, payload)
    return start + found + payload


def digest_of(kind: RecordKind, commit: int, uuid: bytes, payload: bytes) -> bytes:
    """Return the digest that a pointer to the record has."""
    return _start(kind, commit, uuid, payload)[1]


def _start(kind: RecordKind, commit: int, uuid: bytes, payload: bytes) -> tuple[bytes, bytes]:
    """Return the header of a record except its digest, and the digest."""
    blank = HEADER.pack(
        magic=RECORD_MAGIC,
        kind=int(kind),
        kind_version=KIND_VERSION,
        length=len(payload),
        commit=commit,
        uuid=uuid,
    )
    hasher = xxhash.xxh3_128(blank[:-16])
    hasher.update(payload)
    return blank[:-16], hasher.digest()


def point(offset: int, record: bytes) -> Pointer:
    """Return the pointer to ``record`` at ``offset``."""
    return Pointer(offset, len(record), record[HEADER.size - 16 : HEADER.size])


def read(medium: ReadableMedium, pointer: Pointer, kind: RecordKind) -> memoryview:
    """Return the payload of a record, checked. Raise ``CorruptionError`` naming kind and place."""
    return read_whole(medium, pointer, kind)[HEADER.size :]


def read_copied(
    medium: ReadableMedium,
    pointer: Pointer,
    kind: RecordKind,
    copies: Callable[[], Sequence[Copy]],
    say: Callable[[str], None] = _log.error,
) -> memoryview:
    """Return the payload of a record, or of an intact copy if the record is damaged.

    copies: called only then. say: receives a message about the damage. Raises as ``read`` if no
    copy is intact.
    """
    try:
        return read(medium, pointer, kind)
    except (CorruptionError, MediumError) as error:
        for copy in copies():
            if copy.pointer.digest == pointer.digest:
                try:
                    payload = read(medium, copy.pointer, kind)
                except (CorruptionError, MediumError):
                    continue
                say(f"{error}; read from its copy at byte {copy.pointer.offset}")
                return payload
        raise


def read_whole(medium: ReadableMedium, pointer: Pointer, kind: RecordKind) -> memoryview:
    """Return a record, header and payload, checked. Raises as ``read``."""
    where = f"{kind.name.lower().replace('_', ' ')} record at byte {pointer.offset}"
    # Checked before memory is taken for it.
    if not HEADER.size <= pointer.length <= RECORD_SIZE_MAX:
        raise CorruptionError(f"{where}: length {pointer.length} is out of range")
    if pointer.offset + pointer.length > medium.size:
        raise CorruptionError(
            f"{where}: ends at byte {pointer.offset + pointer.length}, but the pool "
            f"{medium.info.name} has {medium.size}; was it truncated?"
        )
    data = memoryview(bytearray(pointer.length))
    medium.load(pointer.offset, data)
    header = HEADER.unpack(data)
    found = _digest(data)
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
    return data.toreadonly()


def _digest(record: memoryview) -> bytes:
    hasher = xxhash.xxh3_128(record[: HEADER.size - 16])
    hasher.update(record[HEADER.size :])
    return hasher.digest()


def encode_table(entries: Sequence[tuple[str, Pointer]]) -> bytes:
    """Return the payload of a model table: a count, the entries sorted by name, the names."""
    names, rows, offset = [], [], 0
    for name, pointer in sorted(entries):
        raw = name.encode("utf-8")
        rows.append(TABLE_ENTRY.pack(**_fields(pointer), name_offset=offset, name_length=len(raw)))
        names.append(raw)
        offset += len(raw)
    return len(rows).to_bytes(8, "little") + b"".join(rows) + b"".join(names)


def decode_table(payload: memoryview) -> list[tuple[str, Pointer]]:
    """Return the models and their indices. Raise ``CorruptionError`` if the table is damaged."""
    count = int.from_bytes(payload[:8], "little")
    _fits("model table", count, TABLE_ENTRY.size, len(payload) - 8)
    names = payload[8 + count * TABLE_ENTRY.size :]
    found = []
    for index in range(count):
        row = TABLE_ENTRY.unpack(payload, 8 + index * TABLE_ENTRY.size)
        start, length = _int(row, "name_offset"), _int(row, "name_length")
        found.append((_name(names, start, length), pointer_of(row)))
    return found


def encode_index(model: str, entries: Sequence[VersionEntry]) -> bytes:
    """Return the payload of a model index: name length, count, the name padded to 8, the entries,
    and their metrics."""
    rows = [
        INDEX_ENTRY.pack(
            **_info_fields(entry.info),
            flags=INEXACT if entry.info.inexact else 0,
            **_fields(entry.pointer),
        )
        for entry in entries
    ]
    raw = model.encode("utf-8")
    return (
        len(raw).to_bytes(8, "little")
        + len(rows).to_bytes(8, "little")
        + raw
        + bytes(-len(raw) % 8)
        + b"".join(rows)
        + encode_metrics(entries)
    )


def encode_metrics(entries: Sequence[VersionEntry]) -> bytes:
    """Return the bytes after the entries of a model index: none if no version has metrics."""
    said = {str(each.info.id): dict(each.info.metrics) for each in entries if each.info.metrics}
    return _metrics_encoder.encode(said) if said else b""


def metrics_size(metrics: Mapping[str, float]) -> int:
    """Return an upper bound of the bytes that one version adds to ``encode_metrics``."""
    longest = str(VERSION_ID_MAX)
    return len(_metrics_encoder.encode({longest: dict(metrics)})) if metrics else 0


def decode_index(payload: memoryview) -> list[VersionEntry]:
    """Return the versions of one model, oldest commit first. Raise ``CorruptionError``."""
    length = int.from_bytes(payload[:8], "little")
    count = int.from_bytes(payload[8:16], "little")
    model = _name(payload[16:], 0, length)
    start = 16 + length + -length % 8
    _fits("model index", count, INDEX_ENTRY.size, len(payload) - start)
    metrics = _decode_metrics(payload[start + count * INDEX_ENTRY.size :])
    entries = []
    for index in range(count):
        row = INDEX_ENTRY.unpack(payload, start + index * INDEX_ENTRY.size)
        info = _info(model, row, inexact=bool(_int(row, "flags") & INEXACT))
        if metrics:
            info = replace(info, metrics=metrics.get(str(info.id), {}))
        entries.append(VersionEntry(info, pointer_of(row)))
    return entries


def _decode_metrics(data: memoryview) -> dict[str, dict[str, float]]:
    if not len(data):
        return {}
    try:
        return _metrics_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptionError(f"model index: metrics: {error}") from error


def encode_version(record: VersionRecord) -> bytes:
    """Return the payload of a version: head, storages, extents, units, model's name, log."""
    raw = record.info.model.encode("utf-8")
    head = VERSION_HEAD.pack(
        **_info_fields(record.info),
        **_fields(record.contents, "contents_"),
        storages=len(record.storages),
        extents=len(record.extents),
        units=len(record.units),
        name_length=len(raw),
    )
    arrays = (record.storages.tobytes(), record.extents.tobytes(), record.units.tobytes())
    log = b"" if record.log is None else bytes(-len(raw) % 8) + _encode_log(record.log)
    return b"".join((head, *arrays, raw, log))


def decode_version(payload: memoryview) -> VersionRecord:
    """Return the record of a version. Raise ``CorruptionError`` if its parts do not fit."""
    head = VERSION_HEAD.unpack(payload)
    counts = [_int(head, name) for name in ("storages", "extents", "units")]
    offset, arrays = VERSION_HEAD.size, []
    for table, count in zip((STORAGE, EXTENT, UNIT_DIGEST), counts, strict=True):
        _fits(table.name, count, table.size, len(payload) - offset)
        arrays.append(table.array(payload, offset, count))
        offset += count * table.size
    length = _int(head, "name_length")
    model = _name(payload[offset:], 0, length)
    storages, extents, units = arrays
    record = VersionRecord(
        _info(model, head),
        pointer_of(head, "contents_"),
        storages,
        extents,
        units,
        _decode_log(payload, offset + length + -length % 8),
    )
    _check_arrays(record)
    _check_placed(record)
    return record


def _encode_log(log: VersionLog) -> bytes:
    row = LOG.pack(
        offset=log.extent.offset,
        length=log.extent.length,
        name=log.name,
        born=log.born,
        entries=log.entries,
        in_place=len(log.in_place),
    )
    placed = [
        PLACED.pack(storage=each.storage, cell=each.cell, digests=each.digests)
        for each in log.in_place
    ]
    return b"".join((row, *placed))


def _decode_log(payload: memoryview, offset: int) -> VersionLog | None:
    if len(payload) - offset < LOG.size:
        return None
    row = LOG.unpack(payload, offset)
    count, rest = _int(row, "in_place"), len(payload) - offset - LOG.size
    if count * PLACED.size != rest:
        raise CorruptionError(f"a log says {count} in-place rows, and has {rest} bytes of them")
    extent = Extent(_int(row, "offset"), _int(row, "length"))
    if extent.offset % PAGE or extent.length % PAGE or extent.end > _SUM_MAX:
        raise CorruptionError(f"a log is not in whole pages: {extent}")
    rows = [PLACED.unpack(payload, offset + LOG.size + i * PLACED.size) for i in range(count)]
    placed = tuple(
        InPlaceStorage(_int(each, "storage"), _int(each, "cell"), _int(each, "digests"))
        for each in rows
    )
    return VersionLog(extent, _bytes(row, "name"), _int(row, "born"), _int(row, "entries"), placed)


def encode_copies(copies: Sequence[Copy]) -> bytes:
    """Return the payload of a copies record: a count, the entries."""
    rows = [
        COPY.pack(**_fields(copy.pointer), commit=copy.commit, kind=int(copy.kind))
        for copy in copies
    ]
    return len(rows).to_bytes(8, "little") + b"".join(rows)


def decode_copies(payload: memoryview) -> tuple[Copy, ...]:
    """Return the copies in a payload. Raise ``CorruptionError`` if it is damaged."""
    count = int.from_bytes(payload[:8], "little")
    _fits("copies record", count, COPY.size, len(payload) - 8)
    rows = [COPY.unpack(payload, 8 + index * COPY.size) for index in range(count)]
    try:
        return tuple(
            Copy(pointer_of(row), _int(row, "commit"), RecordKind(_int(row, "kind")))
            for row in rows
        )
    except ValueError as error:
        raise CorruptionError(f"copies record: {error}") from error


_metrics_encoder = msgspec.json.Encoder()
_metrics_decoder = msgspec.json.Decoder(dict[str, dict[str, float]])


def _check_arrays(record: VersionRecord) -> None:
    storages, extents, units = record.storages, record.extents, record.units
    # Before anything is added up: sums of wild numbers wrap around, and then they may look right.
    for column in (storages["length"], extents["length"], storages["extents"]):
        if float(column.sum(dtype=np.float64)) > _SUM_MAX:
            raise CorruptionError(f"version {record.info.id}: lengths are out of range")
    counts = storages["extents"].astype(np.int64)
    per_storage = np.zeros(len(storages), np.uint64)
    ends = np.cumsum(counts)
    if not np.array_equal(storages["first_extent"].astype(np.int64), ends - counts) or (
        int(ends[-1]) if len(ends) else 0
    ) != len(extents):
        raise CorruptionError(f"version {record.info.id}: extent entries do not follow each other")
    owner = np.repeat(np.arange(len(storages)), counts)
    np.add.at(per_storage, owner, extents["length"])
    if not np.array_equal(per_storage, storages["length"]):
        raise CorruptionError(f"version {record.info.id}: extents do not add up to the storages")
    # An empty storage has one unit too.
    needed = np.maximum(1, -(-storages["length"].astype(np.int64) // (16 << 20)))
    after = np.cumsum(needed)
    if not np.array_equal(storages["first_unit"].astype(np.int64), after - needed) or (
        int(after[-1]) if len(after) else 0
    ) != len(units):
        raise CorruptionError(f"version {record.info.id}: unit digests do not follow each other")


def _fields(pointer: Pointer, prefix: str = "") -> dict[str, Value]:
    return {
        prefix + "offset": pointer.offset,
        prefix + "length": pointer.length,
        prefix + "digest": pointer.digest,
    }


def pointer_of(row: dict[str, Value], prefix: str = "") -> Pointer:
    """Return the pointer from its three fields in a row of a table."""
    return Pointer(
        _int(row, prefix + "offset"), _int(row, prefix + "length"), _bytes(row, prefix + "digest")
    )


def _info_fields(info: VersionInfo) -> dict[str, Value]:
    return {
        "id": info.id,
        "commit": info.commit,
        "step": info.step,
        "time_ns": info.time_ns,
        "token": info.token,
        "size": info.size,
    }


def _info(model: str, row: dict[str, Value], *, inexact: bool = False) -> VersionInfo:
    return VersionInfo(
        model=model,
        id=_int(row, "id"),
        commit=_int(row, "commit"),
        step=_int(row, "step"),
        token=_bytes(row, "token"),
        time_ns=_int(row, "time_ns"),
        size=_int(row, "size"),
        inexact=inexact,
    )


def _int(row: dict[str, Value], name: str) -> int:
    return cast(int, row[name])


def _bytes(row: dict[str, Value], name: str) -> bytes:
    return cast(bytes, row[name])


def _name(names: memoryview, start: int, length: int) -> str:
    if length > NAME_SIZE_MAX or start + length > len(names):
        raise CorruptionError(f"a model's name of {length} bytes at {start} is out of range")
    try:
        return str(names[start : start + length], "utf-8")
    except UnicodeDecodeError as error:
        raise CorruptionError(f"a model's name is not UTF-8: {error}") from error


def _fits(what: str, count: int, size: int, room: int) -> None:
    if count * size > room:
        raise CorruptionError(f"{what}: {count} entries do not fit in {room} bytes")


def _check_placed(record: VersionRecord) -> None:
    """Raise ``CorruptionError`` unless each storage that is changed in place is one extent, of
    whole cells, with a digest for each unit."""
    lengths, log = record.storages["length"].astype(np.int64), record.log
    kinds: dict[int, str] = {}
    for each in () if log is None else log.in_place:
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
