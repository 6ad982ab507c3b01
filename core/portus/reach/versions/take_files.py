"""``take_files``: makes files a version of a pool, wherever they are open. No torch.

The storages of a file are those that its directory or header names, so they begin on pages, and
later versions share them. Every byte of a file is a byte of the version, whatever the directory
says: damage there costs the order in the pool, and shows in the verification.

Each byte of a file is requested once, in ranges, several at a time, and its directory once more.
Before the commit the stored bytes are read back and verified, so a failed write shows too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import xxhash

from portus.engine.copying.local import check
from portus.engine.copying.segments import Column, Stop
from portus.engine.format.checksum import DIGEST_SIZE, UNIT, unit_counts
from portus.engine.image.integrity import verify_by_format
from portus.engine.image.torch_reader import ZipDirectory, key_order
from portus.engine.image.torch_zip import (
    DESCRIPTOR,
    DESCRIPTOR64,
    LIMIT32,
    LOCAL,
    STORAGES,
    ZIP,
)
from portus.engine.pipeline.draft import Labels
from portus.errors import CorruptionError, UsageError
from portus.reach.index.commit_records import new_version
from portus.reach.index.file_table import FileTable, PackedFile, encode_table
from portus.reach.index.place import load_class
from portus.reach.index.pool import PoolWriter
from portus.reach.index.records import VersionRecord
from portus.reach.versions.open_version import OpenVersion, VersionFile
from portus.reach.versions.parallel import abreast, in_any_order, in_turn
from portus.reach.versions.pool_draft import PoolDraft

ABREAST: Final = 4
"""Ranges that are requested at once."""

_HASHED: Final = 1 << 20
"""Bytes to read and then hash, while they are in the processor's cache."""

_TAIL: Final = 64 << 10
"""Bytes at the end of a file that one request reads: in most torch files, all of the directory."""

_SAFETENSORS: Final = "portus.reach.formats.safetensors:"
"""Imported when it is first needed: a floor above, without torch, as a storage host needs it."""


class FileToTake(NamedTuple):
    """An open file of ``size`` bytes. ``name``: in the version.

    ``read``: returns a range that the file has; several threads call it. ``reads(file)`` is one for
    an ``OpenFile``. ``digest``: the xxh3_128 of all of the file; None if it is not known: then the
    digests in the file verify it.
    """

    name: str
    size: int
    read: Callable[[int, int], bytes | memoryview]
    digest: bytes | None = None


def take_files(
    writer: PoolWriter,
    files: Sequence[FileToTake],
    labels: Labels,
    *,
    directory: str = "",
    advance: Callable[[int], object] | None = None,
) -> VersionRecord:
    """Commit a version of these files to the pool of ``writer``, as the newest one. Blocks.

    labels: of the version; ``contents`` is set here. directory: of the pointers, see ``FileTable``.
    advance: called with the number of newly arrived bytes, by one thread at a time; what it raises
    ends the call.

    Raises ``CorruptionError`` if the bytes of a file do not match a digest, or a name is not one of
    a file; and what the reads and the pool raise. Then the pool is unchanged.
    """
    packed = list(abreast(pack_file, files, ABREAST))
    table = FileTable(packed, directory)
    labels = replace(labels, contents=encode_table(table))
    lengths: Column = np.array(table.lengths, np.int64)
    draft = PoolDraft(writer, lengths)
    try:
        count = len(lengths)
        reserved = draft.reserve(np.arange(count), np.zeros(count, np.int64))
        # Part of the version from here on, and filled in once all bytes are stored.
        digests = np.zeros((int(unit_counts(lengths).sum()), DIGEST_SIZE), np.uint8)
        draft.note(reserved, digests)
        # Raises for names that a mirror may have: a version that no reader opens is none.
        version = OpenVersion(writer, new_version(labels, draft.rows()))
        placed = [*version.files.values()]
        tell = in_turn(advance)

        def bring(part: tuple[int, int]) -> None:
            number, start = part
            data = memoryview(files[number].read(start, min(UNIT, files[number].size - start)))
            _store(placed[number], start, data)
            tell(len(data))

        sizes = enumerate(each.size for each in files)
        in_any_order(bring, [(n, at) for n, size in sizes for at in range(0, size, UNIT)], ABREAST)
        digests[:] = check(writer.medium, reserved.target, Stop())
        # Before the commit: only right bytes are ever part of a version (V4).
        for stored, each in zip(placed, files, strict=True):
            _verify(stored, each)
        return draft.commit(labels)
    finally:
        draft.release()


def pack_file(file: FileToTake) -> PackedFile:
    """Return a file with the places of its storages, as its directory or header says; without any
    if it is no torch or safetensors file, or a damaged one. Reads little, and verifies nothing: the
    storages lie within the file and do not overlap, and that is all."""

    name, size = file.name, file.size
    tail_at = max(0, size - _TAIL)
    tail = bytes(file.read(tail_at, size - tail_at)) if size else b""

    def read_bytes(offset: int, length: int) -> bytes:
        if offset >= tail_at:
            return tail[offset - tail_at :][:length]
        return bytes(file.read(offset, length))

    offset = length = np.zeros(0, np.int64)
    with contextlib.suppress(CorruptionError, UsageError):
        begin = read_bytes(0, 9)
        if begin.startswith(ZIP):
            offset, length = _storages_of_torch(ZipDirectory(read_bytes, size, name))
        elif load_class(_SAFETENSORS + "is_safetensors")(begin):
            found = load_class(_SAFETENSORS + "read_safetensors")(read_bytes, size, name)
            offset, length = found.offset, found.length
    return PackedFile(name, size, offset, length)


def _storages_of_torch(directory: ZipDirectory) -> tuple[Column, Column]:
    """Return the places of the storages of a torch file, by its directory alone: each ends where
    the next record begins, but for its descriptor. The headers of the records, which say where
    data begins, would cost a request each."""
    records = sorted(directory.records, key=lambda each: each.header_offset)
    ends = [*(each.header_offset for each in records[1:]), directory.start]
    found: dict[str, tuple[int, int]] = {}
    for each, end in zip(records, ends, strict=True):
        at, length = each.header_offset, each.file_size
        name = each.orig_filename.partition("/")[2]
        if name.startswith(STORAGES):
            descriptor = DESCRIPTOR64 if max(at, length) >= LIMIT32 else DESCRIPTOR
            begin = end - length - (descriptor.size if length else 0)
            if begin < at + LOCAL.size or end > directory.start:
                directory.bad(at, "the length of a record", "one within the file", length)
            found[name[len(STORAGES) :]] = begin, length
    rows = [found[key] for key in sorted(found, key=key_order)]
    offset, length = np.array(rows, np.int64).reshape(-1, 2).T
    return offset, length


def _store(file: VersionFile, offset: int, data: memoryview) -> None:
    """Store a range of a file at its places in the pool."""
    places = file.extents(np.array([offset]), np.array([len(data)]))
    for at, size in zip(*(each.tolist() for each in places), strict=True):
        file.medium.store(at, data[:size])
        data = data[size:]


def _verify(stored: VersionFile, file: FileToTake) -> None:
    """Raise ``CorruptionError`` unless the stored bytes are those of the file."""

    def read(offset: int, length: int) -> bytes:
        found = bytearray(max(0, min(length, file.size - offset)))
        stored.load(offset, memoryview(found))
        return bytes(found)

    if file.digest is None:
        verify_by_format(read, file.size, file.name)
    elif (found := digest_of(read, 0, file.size)) != file.digest:
        raise CorruptionError(
            f"{file.name}: expected the digest {file.digest.hex()}, found {found.hex()}"
        )


def digest_of(read: Callable[[int, int], bytes | memoryview], start: int, size: int) -> bytes:
    """Return the xxh3_128 of ``size`` bytes of a file, from ``start`` on."""
    hasher = xxhash.xxh3_128()
    for at in range(start, start + size, _HASHED):
        hasher.update(read(at, min(_HASHED, start + size - at)))
    return hasher.digest()
