"""The catalogue of a root: the models of a pool and their versions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from portus.engine.media.base import Medium
from portus.engine.spec import Extent
from portus.errors import CorruptionError, MediumError
from portus.reach.format.layout import EXTENT, RECORD_SIZE_MAX, RecordKind
from portus.reach.index.records import (
    NOWHERE,
    Copy,
    Pointer,
    VersionEntry,
    VersionRecord,
    decode_copies,
    decode_index,
    decode_table,
    decode_version,
    read,
    read_copied,
)
from portus.reach.index.roots import Root, read_roots
from portus.reach.index.space import Runs, extents_runs, runs_of
from portus.reach.media.pool import ReadableMedium

if TYPE_CHECKING:
    from portus.reach.transport.host import HostMedium

_log: Final = logging.getLogger("portus")

_RETRIES_MAX: Final = 1000  # a writer that commits faster than we read 1000 times is not real


@dataclass(frozen=True, slots=True)
class Model:
    """A model's index record and the versions that it lists, oldest commit first."""

    pointer: Pointer
    versions: tuple[VersionEntry, ...]


@dataclass(frozen=True)
class Catalogue:
    """Everything that one root reaches, except the versions' own records.

    ``copies``: of records that the root reaches. Only a writer knows them before it needs one.
    """

    root: Root
    models: dict[str, Model] = field(default_factory=dict)
    copies: tuple[Copy, ...] = ()

    def entries(self) -> Iterator[VersionEntry]:
        """Yield every version of every model."""
        for model in self.models.values():
            yield from model.versions

    def ids(self) -> frozenset[int]:
        """Return the ids of all versions."""
        return self._ids

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(entry.info.id for entry in self.entries())

    def find(self, version: int) -> VersionEntry | None:
        """Return the version with an id, or None."""
        return next((entry for entry in self.entries() if entry.info.id == version), None)

    def of_token(self, token: bytes) -> VersionEntry | None:
        """Return the version with a token, or None."""
        return next((entry for entry in self.entries() if entry.info.token == token), None)

    def copies_of(self, pointer: Pointer) -> Sequence[Copy]:
        """Return the copies of a record."""
        return self._copies_by_digest.get(pointer.digest, ())

    @cached_property
    def _copies_by_digest(self) -> dict[bytes, list[Copy]]:
        found: dict[bytes, list[Copy]] = {}
        for copy in self.copies:
            found.setdefault(copy.pointer.digest, []).append(copy)
        return found

    @cached_property
    def record_runs(self) -> Runs:
        """The pages of the table, of the model indices and of copies, once all are known."""
        pointers = [self.root.table, *(model.pointer for model in self.models.values())]
        pointers += [self.root.copies, *(copy.pointer for copy in self.copies)]
        return extents_runs(pointer.extent for pointer in pointers)


class _Ahead:
    """A remote medium during one look at its catalogue. Its size was asked for once, after the root
    was read; some records are loaded in one request, and all others as usual."""

    def __init__(self, medium: HostMedium) -> None:
        self.info: Final = medium.info
        self.size: Final = medium.size
        self._medium: Final = medium
        self._loaded: Final[dict[Extent, memoryview]] = {}

    def expect(self, pointers: Sequence[Pointer]) -> None:
        """Load these records now, in one request."""
        there = [
            pointer.extent
            for pointer in pointers
            if pointer.length <= RECORD_SIZE_MAX and pointer.offset + pointer.length <= self.size
        ]
        self._loaded.update(zip(there, self._medium.load_all(there), strict=True))

    def load(self, offset: int, target: memoryview) -> None:
        """Load as the medium does, or copy what was loaded ahead."""
        found = self._loaded.get(Extent(offset, target.nbytes))
        if found is None:
            self._medium.load(offset, target)
        else:
            target[:] = found


def read_catalogue(
    medium: Medium,
    root: Root,
    known: Catalogue | None = None,
    say: Callable[[str], None] = _log.error,
) -> Catalogue:
    """Return the catalogue of a root. Raise ``CorruptionError`` if the table or a model index is
    damaged.

    known: a catalogue read before; a model whose index is the same record, by digest, is not read
    again.
    say: receives a message for each damage that did no harm.
    """
    catalogue = Catalogue(root)
    source: ReadableMedium = medium
    if medium.info.kind.is_remote:  # isinstance would read all its properties, the size included
        source = _Ahead(cast("HostMedium", medium))
    if root.size > source.size:
        raise CorruptionError(
            f"{medium.info.name}: commit {root.sequence} needs {root.size} bytes, found "
            f"{source.size}; was it truncated?"
        )
    if root.table == NOWHERE:
        return catalogue

    def whole(pointer: Pointer, kind: RecordKind) -> memoryview:
        return read_copied(source, pointer, kind, lambda: read_copies(medium, root, say), say)

    table = decode_table(whole(root.table, RecordKind.MODEL_TABLE))
    same = {
        name: model
        for name, pointer in table
        if known and (model := known.models.get(name)) and model.pointer == pointer
    }
    others = [pointer for name, pointer in table if name not in same]
    if len(others) > 1 and isinstance(source, _Ahead):
        source.expect(others)
    for name, pointer in table:
        if name in same:
            catalogue.models[name] = same[name]
            continue
        entries = decode_index(whole(pointer, RecordKind.MODEL_INDEX))
        if any(entry.info.model != name for entry in entries):
            raise CorruptionError(f"model index of {name!r}: it is that of another model")
        catalogue.models[name] = Model(pointer, tuple(entries))
    return catalogue


def read_copies(
    medium: Medium, root: Root, say: Callable[[str], None] = _log.error
) -> tuple[Copy, ...]:
    """Return the copies that a root lists; none, after a message, if the list is damaged."""
    if root.copies == NOWHERE:
        return ()
    try:
        return decode_copies(read(medium, root.copies, RecordKind.COPIES))
    except (CorruptionError, MediumError) as error:
        say(f"{error}; the list of copies cannot be read")
        return ()


def newest_catalogue(medium: Medium, uuid: bytes, known: Catalogue | None = None) -> Catalogue:
    """Return the catalogue of the newest root that can be read completely. ``known``: see
    ``read_catalogue``.

    A writer may commit meanwhile, and overwrite what an older root reaches. If a root changed, all
    is read again, and nothing is called damaged. If the newest root stays and is damaged, the older
    one is used, with an error in the log (V4). Raises ``CorruptionError`` if neither can be read.
    """
    for _ in range(_RETRIES_MAX):
        roots = read_roots(medium, uuid)
        if not roots:
            raise CorruptionError(
                f"{medium.info.name}: both root slots are damaged; `portus rescue "
                f"{medium.info.name}` lists what is intact"
            )
        if known is not None and known.root == roots[0]:
            return known
        damage: list[str] = []
        found, failure = _first_readable(medium, roots, known, damage)
        # A writer committed meanwhile, and may have reused what this read: that is no damage.
        if (failure is not None or damage) and read_roots(medium, uuid) != roots:
            continue
        if failure is not None and (found is None or not found.models):
            raise failure  # an empty pool in place of a damaged one would hide the loss
        assert found is not None
        for each in damage:
            _log.error("%s", each)
        if failure is not None:
            _log.error(
                "%s: commit %d is damaged (%s); falling back to commit %d",
                medium.info.name,
                roots[0].sequence,
                failure,
                found.root.sequence,
            )
        return found
    raise CorruptionError(f"{medium.info.name}: its roots changed {_RETRIES_MAX} times in one read")


def _first_readable(
    medium: Medium, roots: list[Root], known: Catalogue | None, damage: list[str]
) -> tuple[Catalogue | None, CorruptionError | None]:
    failure = None
    for root in roots:
        try:
            # With the failure of the newer root, to be logged with the root that is used.
            return read_catalogue(medium, root, known, damage.append), failure
        except CorruptionError as error:
            failure = failure or error
    return None, failure


def read_version(medium: Medium, entry: VersionEntry) -> VersionRecord:
    """Return the record of one version. Raise ``CorruptionError`` if it is damaged."""
    record = decode_version(read(medium, entry.pointer, RecordKind.VERSION))
    if record.info != entry.info:
        raise CorruptionError(
            f"version record at byte {entry.pointer.offset}: expected {entry.info}, "
            f"found {record.info}"
        )
    offsets, lengths, size = record.extents["offset"], record.extents["length"], medium.size
    if len(offsets) and max(int(offsets.max()), int((offsets + lengths).max())) > size:
        raise _truncation(medium, entry)
    if record.log is not None and record.log.extent.end > size:
        raise _truncation(medium, entry)
    return replace(record, info=entry.info)


def _truncation(medium: Medium, entry: VersionEntry) -> CorruptionError:
    return CorruptionError(
        f"version {entry.info.id} reaches beyond the {medium.size} bytes of {medium.info.name}; "
        f"was it truncated?"
    )


def version_runs(entry: VersionEntry, record: VersionRecord) -> Runs:
    """Return all pages that a version reaches: those of its record, contents, bytes and log."""
    alone = [entry.pointer.extent, record.contents.extent]
    if record.log is not None:
        alone.append(record.log.extent)
    columns = np.array([(each.offset, each.length) for each in alone], EXTENT.dtype)
    every = np.concatenate([columns, record.extents])
    return runs_of(every["offset"], every["length"])
