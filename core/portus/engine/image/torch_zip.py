"""The zip file of ``torch.save``, laid out: equal to torch's byte for byte to the last storage.

The records: the pickle, some small ones of torch, one for each storage, then one of ours with the
digests, torch's version of the format and its id. What differs between versions of torch is a
``TorchFormat``, which the client finds out from the torch that runs.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import xxhash

from portus.engine.image.digests import pack, record_length
from portus.engine.image.image import Column, Crcs, Digests, Image, Literal
from portus.errors import UsageError

PICKLE: Final = "data.pkl"
STORAGES: Final = "data/"
DIGESTS: Final = ".portus/digests"
NOTE: Final = ".portus/note"
"""What whoever saved it noted: for a ``Checkpointer``, the time and the metrics."""
VERSION: Final = "version"
SERIALIZATION_ID: Final = ".data/serialization_id"

LIMIT32: Final = 0xFFFFFFFF
"""Sizes and offsets from here on are in a zip64 field."""
LIMIT16: Final = 0xFFFF

LOCAL: Final = struct.Struct("<IHHHHHIIIHH")
LOCAL_MAGIC: Final = 0x04034B50
ZIP: Final = LOCAL_MAGIC.to_bytes(4, "little")
"""How a zip file begins."""
CENTRAL: Final = struct.Struct("<IHHHHHHIIIHHHHHII")
CENTRAL_MAGIC: Final = 0x02014B50
CENTRAL_CRC: Final = 16
"""Where the CRC32 is in an entry of the central directory."""
END64: Final = struct.Struct("<IQHHIIQQQQ")
END64_MAGIC: Final = 0x06064B50
LOCATOR: Final = struct.Struct("<IIQI")
LOCATOR_MAGIC: Final = 0x07064B50
END: Final = struct.Struct("<IHHHHIIH")
END_MAGIC: Final = 0x06054B50
DESCRIPTOR: Final = struct.Struct("<IIII")
DESCRIPTOR64: Final = struct.Struct("<IIQQ")
DESCRIPTOR_MAGIC: Final = 0x08074B50
DESCRIPTOR_CRC: Final = 4
"""Where the CRC32 is in a data descriptor."""
ZIP64: Final = 1
"""The id of the extra field with 64-bit sizes and offsets."""
_EXTRA: Final = struct.Struct("<HH")
_U64: Final = struct.Struct("<Q")
_U64X2: Final = struct.Struct("<QQ")
_CRC: Final = struct.Struct("<I")
_ID_LENGTH: Final = 40
_PADDING: Final = 0x4246
_UTF8: Final = 0x0800
_WITH_DESCRIPTOR: Final = 0x0808


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFormat:
    """What differs between versions and configurations of torch.

    ``records``: between the pickle and the storages. ``sorted_as_text``: storages are in the file
    in the order of their keys as text ("0", "1", "10", "2"), as torch 2.6 writes them.
    ``version``: the bytes of the record of that name.
    """

    records: tuple[tuple[str, bytes], ...]
    sorted_as_text: bool
    alignment: int
    version: bytes

    def __post_init__(self) -> None:
        if not 1 <= self.alignment <= LIMIT16 + 1:
            raise UsageError(
                f"storage_alignment of torch: expected 1 to {LIMIT16 + 1} bytes, found "
                f"{self.alignment}"
            )

    def order(self, count: int) -> Sequence[int]:
        """The storages in the order of the file."""
        return sorted(range(count), key=str) if self.sorted_as_text else range(count)


def archive_name(path: str) -> str:
    """The name of the archive inside the file that torch writes to ``path``: its stem, and
    ``"archive"`` where torch does without the name (not ASCII) or refuses it (no stem)."""
    if not path.isascii():
        return "archive"
    name = path.replace("\\", "/").rpartition("/")[2]
    stem, dot, _ = name.rpartition(".")
    return (stem if dot else name) or "archive"


def torch_image(
    *, archive: str, pickle: bytes, lengths: Column, torch_format: TorchFormat, note: bytes = b""
) -> Image:
    """The image of a file of ``torch.save``: ``pickle`` and storages of ``lengths`` bytes.

    Storage i has the key "i" in the pickle. note: the bytes of a record behind the
    storages, if any.
    """
    count = len(lengths)
    order = np.array(torch_format.order(count), np.int64)
    start = [(PICKLE, pickle), *torch_format.records]
    noted = [(NOTE, note)] if note else []
    end = [(VERSION, torch_format.version), (SERIALIZATION_ID, bytes(_ID_LENGTH))]
    records = _Records(
        archive,
        torch_format.alignment,
        names=np.concatenate(
            [
                _lengths_of_names(start),
                len(STORAGES) + _digits(order),
                _lengths_of_names([*noted, (DIGESTS, b""), *end]),
            ]
        ),
        sizes=np.concatenate(
            [
                [len(data) for _, data in start],
                lengths[order],
                [len(note)] * len(noted),
                [record_length(lengths)],
                [len(data) for _, data in end],
            ]
        ).astype(np.int64),
    )
    first = len(start)
    offset = np.empty(count, np.int64)
    offset[order] = records.data_at[first : first + count]

    def literals(digests: Digests, crcs: Crcs) -> Sequence[Literal]:
        if len(crcs) != count:
            raise UsageError(f"CRCs of an image: expected {count}, found {len(crcs)}")
        written = _ZipWriter(records)
        for name, data in start:
            written.record(name, data)
        for index, crc in zip(order.tolist(), crcs[order].tolist(), strict=True):
            written.storage(f"{STORAGES}{index}", crc)
        for name, data in noted:
            written.record(name, data)
        # After the storages: so far the file is torch's, byte for byte (decision 0201).
        written.digests(DIGESTS)
        written.record(VERSION, torch_format.version)
        # Made from the contents, so equal states make equal files.
        written.record(SERIALIZATION_ID, _serialization_id(pickle, digests))
        return written.end(lengths, digests)

    return Image(size=records.end, offset=offset, length=lengths, literals=literals)


def _serialization_id(pickle: bytes, digests: Digests) -> bytes:
    """Forty decimal digits, like torch's id, that say what the file contains."""
    content = xxhash.xxh3_128(pickle)
    content.update(digests.tobytes())
    return b"%040d" % int.from_bytes(content.digest(), "big")


def _lengths_of_names(records: Iterable[tuple[str, bytes]]) -> Column:
    return np.array([len(name) for name, _ in records], np.int64)


def _digits(numbers: Column) -> Column:
    """How many decimal digits each has."""
    tens = 10 ** np.arange(1, 19)
    digits: Column = np.searchsorted(tens, numbers, "right") + 1
    return digits


class _Records:
    """Where the records of a zip file are: all at once, so that a call does not go through them.

    names: the length of each, in bytes, without the archive's.
    """

    def __init__(self, archive: str, alignment: int, names: Column, sizes: Column) -> None:
        self.archive: Final = archive
        self.alignment: Final = alignment
        self.sizes: Final = sizes
        names = names + len(archive) + 1
        large = sizes >= LIMIT32
        far = np.zeros(len(sizes), np.bool_)
        while True:  # what is beyond 4 GiB has longer headers, which push others beyond
            fields = 16 * large + 8 * far
            before = LOCAL.size + names + np.where(fields, _EXTRA.size + fields, 0) + _EXTRA.size
            behind = np.where(large | far, DESCRIPTOR64.size, DESCRIPTOR.size) * (sizes > 0)
            # Data begins at multiples of the alignment, so each step from one to the next is one.
            steps = np.concatenate([before[:1], (sizes + behind)[:-1] + before[1:]])
            self.data_at: Column = np.cumsum(-(-steps // alignment) * alignment)
            ends = self.data_at + sizes + behind
            self.header_at: Column = np.concatenate([[0], ends[:-1]])
            now = self.header_at >= LIMIT32
            if np.array_equal(now, far):
                break
            far = now
        self.directory_at: Final = int(ends[-1])
        entries = CENTRAL.size + names + np.where(fields, _EXTRA.size + fields, 0)
        self.directory_size: Final = int(entries.sum())
        self.end: Final = (
            self.directory_at + self.directory_size + END64.size + LOCATOR.size + END.size
        )


class _Entry(NamedTuple):
    """A record as the central directory notes it."""

    name: bytes
    size: int
    crc: int
    header_at: int

    def zip64(self, stored: int) -> bytes:
        """The extra field for what does not fit in 32 bits; ``stored`` is the compressed size,
        which torch leaves at zero in the header of a record."""
        wide = b""
        if self.size >= LIMIT32:
            wide += _U64X2.pack(self.size, stored)
        if self.header_at >= LIMIT32:
            wide += _U64.pack(self.header_at)
        return _EXTRA.pack(ZIP64, len(wide)) + wide if wide else b""

    @property
    def flags(self) -> int:
        """The flags of this entry in the zip."""
        # With a descriptor after an empty record, ``unzip`` reports a zip bomb.
        return _WITH_DESCRIPTOR if self.size else _UTF8

    def header(self, data_at: int) -> bytes:
        """What precedes the data, padded up to where that begins."""
        wide = self.zip64(0)
        begin = self.header_at + LOCAL.size + len(self.name) + len(wide) + _EXTRA.size
        padding = data_at - begin
        extra = len(wide) + _EXTRA.size + padding
        fixed = LOCAL.pack(LOCAL_MAGIC, 0, self.flags, 0, 0, 0, 0, 0, 0, len(self.name), extra)
        return fixed + self.name + wide + _EXTRA.pack(_PADDING, padding) + b"Z" * padding

    def descriptor(self) -> bytes:
        """What follows the data, if there is any."""
        if not self.size:
            return b""
        wide = self.size >= LIMIT32 or self.header_at >= LIMIT32
        form = DESCRIPTOR64 if wide else DESCRIPTOR
        return form.pack(DESCRIPTOR_MAGIC, self.crc, self.size, self.size)

    def central(self) -> bytes:
        """The entry in the directory."""
        wide = self.zip64(self.size)
        size, header_at = min(self.size, LIMIT32), min(self.header_at, LIMIT32)
        fixed = CENTRAL.pack(
            *(CENTRAL_MAGIC, 0, 0, self.flags, 0, 0, 0, self.crc, size, size),
            *(len(self.name), len(wide), 0, 0, 0, 0, header_at),
        )
        return fixed + self.name + wide


class _ZipWriter:
    """The bytes of a zip file around the data of its storages, one record after another."""

    def __init__(self, records: _Records) -> None:
        self._records: Final = records
        self._prefix: Final = f"{records.archive}/"
        places = (records.sizes, records.header_at, records.data_at)
        self._places: Final = zip(*(each.tolist() for each in places), strict=True)
        self._directory = bytearray()
        self._literals: Final[list[Literal]] = []
        self._begin = 0
        self._bytes = bytearray()
        """What comes next, from ``_begin`` on."""
        self._crcs_at: Final[list[int]] = []
        """Where the CRC of the digests goes, in the last literal and in the directory."""

    def record(self, name: str, data: bytes) -> None:
        """A record of which all bytes are known."""
        entry = self._begin_record(name, zlib.crc32(data))
        self._bytes += data + entry.descriptor()

    def storage(self, name: str, crc: int) -> None:
        """A record whose data somebody else writes."""
        self._skip_data(self._begin_record(name, crc))

    def digests(self, name: str) -> None:
        """The record of the digests, which is filled at the end."""
        central_at = len(self._directory)
        entry = self._begin_record(name, 0)
        self._skip_data(entry)
        self._crcs_at[:] = DESCRIPTOR_CRC, central_at + CENTRAL_CRC

    def end(self, lengths: Column, units: Digests) -> list[Literal]:
        """Return all literals. lengths: of the storages. units: the digests of their units."""
        records, count = self._records, len(self._records.sizes)
        at, size = records.directory_at, records.directory_size
        block, crcs_at = self._bytes, (self._crcs_at[0], len(self._bytes) + self._crcs_at[1])
        block += self._directory
        block += END64.pack(END64_MAGIC, 44, 0x031E, 45, 0, 0, count, count, size, at)
        block += LOCATOR.pack(LOCATOR_MAGIC, 0, at + size, 1)
        few = min(count, LIMIT16)  # 0xFFFF says that the number is in the zip64 record
        block += END.pack(END_MAGIC, 0, 0, few, few, min(size, LIMIT32), min(at, LIMIT32), 0)
        rest = xxhash.xxh3_128()
        for literal in self._literals:
            rest.update(literal.data)
        begin = 0
        for place in crcs_at:
            rest.update(block[begin:place])
            begin = place + _CRC.size
        rest.update(block[begin:])
        digests = pack(records.end, lengths, units, rest.digest())
        for place in crcs_at:
            _CRC.pack_into(block, place, zlib.crc32(digests))
        return [*self._literals, Literal(self._begin - len(digests), digests + bytes(block))]

    def _begin_record(self, name: str, crc: int) -> _Entry:
        """The header of the next record is among the bytes."""
        size, header_at, data_at = next(self._places)
        entry = _Entry((self._prefix + name).encode(), size, crc, header_at)
        self._bytes += entry.header(data_at)
        self._directory += entry.central()
        return entry

    def _skip_data(self, entry: _Entry) -> None:
        """The data of a record is not among the bytes; its descriptor is."""
        if not entry.size:
            return
        self._literals.append(Literal(self._begin, bytes(self._bytes)))
        self._begin += len(self._bytes) + entry.size
        self._bytes = bytearray(entry.descriptor())
