"""The records of one commit: their contents, their places, and their copies."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from portus.engine.spec import Extent, VersionInfo
from portus.reach.format.layout import (
    BUNCHES,
    COPY,
    HEADER,
    IN_PLACE,
    LOGS,
    VERSION_HEAD,
    VERSION_ID_MAX,
    RecordKind,
)
from portus.reach.index.catalogue import Catalogue, Model
from portus.reach.index.records import (
    NOWHERE,
    Copy,
    Pointer,
    Rows,
    VersionEntry,
    VersionLog,
    VersionRecord,
    encode_copies,
    encode_index,
    encode_metrics,
    encode_table,
    encode_version,
    frame,
    metrics_size,
    point,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVersion:
    """A version about to be committed, whose bytes are stored already.

    ``contents``: a pointer to a contents record that a version in the catalogue uses, or the
    payload of a new one. Rows as in the format; ``born`` 0 stands for this commit. ``inexact``,
    ``metrics``: see ``VersionInfo``. ``log``: reserved pages of its own, or the log of the version
    before it; ``has_bunches``: its entries may have bunches.
    """

    model: str
    step: int
    token: bytes
    contents: Pointer | bytes
    storages: Rows
    extents: Rows
    units: Rows
    inexact: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    log: VersionLog | None = None
    has_bunches: bool = False

    @property
    def features(self) -> int:
        """The incompat bits that the version needs."""
        if self.log is None:
            return 0
        bunches = BUNCHES if self.has_bunches else 0
        return LOGS | bunches | (IN_PLACE if self.log.in_place else 0)


@dataclass(frozen=True, slots=True)
class Change:
    """The request for one commit: a ``new`` version, if any, whose bytes are in the extents
    ``data``, and the ids of versions to ``retire``."""

    new: NewVersion | None
    data: Sequence[Extent] = ()
    retire: Collection[int] = ()

    @property
    def model(self) -> str | None:
        """The model of the new version; None if there is none."""
        return None if self.new is None else self.new.model


@dataclass(frozen=True, slots=True)
class Foundation:
    """The parts that a commit takes over from the one before: the entries of each model, the
    unchanged indices, and the existing copies. ``again``: records to copy once more, since they
    have no copy, or they or their copies are ``damaged``."""

    models: Mapping[str, list[VersionEntry]]
    indices: Mapping[str, Pointer]
    copies: Sequence[Copy]
    again: Sequence[tuple[RecordKind, bytes]]
    damaged: frozenset[Pointer]


_COPIED: Final = (
    RecordKind.MODEL_TABLE,
    RecordKind.MODEL_INDEX,
    RecordKind.CONTENTS,
)
"""The kinds of records that several versions depend on, and that are kept twice. A version's own
record is kept once: a byte of it is as precious as a byte of its storages."""


class CommitRecords:
    """The records of one commit: first sized, then placed, then encoded."""

    def __init__(
        self, before: Catalogue, uuid: bytes, changes: Sequence[Change], kept: Foundation
    ) -> None:
        self._before: Final = before
        self._uuid: Final = uuid
        self._new: Final = [change.new for change in changes if change.new is not None]
        self._commit: Final = before.root.sequence + 1
        self.kept: Final = kept
        self.made: Final[list[tuple[VersionEntry, VersionRecord]]] = []
        """The new versions, once they are placed."""
        self._parts: list[bytes] = []
        self._copied: Final[list[tuple[RecordKind, bytes]]] = list(kept.again)
        # Sized before they are placed, since making room may change the pool's size and its root.
        self.size, self.copies_size = self._measure()

    def place(self, offset: int, apart: int | None, pool_size: int) -> None:
        """Place all records from ``offset`` on, and make the new catalogue.

        apart: the place of the copies; None: there is no room for any.
        pool_size: bytes of the pool, after room was made for the records.
        """
        self._start = self._next = offset
        kept, models = dict(self.kept.models), {}
        for new in self._new:
            # Versions first: indices point to them, and the table to the indices.
            kept[new.model] = [*kept.get(new.model, ()), self._add_version(new)]
        for name, entries in kept.items():
            if name in self.kept.indices:
                models[name] = self._before.models[name]
            elif entries:
                pointer = self._add(RecordKind.MODEL_INDEX, encode_index(name, entries))
                models[name] = Model(pointer, tuple(entries))
        table = self._add(
            RecordKind.MODEL_TABLE,
            encode_table([(name, model.pointer) for name, model in models.items()]),
        )
        # Away from the first ones: neighbours would lie in the same block of a disk.
        copies = tuple(self._placed_copies(apart))
        root = replace(
            self._before.root,
            sequence=self._commit,
            size=pool_size,
            next_version=self._before.root.next_version + len(self.made),
            table=table,
            copies=self._add(RecordKind.COPIES, encode_copies(copies)) if copies else NOWHERE,
        )
        self.catalogue = Catalogue(root, models, copies)

    def records(self) -> bytes:
        """Return the bytes of all records, to be stored from the offset of ``place`` on."""
        return b"".join(self._parts)

    def copies(self) -> bytes:
        """Return the bytes of all copies, to be stored from ``apart`` on."""
        return b"".join(_pad(record) for _, record in self._copied)

    def _placed_copies(self, apart: int | None) -> Iterator[Copy]:
        yield from self.kept.copies
        if apart is not None:
            for kind, record in self._copied:
                yield Copy(point(apart, record), self._commit, kind)
                apart += len(_pad(record))

    def _add(self, kind: RecordKind, payload: bytes) -> Pointer:
        record = frame(kind, self._commit, self._uuid, payload)
        pointer = point(self._next, record)
        self._parts.append(_pad(record))
        self._next += len(self._parts[-1])
        assert self._next - self._start <= self.size, "records outgrew their measure"
        if kind in _COPIED:
            self._copied.append((kind, record))
        return pointer

    def _add_version(self, new: NewVersion) -> VersionEntry:
        contents = new.contents
        if isinstance(contents, bytes):
            contents = self._add(RecordKind.CONTENTS, contents)
        storages = new.storages.copy()
        # Known only now: other commits may have been made since the storages were copied.
        storages["born"][storages["born"] == 0] = self._commit
        version = self._before.root.next_version + len(self.made)
        assert version < VERSION_ID_MAX
        info = VersionInfo(
            model=new.model,
            id=version,
            commit=self._commit,
            step=new.step,
            token=new.token,
            time_ns=time.time_ns(),
            size=int(storages["length"].sum()),
            inexact=new.inexact,
            metrics=new.metrics,
        )
        log = new.log
        if log is not None and not log.born:
            log = replace(log, born=self._commit)
        record = VersionRecord(info, contents, storages, new.extents, new.units, log)
        entry = VersionEntry(info, self._add(RecordKind.VERSION, encode_version(record)))
        self.made.append((entry, record))
        return entry

    def _measure(self) -> tuple[int, int]:
        """Return upper bounds for the bytes of all records, and of all copies to write. They count
        model indices and table as if no version were retired."""
        names = list(self._before.models)
        copied = [
            96 * (len(entries) + 1) + 4 * len(name) + 24 + len(encode_metrics(entries))
            for name, entries in self.kept.models.items()
        ]
        alone = []
        for new in self._new:
            names.append(new.model)
            if isinstance(new.contents, bytes):
                copied.append(len(new.contents))
            arrays = new.storages.nbytes + new.extents.nbytes + new.units.nbytes
            log = 0 if new.log is None else new.log.size + 8
            alone.append(VERSION_HEAD.size + arrays + 4 * len(new.model) + log)
            entry = 96 + 4 * len(new.model) + 24  # in an index that may be new
            copied.append(entry + metrics_size(new.metrics))
        copied.append(8 + sum(48 + 4 * len(name) for name in names))
        again = [len(record) for _, record in self.kept.again]
        alone.append(8 + COPY.size * (len(self.kept.copies) + len(copied) + len(again)))
        framing = HEADER.size + 8
        records = sum(copied) + sum(alone) + framing * (len(copied) + len(alone))
        return records, sum(copied) + framing * len(copied) + sum(again) + 8 * len(again)


def _pad(record: bytes) -> bytes:
    # ``rescue`` finds records at multiples of 8 only.
    return record + bytes(-len(record) % 8)
