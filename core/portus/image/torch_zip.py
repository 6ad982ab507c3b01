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

from portus.errors import UsageError
from portus.image.digests import packed, record_length
from portus.image.image import Column, Crcs, Digests, Image, Literal

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
    layout = _Zip(archive, torch_format.alignment)
    start = [layout.record(PICKLE, pickle)]
    start += [layout.record(name, data) for name, data in torch_format.records]
    literals = [Literal(0, b"".join(start))]
    first = len(layout.entries)
    order = torch_format.order(len(lengths))
    sizes: list[int] = lengths.tolist()
    offset = np.zeros(len(sizes), np.int64)
    for index in order:
        literals.append(Literal(layout.end, layout.header(f"{STORAGES}{index}", sizes[index])))
        offset[index] = layout.end
        layout.skip()
    # The bytes from here on depend on what is stored; their places do not.
    length = record_length(lengths)
    noted_at = layout.end
    noted = layout.record(NOTE, note) if note else b""
    literals.append(Literal(noted_at, noted + layout.header(DIGESTS, length)))
    payload_at = layout.end
    layout.skip()
    entries, behind = tuple(layout.entries), layout.end
    layout.record(VERSION, torch_format.version)
    layout.record(SERIALIZATION_ID, bytes(_ID_LENGTH))
    size = layout.end + len(layout.directory())

    def tail(digests: Digests, crcs: Crcs) -> Sequence[Literal]:
        if len(crcs) != len(sizes):
            raise UsageError(f"CRCs of an image: expected {len(sizes)}, found {len(crcs)}")
        found: list[int] = crcs.tolist()
        last = first + len(sizes)
        stored = [
            entry._replace(crc=found[index])
            for entry, index in zip(entries[first:last], order, strict=True)
        ]
        known = [*entries[:first], *stored, *entries[last:-1]]
        ends = _Zip(archive, torch_format.alignment, behind, known)
        record_at = ends.length_of_entries()
        ends.entries.append(entries[-1])
        block = bytearray(entries[-1].descriptor())
        block += ends.record(VERSION, torch_format.version)
        block += ends.record(SERIALIZATION_ID, _serialization_id(pickle, digests))
        record_at += len(block)
        block += ends.directory()
        of_payload = (DESCRIPTOR_CRC, record_at + CENTRAL_CRC)

        rest = xxhash.xxh3_128(literals[0].data)
        footers = []
        for literal, entry in zip(literals[1:-1], stored, strict=True):
            rest.update(literal.data)
            if entry.size:
                footer = Literal(literal.end + entry.size, entry.descriptor())
                rest.update(footer.data)
                footers.append(footer)
        rest.update(literals[-1].data)
        begin = 0
        for place in of_payload:
            rest.update(block[begin:place])
            begin = place + 4
        rest.update(block[begin:])

        payload = packed(size, lengths, digests, rest.digest())
        crc = zlib.crc32(payload)
        for place in of_payload:
            _CRC.pack_into(block, place, crc)
        return [*footers, Literal(payload_at, payload + block)]

    return Image(size=size, literals=literals, offset=offset, length=lengths, tail=tail)


def _serialization_id(pickle: bytes, digests: Digests) -> bytes:
    """Forty decimal digits, like torch's id, that say what the file contains."""
    content = xxhash.xxh3_128(pickle)
    content.update(digests.tobytes())
    return b"%040d" % int.from_bytes(content.digest(), "big")


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
        """Those of the zip."""
        return _WITH_DESCRIPTOR if self.size else _UTF8

    def header(self, alignment: int) -> bytes:
        """What precedes the data, padded so that the data is aligned."""
        wide = self.zip64(0)
        begin = self.header_at + LOCAL.size + len(self.name) + len(wide) + _EXTRA.size
        padding = -begin % alignment
        extra = len(wide) + _EXTRA.size + padding
        fixed = LOCAL.pack(LOCAL_MAGIC, 0, self.flags, 0, 0, 0, 0, 0, 0, len(self.name), extra)
        return fixed + self.name + wide + _EXTRA.pack(_PADDING, padding) + b"Z" * padding

    def descriptor(self) -> bytes:
        """What follows the data, if there is any."""
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


class _Zip:
    """A zip file that grows at its end: all entries so far, and where the next byte goes."""

    def __init__(
        self, archive: str, alignment: int, end: int = 0, entries: Iterable[_Entry] = ()
    ) -> None:
        self._archive = archive
        self._alignment = alignment
        self.end = end
        self.entries = list(entries)

    def header(self, name: str, size: int, crc: int = 0) -> bytes:
        """The header of the next record; its data goes to ``end``."""
        entry = _Entry(f"{self._archive}/{name}".encode(), size, crc, self.end)
        self.entries.append(entry)
        header = entry.header(self._alignment)
        self.end += len(header)
        return header

    def skip(self) -> bytes:
        """The descriptor of the last record; the next record comes behind it."""
        entry = self.entries[-1]
        footer = entry.descriptor() if entry.size else b""
        self.end += entry.size + len(footer)
        return footer

    def record(self, name: str, data: bytes) -> bytes:
        """All bytes of the next record."""
        return self.header(name, len(data), zlib.crc32(data)) + data + self.skip()

    def length_of_entries(self) -> int:
        """Bytes of the directory for the entries so far."""
        return sum(CENTRAL.size + len(entry.name) + len(entry.zip64(0)) for entry in self.entries)

    def directory(self) -> bytes:
        """The central directory, and the ends of a zip64 and of a zip file."""
        entries = b"".join([entry.central() for entry in self.entries])
        count, size, at = len(self.entries), len(entries), self.end
        end64 = END64.pack(END64_MAGIC, 44, 0x031E, 45, 0, 0, count, count, size, at)
        locator = LOCATOR.pack(LOCATOR_MAGIC, 0, at + size, 1)
        few = min(count, LIMIT16)
        end = END.pack(END_MAGIC, 0, 0, few, few, min(size, LIMIT32), min(at, LIMIT32), 0)
        return entries + end64 + locator + end
