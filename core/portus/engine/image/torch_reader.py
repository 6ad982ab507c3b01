"""A file of ``torch.save``, read without torch: its pickle, its storages, and their checksums.

Nothing in a file is trusted. Damage gives ``CorruptionError``; no number in a file makes a read
that exceeds the file.
"""

from __future__ import annotations

import errno
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, NoReturn

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


class ZipRecord(NamedTuple):
    """One record of a zip file."""

    offset: int
    length: int
    crc: int
    """The CRC32 in the zip. torch does not verify it, and can be told not to compute it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile(StoredFile):
    """The contents of a file of ``torch.save``.

    ``keys``: as the pickle has them, "0" first. ``records``: all but the storages, by name.
    ``crc``: of each storage; one without digests is compared with it.
    """

    archive: str
    pickle: bytes
    records: Mapping[str, ZipRecord]
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
    directory = _Directory(read, size, name)
    entries = directory.entries
    by_name = {entry.name: entry for entry in entries}
    if len(by_name) != len(entries):
        raise CorruptionError(f"{name}: two records of the zip have one name")
    archive = entries[0].name.partition("/")[0]
    data = directory.data()
    records: dict[str, ZipRecord] = {}
    storages: dict[str, ZipRecord] = {}
    for each in entries:
        root, _, short = each.name.partition("/")
        if root != archive or not short:
            directory.bad(each.at, "the name of a record", f"{archive}/...", each.name)
        into = storages if short.startswith(STORAGES) else records
        into[short] = ZipRecord(data[each.name], each.length, each.crc)
    pickle = records.get(PICKLE)
    if pickle is None:
        raise CorruptionError(f"{name}: expected a file of torch.save, found no {PICKLE} in it")
    keys = sorted((key[len(STORAGES) :] for key in storages), key=_in_order)
    columns = np.array([storages[STORAGES + key] for key in keys], np.int64).reshape(-1, 3)
    offset, length, crc = (np.ascontiguousarray(column) for column in columns.T)
    digests = None
    if DIGESTS in records:
        digests = directory.verify(
            by_name[f"{archive}/{DIGESTS}"], records[DIGESTS], offset, length
        )
    return TorchFile(
        name=name,
        size=size,
        archive=archive,
        pickle=exactly(read, pickle.offset, pickle.length, name),
        records=records,
        keys=tuple(keys),
        offset=offset,
        length=length,
        crc=crc,
        digests=digests,
    )


def read_record(read: Read, size: int, name: str, record: str) -> bytes | None:
    """Return one record of the file ``name`` of ``size`` bytes; None if it has none such.

    Reads only the directory of the file and that record, which is compared with its CRC32. Raises
    ``CorruptionError`` when they are damaged.
    """
    directory = _Directory(read, size, name)
    for entry in directory.entries:
        if entry.name.partition("/")[2] == record:
            data = exactly(read, directory.begin(entry), entry.length, name)
            if zlib.crc32(data) != entry.crc:
                directory.bad(entry.at, f"the CRC32 of {record}", entry.crc, zlib.crc32(data))
            return data
    return None


def _in_order(key: str) -> tuple[int, str]:
    """Return a sort key: numbers by their size; torch 1.6 had other keys."""
    return (int(key), "") if key.isascii() and key.isdigit() and len(key) < 20 else (-1, key)


class _CentralEntry(NamedTuple):
    """An entry of the central directory, which is at ``at`` of the file."""

    name: str
    raw_name: bytes
    flags: int
    length: int
    crc: int
    header_at: int
    at: int


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


class _Directory:
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
        self._start = at = archive.start_dir
        self.entries: list[_CentralEntry] = []
        for info in archive.infolist():
            if info.compress_type or info.flag_bits & 1 or info.compress_size != info.file_size:
                self.bad(at, "a record", "bytes as they are", "compressed or encrypted ones")
            raw = info.orig_filename.encode("utf-8" if info.flag_bits & UTF8 else "cp437")
            facts = (raw, info.flag_bits, info.file_size, info.CRC, info.header_offset)
            self.entries.append(_CentralEntry(info.orig_filename, *facts, at))
            at += CENTRAL.size + len(raw) + len(info.extra) + len(info.comment)
        if not self.entries:
            raise CorruptionError(f"{name}: expected a file of torch.save, found an empty zip file")
        # zipfile allows bytes before the zip file, and behind it.
        if size - at not in (END.size, END64.size + LOCATOR.size + END.size):
            self.bad(at, "the end of the directory", "the end of a zip file", "other bytes")
        if begin := min(entry.header_at for entry in self.entries):
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
        for entry in sorted(self.entries, key=lambda entry: entry.header_at):
            begin = self.begin(entry, end)
            end = begin + entry.length
            found[entry.name] = begin
        return found

    def begin(self, entry: _CentralEntry, least: int = 0) -> int:
        """Return the offset of the data of a record, whose header is at ``least`` or later."""
        at = entry.header_at
        if at < least or at + LOCAL.size > self._start:
            self.bad(entry.at, f"where {entry.name} begins", f"{least} to {self._start}", at)
        begin = at + LOCAL.size + len(entry.raw_name)
        header = exactly(self._read, at, begin - at, self._name)
        magic, _, flags, method, *_, name, extra = LOCAL.unpack_from(header)
        if (magic, flags, method, name) != (LOCAL_MAGIC, entry.flags, 0, len(entry.raw_name)):
            self.bad(at, f"the header of {entry.name}", "that of its record", "other bytes")
        if header[LOCAL.size :] != entry.raw_name:
            self.bad(at, "the name of a record", entry.name, header[LOCAL.size :])
        data = begin + int(extra)
        end = data + entry.length
        if end > self._start:
            self.bad(entry.at, f"where {entry.name} ends", f"{self._start} at most", end)
        return data

    def verify(
        self, central: _CentralEntry, record: ZipRecord, offset: Column, length: Column
    ) -> Digests:
        """Return the digests of all units, after verifying everything except the storages."""
        where = f"{self._name}: byte {record.offset}"
        payload = exactly(self._read, record.offset, record.length, self._name)
        digests, noted = unpack(payload, self._size, length, where)
        # The CRCs of this record depend on its digests, so no digest can cover them.
        crc = zlib.crc32(payload).to_bytes(4, "little")
        places = (record.offset + record.length + DESCRIPTOR_CRC, central.at + CENTRAL_CRC)
        for place in places:
            found = exactly(self._read, place, 4, self._name)
            if found != crc:
                self.bad(place, "the CRC32 of the digests", crc.hex(), found.hex())
        covered = list(zip(offset.tolist(), length.tolist(), strict=True))
        covered += [(record.offset, record.length), *((place, 4) for place in places)]
        rest = xxhash.xxh3_128()
        begin = 0
        for place, bytes_there in [*sorted(covered), (self._size, 0)]:
            for at in range(begin, place, _CHUNK):
                rest.update(exactly(self._read, at, min(_CHUNK, place - at), self._name))
            begin = place + bytes_there
        if rest.digest() != noted:
            raise CorruptionError(
                f"{self._name}: the pickle or the structure of the file does not match its digest"
            )
        return digests
