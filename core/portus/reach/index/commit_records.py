"""The records of one commit, their places, and their copies, which are far from them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from portus.engine.pipeline.draft import Labels
from portus.engine.spec import Extent, VersionInfo
from portus.reach.format.layout import HEADER, VERSION_ID_MAX, RecordKind
from portus.reach.index.catalogue import Catalogue
from portus.reach.index.records import (
    Pointer,
    Rows,
    VersionEntry,
    VersionLog,
    VersionRecord,
    encode_catalogue,
    encode_version,
    frame,
    point,
)

_FAR: Final = Pointer((1 << 63) - 1, (1 << 63) - 1, bytes(16), (1 << 63) - 1)
"""A pointer of which no number takes more bytes."""


def new_version(
    labels: Labels, rows: tuple[Rows, Rows, Rows], log: VersionLog | None = None
) -> VersionRecord:
    """Return a version about to be committed, whose bytes are stored already; the commit gives it
    its id, its number and its time. rows: as in the format; ``born`` 0 stands for this commit. log:
    reserved pages of its own, or the log of the version before it."""
    info = VersionInfo(
        model=labels.model,
        id=0,
        commit=0,
        step=labels.step,
        token=labels.token,
        time_ns=0,
        size=int(rows[0]["length"].sum()),
        inexact=labels.inexact,
        metrics=labels.metrics,
    )
    return VersionRecord(info, labels.contents, *rows, log)


@dataclass(frozen=True, slots=True)
class Change:
    """The request for one commit: a ``new`` version, if any, see ``new_version``, whose bytes are
    in the extents ``data``, and the ids of versions to ``retire``."""

    new: VersionRecord | None
    data: Sequence[Extent] = ()
    retire: Collection[int] = ()

    @property
    def model(self) -> str | None:
        """The model of the new version; None if there is none."""
        return None if self.new is None else self.new.info.model


class RecordArea:
    """Records end to end, to be stored from ``offset`` on."""

    def __init__(self, offset: int) -> None:
        self.offset: Final = offset
        self.data = b""

    def add(self, record: bytes) -> int:
        """Add a record, and return its place."""
        place = self.offset + len(self.data)
        # ``rescue`` finds records at multiples of 8 only.
        self.data += record + bytes(-len(record) % 8)
        return place


class CommitRecords:
    """The records of one commit: first sized, then placed."""

    def __init__(self, before: Catalogue, uuid: bytes, changes: Sequence[Change]) -> None:
        self._before: Final = before
        self._uuid: Final = uuid
        self._commit: Final = before.root.sequence + 1
        new = [change.new for change in changes if change.new is not None]
        retire = set[int]().union(*(change.retire for change in changes))
        self._kept: Final = [each for each in before.entries() if each.info.id not in retire]
        self._versions: Final = [
            self._record(each, before.root.next_version + index) for index, each in enumerate(new)
        ]
        self._framed: Final = [
            frame(RecordKind.VERSION, self._commit, uuid, encode_version(each))
            for each in self._versions
        ]
        self.made: Final[list[tuple[VersionEntry, VersionRecord]]] = []
        """The new versions, once they are placed."""
        # Sized before they are placed, since making room may change the pool's size and its root.
        entries = [*self._kept, *(VersionEntry(each.info, _FAR) for each in self._versions)]
        lengths = [HEADER.size + len(encode_catalogue(entries)), *map(len, self._framed)]
        self.size: Final = sum(lengths) + 8 * len(lengths)
        """Bytes of all records, at most, and of all copies."""

    def place(self, places: Sequence[RecordArea], pool_size: int) -> Catalogue:
        """Place all records, and return the new catalogue.

        places: for the records, and for their copies if there is room for any.
        pool_size: bytes of the pool, after room was made for the records.
        """
        for version, record in zip(self._versions, self._framed, strict=True):
            # Versions first: the catalogue points to them.
            self.made.append((VersionEntry(version.info, _add(places, record)), version))
        entries = [*self._kept, *(entry for entry, _ in self.made)]
        record = frame(RecordKind.CATALOGUE, self._commit, self._uuid, encode_catalogue(entries))
        root = replace(
            self._before.root,
            sequence=self._commit,
            size=pool_size,
            next_version=self._before.root.next_version + len(self.made),
            catalogue=_add(places, record),
        )
        assert len(places[0].data) <= self.size, "records outgrew their measure"
        return Catalogue.of(root, entries)

    def _record(self, new: VersionRecord, version: int) -> VersionRecord:
        assert version < VERSION_ID_MAX
        storages = new.storages.copy()
        # Known only now: other commits may have been made since the storages were copied.
        storages["born"][storages["born"] == 0] = self._commit
        info = replace(new.info, id=version, commit=self._commit, time_ns=time.time_ns())
        log = new.log
        if log is not None and not log.born:
            log = replace(log, born=self._commit)
        return replace(new, info=info, storages=storages, log=log)


def _add(places: Sequence[RecordArea], record: bytes) -> Pointer:
    return point([each.add(record) for each in places], record)
