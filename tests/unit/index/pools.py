"""Small pools made by hand, and a way to forge their records, with every digest right."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from portus.engine.format.checksum import UNIT, digest
from portus.engine.media.base import Medium
from portus.engine.pipeline.draft import Labels
from portus.engine.spec import PAGE, Extent
from portus.reach.format.layout import (
    DATA_START,
    EXTENT,
    HEADER,
    STORAGE,
    UNIT_DIGEST,
    RecordKind,
)
from portus.reach.index.commit_records import new_version
from portus.reach.index.pool import PoolWriter
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import (
    Pointer,
    VersionEntry,
    VersionRecord,
    frame,
    point,
    read,
)
from portus.reach.index.roots import Root, format_pool, read_roots, read_uuid, store_root
from portus.reach.media.lock import ProcessLocks
from portus.reach.media.space import Memory

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
        return self.writer.catalogue().models[model][place]


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
        if share is not None and share.digests(np.array([index])).tobytes() == b"".join(digests):
            assert old is not None
            own, born = list(share.storage_extents(index)), int(old["born"])
        else:
            own, born = _stored(writer, data, fresh), 0
        rows[index] = len(data), len(own), born
        extents += own
        units += digests
    labels = Labels(model=model, step=step, token=os.urandom(16), contents=_contents(storages))
    extent_rows = np.array([(each.offset, each.length) for each in extents], EXTENT.dtype)
    new = new_version(
        labels, (rows, extent_rows, np.frombuffer(b"".join(units), UNIT_DIGEST.dtype))
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


Edit = Callable[[list[Any]], None]
"""Changes a payload: its rows, as a list."""

HeaderEdit = Callable[[bytearray], None]


class Forger:
    """Changes records of the newest root, and puts every digest above them right.

    Afterwards both slots hold the forged root, as they do after it was committed twice.
    """

    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self.uuid = read_uuid(medium)
        self.root = read_roots(medium, self.uuid)[0]

    def forge(
        self,
        kind: RecordKind,
        edit: Edit | None = None,
        *,
        raw: HeaderEdit | None = None,
        header: bool = False,
    ) -> None:
        """``edit`` the newest version of the first model, or the catalogue, as a list; or the bytes
        of the payload (or the record with its header) of that ``kind``, with ``raw``."""
        self._kind, self._edit, self._raw, self._header = kind, edit, raw, header
        pointer = self.root.catalogue
        payload = read(self.medium, pointer, RecordKind.CATALOGUE)
        if kind is not RecordKind.CATALOGUE:
            entries = msgspec.msgpack.decode(payload)
            own = [each for each in entries if each[0][0] == entries[0][0][0]][-1]
            own[1] = self._version(Pointer(*own[1]))
            payload = memoryview(msgspec.msgpack.encode(entries))
        self.root_to(self._placed(RecordKind.CATALOGUE, pointer, bytearray(payload)))

    def root_to(self, catalogue: Pointer, **changes: Any) -> None:
        """Both slots to ``catalogue``, in a pool that is as long as it is now."""
        root = replace(self.root, catalogue=catalogue, size=self.medium.size, **changes)
        self.store(root, replace(root, sequence=root.sequence + 1))

    def store(self, *roots: Root) -> None:
        for root in roots:
            store_root(self.medium, self.uuid, root)

    def _version(self, pointer: Pointer) -> Pointer:
        payload = read(self.medium, pointer, RecordKind.VERSION)
        return self._placed(RecordKind.VERSION, pointer, bytearray(payload))

    def _placed(self, kind: RecordKind, old: Pointer, payload: bytearray) -> Pointer:
        """The record on a page of its own behind the pool."""
        raw = bytearray(HEADER.size)
        self.medium.load(old.offset, memoryview(raw))
        commit = int.from_bytes(raw[24:32], "little")
        if self._kind is kind and self._edit is not None:
            rows = msgspec.msgpack.decode(payload)
            self._edit(rows)
            payload = bytearray(msgspec.msgpack.encode(rows))
        if self._kind is kind and self._raw is not None and not self._header:
            self._raw(payload)
        record = bytearray(frame(kind, commit, self.uuid, bytes(payload)))
        if self._kind is kind and self._raw is not None and self._header:
            self._raw(record)
            record[48:64] = digest(bytes(record[:48] + record[64:]))
        offset = self.medium.size
        self.medium.grow(offset + -(-len(record) // PAGE) * PAGE)
        self.medium.store(offset, bytes(record))
        return point([offset], bytes(record))
