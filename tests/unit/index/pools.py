"""Small pools made by hand, and a way to forge their records, with every digest right."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from portus.engine.format.checksum import UNIT, digest, storage_digest
from portus.engine.media.base import Medium
from portus.engine.spec import PAGE, Extent
from portus.reach.format.layout import (
    DATA_START,
    EXTENT,
    HEADER,
    INDEX_ENTRY,
    STORAGE,
    TABLE_ENTRY,
    UNIT_DIGEST,
    RecordKind,
)
from portus.reach.index.commit_records import NewVersion
from portus.reach.index.pool import PoolWriter, format_pool
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import (
    Pointer,
    VersionEntry,
    VersionRecord,
    decode_index,
    decode_table,
    decode_version,
    frame,
    point,
    read,
)
from portus.reach.index.roots import Root, read_roots, read_superblock, store_root
from portus.reach.media.lock import ProcessLocks
from portus.reach.media.memory import Memory

OPENED: list[Memory] = []


def close_all() -> None:
    """Give the memory of all pools back."""
    while OPENED:
        OPENED.pop().close()


class Pool:
    """A pool in memory with one writer."""

    def __init__(self) -> None:
        self.medium = Memory(DATA_START)
        OPENED.append(self.medium)
        self.locks = ProcessLocks()
        format_pool(self.medium)
        self.writer = self.open()

    def open(self) -> PoolWriter:
        return PoolWriter(self.medium, self.locks)

    def open_reader(self) -> PoolReader:
        return PoolReader(self.medium, self.locks)

    def reopen(self) -> None:
        self.writer.locks.close()
        self.writer = self.open()

    def save(
        self,
        model: str,
        step: int,
        storages: Sequence[bytes],
        *,
        share: VersionRecord | None = None,
        retire: Sequence[int] = (),
    ) -> VersionRecord:
        return save(self.writer, model, step, storages, share=share, retire=retire)

    def entry(self, model: str, place: int = -1) -> VersionEntry:
        return self.writer.catalogue().models[model].versions[place]


def save(
    writer: PoolWriter,
    model: str,
    step: int,
    storages: Sequence[bytes],
    *,
    share: VersionRecord | None = None,
    retire: Sequence[int] = (),
) -> VersionRecord:
    """Commit a version of ``storages``; those that equal the ones of ``share`` are shared."""
    rows = np.zeros(len(storages), STORAGE.dtype)
    extents: list[Extent] = []
    units: list[bytes] = []
    fresh: list[list[Extent]] = []
    for index, data in enumerate(storages):
        digests = [digest(data[at : at + UNIT]) for at in range(0, max(1, len(data)), UNIT)]
        old = share.storages[index] if share is not None else None
        if old is not None and bytes(old["digest"]) == storage_digest(digests):
            assert share is not None
            own, born = list(share.storage_extents(index)), int(old["born"])
        else:
            own, born = _stored(writer, data, fresh), 0
        rows[index] = (
            len(data),
            len(extents),
            len(own),
            len(units),
            born,
            np.void(storage_digest(digests)),
        )
        extents += own
        units += digests
    new = NewVersion(
        model=model,
        step=step,
        token=os.urandom(16),
        contents=_contents(storages) if share is None else share.contents,
        storages=rows,
        extents=np.array([(each.offset, each.length) for each in extents], EXTENT.dtype),
        units=np.frombuffer(b"".join(units), UNIT_DIGEST.dtype),
    )
    record = writer.commit(new, [each for room in fresh for each in room], retire)
    for room in fresh:
        writer.release(room)
    assert record is not None
    return record


def _stored(writer: PoolWriter, data: bytes, fresh: list[list[Extent]]) -> list[Extent]:
    own: list[Extent] = []
    at = 0
    fresh.append(writer.reserve(len(data)))
    for room in fresh[-1]:
        part = data[at : at + room.length]
        writer.medium.store(room.offset, part)
        own.append(Extent(room.offset, len(part)))
        at += len(part)
    return own


def _contents(storages: Sequence[bytes]) -> bytes:
    return msgspec.json.encode(
        {f"t{i}": {"$tensor": [i, "uint8", [len(data)]]} for i, data in enumerate(storages)}
    )


Edit = Callable[[bytearray], None]


class Forger:
    """Changes records of the newest root, and puts every digest above them right.

    Afterwards both slots hold the forged root, as they do after it was committed twice.
    """

    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self.uuid = read_superblock(medium).uuid
        self.root = read_roots(medium, self.uuid)[0]

    def forge(self, kind: RecordKind, edit: Edit, *, header: bool = False, model: int = 0) -> None:
        """``edit`` the payload (or the header) of the record of that ``kind``: of the model at that
        place in the table, of its newest version."""
        self._kind, self._edit, self._header = kind, edit, header
        table = bytearray(read(self.medium, self.root.table, RecordKind.MODEL_TABLE))
        if kind is not RecordKind.MODEL_TABLE:
            _, pointer = decode_table(memoryview(table))[model]
            place = 8 + model * TABLE_ENTRY.size
            table[place : place + 32] = self._pack(self._index(pointer))
        self.root_to(self._placed(RecordKind.MODEL_TABLE, self.root.table, table))

    def placed_copies(self, edit: Edit) -> Pointer:
        """The list of copies, edited, as a record of its own."""
        self._kind, self._edit, self._header = RecordKind.COPIES, edit, False
        payload = bytearray(read(self.medium, self.root.copies, RecordKind.COPIES))
        return self._placed(RecordKind.COPIES, self.root.copies, payload)

    def root_to(self, table: Pointer, **changes: Any) -> None:
        """Both slots to ``table``, in a pool that is as long as it is now."""
        root = replace(self.root, table=table, size=self.medium.size, **changes)
        self.store(root, replace(root, sequence=root.sequence + 1))

    def store(self, *roots: Root) -> None:
        for root in roots:
            store_root(self.medium, self.uuid, root)

    def _index(self, pointer: Pointer) -> Pointer:
        index = bytearray(read(self.medium, pointer, RecordKind.MODEL_INDEX))
        if self._kind is not RecordKind.MODEL_INDEX:
            entry = decode_index(memoryview(index))[-1]
            index[-32:] = self._pack(self._version(entry.pointer))
            assert INDEX_ENTRY.fields[-1].name == "digest"
        return self._placed(RecordKind.MODEL_INDEX, pointer, index)

    def _version(self, pointer: Pointer) -> Pointer:
        version = bytearray(read(self.medium, pointer, RecordKind.VERSION))
        if self._kind is RecordKind.CONTENTS:
            below = decode_version(memoryview(version)).contents
            payload = bytearray(read(self.medium, below, self._kind))
            version[56:88] = self._pack(self._placed(self._kind, below, payload))
        return self._placed(RecordKind.VERSION, pointer, version)

    def _placed(self, kind: RecordKind, old: Pointer, payload: bytearray) -> Pointer:
        """The record on a page of its own behind the pool."""
        raw = bytearray(HEADER.size)
        self.medium.load(old.offset, memoryview(raw))
        commit = int.from_bytes(raw[24:32], "little")
        if self._kind is kind and not self._header:
            self._edit(payload)
        record = bytearray(frame(kind, commit, self.uuid, bytes(payload)))
        if self._kind is kind and self._header:
            self._edit(record)
            record[48:64] = digest(bytes(record[:48] + record[64:]))
        offset = self.medium.size
        self.medium.grow(offset + -(-len(record) // PAGE) * PAGE)
        self.medium.store(offset, bytes(record))
        return point(offset, bytes(record))

    @staticmethod
    def _pack(pointer: Pointer) -> bytes:
        return (
            pointer.offset.to_bytes(8, "little")
            + pointer.length.to_bytes(8, "little")
            + pointer.digest
        )
