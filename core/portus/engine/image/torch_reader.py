"""A file of ``torch.save``, read without torch: its pickle, its storages, and their checksums.

Nothing in a file is trusted. Damage gives ``CorruptionError``; no number in a file makes a read
that exceeds the file.
"""

from __future__ import annotations

import errno
import os
import zipfile
import zlib
from dataclasses import dataclass
from typing import Final, NoReturn

import numpy as np
import xxhash

from portus.engine.image.digests import unpack
from portus.engine.image.image import Column, Digests, Read, StoredFile, exactly
from portus.engine.image.key_paths import storage_places
from portus.engine.image.torch_zip import (
    CENTRAL,
    CENTRAL_CRC,
    DESCRIPTOR_CRC,
    DIGESTS,
    END,
    END64,
    LOCAL,
    LOCAL_MAGIC,
    LOCATOR,
    PICKLE,
    STORAGES,
    UTF8,
)
from portus.errors import CorruptionError, PortusError, printable

_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile(StoredFile):
    """The contents of a file of ``torch.save``.

    ``keys``: as the pickle has them, "0" first. ``crc``: of each storage, in the zip; one without
    digests is compared with it. torch does not verify it, and can be told not to compute it.
    """

    pickle: bytes
    crc: Column

    def places_of(self, key: str) -> list[str]:
        places = storage_places(self.pickle)
        return [each.subscript for each in places if each.storage == key] or [f"storage {key}"]

    def _verify(self, index: int, read: Read) -> None:
        if self.digests is not None:
            StoredFile._verify(self, index, read)  # super() needs a cell that slots do not have
            return
        crc = 0
        for offset, length, _ in self.units(index):
            crc = zlib.crc32(exactly(read, offset, length, self.name), crc)
        if crc != self.crc[index]:
            raise CorruptionError(
                f"{self.name}: storage {self.keys[index]}: {self.length[index]} bytes at "
                f"{self.offset[index]} do not match their CRC32"
            )


def read_torch(read: Read, size: int, name: str) -> TorchFile:
    """Return the contents of the file ``name`` of ``size`` bytes.

    If it has digests, all of it but the storages is verified. Raises ``CorruptionError`` when it is
    damaged or no such file.
    """
    directory = ZipDirectory(read, size, name)
    data_at = directory.data()
    if len(data_at) != len(directory.records):
        raise CorruptionError(f"{name}: two records of the zip have one name")
    archive = directory.records[0].orig_filename.partition("/")[0]
    others: dict[str, zipfile.ZipInfo] = {}
    storages: dict[str, tuple[int, int, int]] = {}
    for each in directory.records:
        root, _, short = each.orig_filename.partition("/")
        if root != archive or not short:
            where = each.header_offset
            directory.bad(where, "the name of a record", f"{archive}/...", each.orig_filename)
        if short.startswith(STORAGES):
            facts = data_at[each.orig_filename], each.file_size, each.CRC
            storages[short[len(STORAGES) :]] = facts
        else:
            others[short] = each
    pickle, noted = others.get(PICKLE), others.get(DIGESTS)
    if pickle is None:
        raise CorruptionError(f"{name}: expected a file of torch.save, found no {PICKLE} in it")
    keys = sorted(storages, key=key_order)
    columns = np.array([storages[key] for key in keys], np.int64).reshape(-1, 3)
    offset, length, crc = (np.ascontiguousarray(column) for column in columns.T)
    return TorchFile(
        name=name,
        size=size,
        pickle=exactly(read, data_at[pickle.orig_filename], pickle.file_size, name),
        keys=tuple(keys),
        offset=offset,
        length=length,
        crc=crc,
        digests=None if noted is None else directory.verify(noted, offset, length),
    )


def read_record(read: Read, size: int, name: str, record: str) -> bytes | None:
    """Return one record of the file ``name`` of ``size`` bytes; None if it has none such.

    Reads only the directory of the file and that record, which is compared with its CRC32. Raises
    ``CorruptionError`` when they are damaged.
    """
    directory = ZipDirectory(read, size, name)
    for each in directory.records:
        if each.orig_filename.partition("/")[2] == record:
            at = directory.begin(each)
            data = exactly(read, at, each.file_size, name)
            if zlib.crc32(data) != each.CRC:
                directory.bad(at, f"the CRC32 of {record}", each.CRC, zlib.crc32(data))
            return data
    return None


def key_order(key: str) -> tuple[int, str]:
    """Return a sort key: numbers by their size; torch 1.6 had other keys."""
    return (int(key), "") if key.isascii() and key.isdigit() and len(key) < 20 else (-1, key)


def _raw_name(record: zipfile.ZipInfo) -> bytes:
    return record.orig_filename.encode("utf-8" if record.flag_bits & UTF8 else "cp437")


def _entry_size(record: zipfile.ZipInfo) -> int:
    """Return the bytes of a record's entry in the central directory."""
    return CENTRAL.size + len(_raw_name(record)) + len(record.extra) + len(record.comment)


class _File:
    """What ``read`` reads, as ``zipfile`` reads a file of ``size`` bytes."""

    def __init__(self, read: Read, size: int) -> None:
        self._read: Final = read
        self._size: Final = size
        self._at = 0

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = (0, self._at, self._size)[whence] + offset
        if at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = at
        return at

    def read(self, length: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        data = self._read(self._at, left if length < 0 else min(length, left))
        self._at += len(data)
        return data


class ZipDirectory:
    """The central directory of a zip file, and all that does not depend on torch."""

    def __init__(self, read: Read, size: int, name: str) -> None:
        self._read = read
        self._size = size
        self._name = name
        try:
            archive = zipfile.ZipFile(_File(read, size))
        except PortusError:
            raise
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            if isinstance(error.__context__, PortusError):  # zipfile takes it for a missing end
                raise error.__context__ from None
            self.bad(max(0, size - END.size), "a zip file", "a directory", f"{error}; cut off?")
        self.start = archive.start_dir
        self.records: Final = archive.infolist()
        for each in self.records:
            if each.compress_type or each.flag_bits & 1 or each.compress_size != each.file_size:
                at = each.header_offset
                self.bad(at, "a record", "bytes as they are", "compressed or encrypted ones")
        if not self.records:
            raise CorruptionError(f"{name}: expected a file of torch.save, found an empty zip file")
        # zipfile allows bytes before the zip file, and behind it, and entries within others.
        end = self.start + sum(map(_entry_size, self.records))
        if size - end == END.size:
            count = END.unpack(exactly(read, end, END.size, name))[4]
        elif size - end == END64.size + LOCATOR.size + END.size:
            count = END64.unpack(exactly(read, end, END64.size, name))[7]
        else:
            self.bad(end, "the end of the directory", "the end of the file", f"{size - end} bytes")
        if count != len(self.records):
            self.bad(end, "entries of the directory", count, len(self.records))
        if begin := min(each.header_offset for each in self.records):
            self.bad(0, "the beginning of a zip file", 0, begin)

    def bad(self, offset: int, what: str, expected: object, found: object) -> NoReturn:
        raise CorruptionError(
            f"{self._name}: byte {offset}: {what}: expected {printable(str(expected))}, found "
            f"{printable(str(found))}"
        )

    def data(self) -> dict[str, int]:
        """Return the offset of the data of each record. No two records overlap."""
        found = {}
        end = 0
        # In order of their places, each after the end of the one before: no byte is in two.
        for each in sorted(self.records, key=lambda record: record.header_offset):
            begin = self.begin(each, end)
            end = begin + each.file_size
            found[each.orig_filename] = begin
        return found

    def begin(self, record: zipfile.ZipInfo, least: int = 0) -> int:
        """Return the offset of the data of a record, whose header is at ``least`` or later."""
        at, name, raw = record.header_offset, record.orig_filename, _raw_name(record)
        if at < least or at + LOCAL.size > self.start:
            self.bad(at, f"where {name} begins", f"{least} to {self.start}", at)
        begin = at + LOCAL.size + len(raw)
        header = exactly(self._read, at, begin - at, self._name)
        magic, _, flags, method, *_, length, extra = LOCAL.unpack_from(header)
        if (magic, flags, method, length) != (LOCAL_MAGIC, record.flag_bits, 0, len(raw)):
            self.bad(at, f"the header of {name}", "that of its record", "other bytes")
        if header[LOCAL.size :] != raw:
            self.bad(at, "the name of a record", name, header[LOCAL.size :])
        data = begin + int(extra)
        end = data + record.file_size
        if end > self.start:
            self.bad(at, f"where {name} ends", f"{self.start} at most", end)
        return data

    def verify(self, record: zipfile.ZipInfo, offset: Column, length: Column) -> Digests:
        """Return the digests of all units, after verifying everything except the storages. record:
        that of the digests."""
        at, size = self.begin(record), record.file_size
        where = f"{self._name}: byte {at}"
        payload = exactly(self._read, at, size, self._name)
        digests, noted = unpack(payload, self._size, length, where)
        # The CRCs of this record depend on its digests, so no digest can cover them.
        crc = zlib.crc32(payload).to_bytes(4, "little")
        before = self.records[: self.records.index(record)]
        entry_at = self.start + sum(map(_entry_size, before))
        places = (at + size + DESCRIPTOR_CRC, entry_at + CENTRAL_CRC)
        for place in places:
            found = exactly(self._read, place, 4, self._name)
            if found != crc:
                self.bad(place, "the CRC32 of the digests", crc.hex(), found.hex())
        covered = list(zip(offset.tolist(), length.tolist(), strict=True))
        covered += [(at, size), *((place, 4) for place in places)]
        rest = xxhash.xxh3_128()
        begin = 0
        for place, bytes_there in [*sorted(covered), (self._size, 0)]:
            for start in range(begin, place, _CHUNK):
                rest.update(exactly(self._read, start, min(_CHUNK, place - start), self._name))
            begin = place + bytes_there
        if rest.digest() != noted:
            raise CorruptionError(
                f"{self._name}: the pickle or the structure of the file does not match its digest"
            )
        return digests
