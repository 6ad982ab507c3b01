"""The zip file of ``torch.save``, laid out: equal to torch's byte for byte up to the last storage.

The records: the pickle, some small ones of torch, one for each storage, then one of ours with the
digests, torch's version of the format and its id. The differences between versions of torch are in
a ``TorchFormat``, which the client derives from the torch that runs.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.ma  # not on a thread, as np.unique does: a fork in the midst breaks a child
import xxhash
from numpy.typing import NDArray

from portus.engine.image.digests import pack, record_length
from portus.engine.image.image import Column, Crcs, Digests, Image, Literal
from portus.errors import UsageError

PICKLE: Final = "data.pkl"
STORAGES: Final = "data/"
DIGESTS: Final = ".portus/digests"
NOTE: Final = ".portus/note"
"""The record of a note by the saver: for a ``Checkpointer``, the time and the metrics."""
VERSION: Final = "version"
SERIALIZATION_ID: Final = ".data/serialization_id"

LIMIT32: Final = 0xFFFFFFFF
"""Sizes and offsets from here on are in a zip64 field."""
LIMIT16: Final = 0xFFFF

LOCAL: Final = struct.Struct("<IHHHHHIIIHH")
LOCAL_MAGIC: Final = 0x04034B50
ZIP: Final = LOCAL_MAGIC.to_bytes(4, "little")
"""The first bytes of a zip file."""
CENTRAL: Final = struct.Struct("<IHHHHHHIIIHHHHHII")
CENTRAL_MAGIC: Final = 0x02014B50
CENTRAL_CRC: Final = 16
"""The offset of the CRC32 in an entry of the central directory."""
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
"""The offset of the CRC32 in a data descriptor."""
ZIP64: Final = 1
"""The id of the extra field with 64-bit sizes and offsets."""
_EXTRA: Final = struct.Struct("<HH")
_CRC: Final = struct.Struct("<I")
_ID_LENGTH: Final = 40
_PADDING: Final = 0x4246
UTF8: Final = 0x0800
"""The flag of a name in UTF-8."""
_WITH_DESCRIPTOR: Final = 0x0808


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFormat:
    """The differences between versions and configurations of torch.

    ``records``: between the pickle and the storages. ``sorted_as_text``: storages are in the file
    in the order of their keys as text ("0", "1", "10", "2"), as torch 2.6 writes them. ``version``:
    the bytes of the record of that name.
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
        """Return the storages in the order of the file."""
        return sorted(range(count), key=str) if self.sorted_as_text else range(count)


def archive_name(path: str) -> str:
    """Return the name of the archive inside the file that torch writes to ``path``: its stem, and
    ``"archive"`` where torch does without the name (not ASCII) or refuses it (no stem)."""
    if not path.isascii():
        return "archive"
    name = path.replace("\\", "/").rpartition("/")[2]
    stem, dot, _ = name.rpartition(".")
    return (stem if dot else name) or "archive"


def torch_image(
    *, archive: str, pickle: bytes, lengths: Column, torch_format: TorchFormat, note: bytes = b""
) -> Image:
    """Return the image of a file of ``torch.save``: ``pickle`` and storages of ``lengths`` bytes.

    Storage i has the key "i" in the pickle. note: the bytes of a record after the storages, if any.
    """
    count = len(lengths)
    order = np.array(torch_format.order(count), np.int64)
    start = [(PICKLE, pickle), *torch_format.records]
    end = [(NOTE, note)] if note else []
    # After the storages: so far the file is torch's, byte for byte (decision 0201).
    end += [(DIGESTS, bytes(record_length(lengths))), (VERSION, torch_format.version)]
    end.append((SERIALIZATION_ID, bytes(_ID_LENGTH)))
    stored = np.stack([len(STORAGES) + _digits(order), lengths[order]], 1)
    first, behind = len(start), len(start) + count
    names, sizes = np.concatenate([_lengths(start), stored, _lengths(end)]).T
    records = _Records(archive, torch_format.alignment, names, sizes, slice(first, behind))
    offset = np.empty(count, np.int64)
    offset[order] = records.data_at[first:behind]

    def literals(digests: Digests, crcs: Crcs) -> Sequence[Literal]:
        if len(crcs) != count:
            raise UsageError(f"CRCs of an image: expected {count}, found {len(crcs)}")
        # Made from the contents, so equal states make equal files.
        known = [*start, *end[:-1], (SERIALIZATION_ID, _serialization_id(pickle, digests))]
        named = [name for name, _ in known]
        summed = [zlib.crc32(data) for _, data in known]
        named[first:first] = [f"{STORAGES}{index}" for index in order.tolist()]
        summed[first:first] = crcs[order].tolist()
        written = _ZipBytes(records, [f"{archive}/{name}" for name in named], np.array(summed))
        numbers = [*range(first), *range(behind, len(named))]
        for number, (_, data) in zip(numbers, known, strict=True):
            written.fill(number, data)
        written.add_digests(named.index(DIGESTS), lengths, digests)
        return written.literals()

    return Image(size=records.end, offset=offset, length=lengths, literals=literals)


def _serialization_id(pickle: bytes, digests: Digests) -> bytes:
    """Return forty decimal digits, like torch's id, that depend on the contents of the file."""
    content = xxhash.xxh3_128(pickle)
    content.update(digests.tobytes())
    return b"%040d" % int.from_bytes(content.digest(), "big")


def _lengths(records: Iterable[tuple[str, bytes]]) -> Column:
    """Return the bytes of the name and of the data of each record."""
    return np.array([(len(name), len(data)) for name, data in records], np.int64)


def _digits(numbers: Column) -> Column:
    """Return the number of decimal digits of each number."""
    tens = 10 ** np.arange(1, 19)
    digits: Column = np.searchsorted(tens, numbers, "right") + 1
    return digits


class _Records:
    """The places of the records of a zip file, as columns, so that a call needs no loop over them.

    names: the length of each, in bytes, without the archive's. stored: those whose data is written
    by other code.
    """

    def __init__(
        self, archive: str, alignment: int, names: Column, sizes: Column, stored: slice
    ) -> None:
        self.sizes: Final = sizes
        self.stored: Final = stored
        self.names: Final = names + len(archive) + 1
        self.large: Final = sizes >= LIMIT32
        self.far = np.zeros(len(sizes), np.bool_)
        while True:  # records beyond 4 GiB have longer headers, which push others beyond
            fields = 16 * self.large + 8 * self.far
            wide = self.names + np.where(fields, _EXTRA.size + fields, 0)
            before = LOCAL.size + wide + _EXTRA.size
            long = np.where(self.large | self.far, DESCRIPTOR64.size, DESCRIPTOR.size)
            behind = long * (sizes > 0)
            # Data begins at multiples of the alignment, so each step from one to the next is one.
            steps = np.concatenate([before[:1], (sizes + behind)[:-1] + before[1:]])
            self.data_at: Column = np.cumsum(-(-steps // alignment) * alignment)
            ends = self.data_at + sizes + behind
            self.header_at: Column = np.concatenate([[0], ends[:-1]])
            now = self.header_at >= LIMIT32
            if np.array_equal(now, self.far):
                break
            self.far = now
        directory = np.cumsum(CENTRAL.size + wide)
        self.directory_at: Final = int(ends[-1])
        self.directory_size: Final = int(directory[-1])
        self.central_at: Final = self.directory_at + np.append(0, directory[:-1])
        """The offset of each record's entry in the directory."""
        end = self.directory_at + self.directory_size
        self.end: Final = end + END64.size + LOCATOR.size + END.size


class _ZipBytes:
    """The bytes of a zip file around the data of its storages.

    crcs: of the data of each record.
    """

    def __init__(self, records: _Records, names: Sequence[str], crcs: Column) -> None:
        self._records: Final = records
        stored = np.zeros_like(records.sizes)
        stored[records.stored] = records.sizes[records.stored]
        self._after: Final = np.cumsum(stored)
        """Bytes of storages up to the end of each record: in the file, and not among these."""
        self._before: Final = self._after - stored
        self._all: Final = int(self._after[-1])
        # Bytes that nothing overwrites are padding before data.
        self._bytes: Final = bytearray(b"Z") * (records.end - self._all)
        self._written: Final = np.frombuffer(self._bytes, np.uint8)
        named = np.array([name.encode() for name in names], np.object_)
        filled = records.sizes > 0
        kinds = records.names << 3 | records.large << 2 | records.far << 1 | filled
        for kind in np.unique(kinds):  # records of a kind have headers of one length
            alike = np.flatnonzero(kinds == kind)
            self._write(alike, np.array(named[alike].tolist(), np.bytes_), crcs[alike])
        self._end()

    def fill(self, record: int, data: bytes) -> None:
        """Put the data of a record in its place."""
        at = int(self._records.data_at[record] - self._before[record])
        self._bytes[at : at + len(data)] = data

    def add_digests(self, record: int, lengths: Column, units: Digests) -> None:
        """Put the record of digests in its place, when all others are there. lengths: of the
        storages. units: the digests of their units."""
        records = self._records
        size, data_at = int(records.sizes[record]), int(records.data_at[record])
        crcs_at = (data_at + size + DESCRIPTOR_CRC, int(records.central_at[record]) + CENTRAL_CRC)
        rest, begin = xxhash.xxh3_128(), 0
        for at, length in ((data_at, size), *((each, _CRC.size) for each in crcs_at)):
            rest.update(memoryview(self._bytes)[begin : at - self._all])
            begin = at - self._all + length
        rest.update(memoryview(self._bytes)[begin:])
        digests = pack(records.end, lengths, units, rest.digest())
        self.fill(record, digests)
        for at in crcs_at:
            _CRC.pack_into(self._bytes, at - self._all, zlib.crc32(digests))

    def literals(self) -> list[Literal]:
        """Return all bytes, cut where storages are."""
        cut = np.flatnonzero(self._after > self._before)
        end, behind = self._records.data_at[cut], self._after[cut]
        begins = [0, *(end + behind - self._before[cut]).tolist()]
        ends = [*end.tolist(), self._records.end]
        data, rows = memoryview(self._bytes), zip(begins, ends, [0, *behind.tolist()], strict=True)
        return [Literal(at, bytes(data[at - past : until - past])) for at, until, past in rows]

    def _write(self, alike: Column, names: NDArray[np.bytes_], crcs: Column) -> None:
        """Write the headers, descriptors and entries of records of a kind."""
        records, one = self._records, alike[0]
        size, header_at = records.sizes[alike], records.header_at[alike]
        data_at, count, length = records.data_at[alike], len(alike), int(records.names[one])
        # Sizes beyond 32 bits. torch leaves the compressed size in a header at zero.
        noted = [size, np.zeros_like(size)] * bool(records.large[one])
        noted += [header_at] * bool(records.far[one])
        extra = struct.Struct("<HH" + "Q" * len(noted))
        sized = extra.size if noted else 0
        text = names.view(np.uint8).reshape(count, length)
        # With a descriptor after an empty record, ``unzip`` reports a zip bomb.
        flags = _WITH_DESCRIPTOR if size[0] else UTF8
        padding = data_at - header_at - LOCAL.size - length - sized - _EXTRA.size
        extras = sized + _EXTRA.size + padding
        if (extras > LIMIT16).any():  # numpy would truncate it silently
            raise UsageError("a zip file: padding to storage_alignment of torch is too long for it")
        local = [_rows(LOCAL, count, LOCAL_MAGIC, 0, flags, 0, 0, 0, 0, 0, 0, length, extras), text]
        low, low_at = np.minimum(size, LIMIT32), np.minimum(header_at, LIMIT32)
        begin = (CENTRAL_MAGIC, 0, 0, flags, 0, 0, 0, crcs, low, low)
        central = [_rows(CENTRAL, count, *begin, length, sized, 0, 0, 0, 0, low_at), text]
        if noted:
            local.append(_rows(extra, count, ZIP64, 8 * len(noted), *noted))
            if records.large[one]:
                noted[1] = size
            central.append(_rows(extra, count, ZIP64, 8 * len(noted), *noted))
        before = self._before[alike]
        self._put(header_at - before, *local, _rows(_EXTRA, count, _PADDING, padding))
        self._put(records.central_at[alike] - self._all, *central)
        if size[0]:
            form = DESCRIPTOR64 if noted else DESCRIPTOR
            end = data_at + size - self._after[alike]
            self._put(end, _rows(form, count, DESCRIPTOR_MAGIC, crcs, size, size))

    def _put(self, at: Column, *parts: NDArray[np.uint8]) -> None:
        """Write rows of bytes to these places."""
        rows = np.hstack(parts)
        self._written[at[:, np.newaxis] + np.arange(rows.shape[1])] = rows

    def _end(self) -> None:
        """Write what follows the directory."""
        records, count = self._records, len(self._records.sizes)
        at, size = records.directory_at, records.directory_size
        few = min(count, LIMIT16)  # 0xFFFF says that the number is in the zip64 record
        end = END64.pack(END64_MAGIC, 44, 0x031E, 45, 0, 0, count, count, size, at)
        end += LOCATOR.pack(LOCATOR_MAGIC, 0, at + size, 1)
        end += END.pack(END_MAGIC, 0, 0, few, few, min(size, LIMIT32), min(at, LIMIT32), 0)
        self._bytes[-len(end) :] = end


def _rows(form: struct.Struct, count: int, *columns: Column | int) -> NDArray[np.uint8]:
    """Return the bytes that ``form`` packs of each row: (count, size of it) uint8."""
    made = np.empty(count, ",".join(f"<{each}" for each in form.format[1:]))
    for name, column in zip(made.dtype.names or (), columns, strict=True):
        made[name] = column
    return made.view(np.uint8).reshape(count, form.size)
