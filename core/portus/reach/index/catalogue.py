"""The catalogue of a root: the models of a pool and their versions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from portus.engine.media.base import Medium
from portus.errors import CorruptionError
from portus.reach.format.layout import DATA_START, RecordKind
from portus.reach.index.records import (
    VersionEntry,
    VersionRecord,
    decode_catalogue,
    decode_version,
    read,
)
from portus.reach.index.roots import Root, lost_roots, read_roots
from portus.reach.index.space import Runs, extents_runs, merge, runs_of

MARKS: Final = "embedding marks"
"""The model whose versions stand for one batch each of protected tables: checkpoints in other pools
name them."""

_log: Final = logging.getLogger("portus")

_RETRIES_MAX: Final = 1000  # a writer that commits faster than we read 1000 times is not real


@dataclass(frozen=True)
class Catalogue:
    """Everything that one root reaches, except the versions' own records. ``models``: the versions
    of each, oldest commit first."""

    root: Root
    models: dict[str, tuple[VersionEntry, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Root, entries: Iterable[VersionEntry]) -> Catalogue:
        """Return the catalogue with these versions; those of each model in order."""
        models: dict[str, list[VersionEntry]] = {}
        for entry in entries:
            models.setdefault(entry.info.model, []).append(entry)
        return cls(root, {name: tuple(own) for name, own in sorted(models.items())})

    def entries(self) -> Iterator[VersionEntry]:
        """Yield every version of every model."""
        for versions in self.models.values():
            yield from versions

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

    @property
    def record_runs(self) -> Runs:
        """The pages of the catalogue's own record and its copy."""
        return extents_runs(self.root.catalogue.extents)


def read_catalogue(
    medium: Medium, root: Root, say: Callable[[str], None] = _log.error
) -> Catalogue:
    """Return the catalogue of a root. Raise ``CorruptionError`` if it is damaged.

    say: receives a message for damage that did no harm.
    """
    size = medium.size
    if root.size > size:
        raise CorruptionError(
            f"{medium.info.name}: commit {root.sequence} needs {root.size} bytes, found "
            f"{size}; was it truncated?"
        )
    if root.is_first:
        return Catalogue(root)
    payload = read(medium, root.catalogue, RecordKind.CATALOGUE, say)
    return Catalogue.of(root, decode_catalogue(payload))


def newest_catalogue(medium: Medium, uuid: bytes, known: Catalogue | None = None) -> Catalogue:
    """Return the catalogue of the newest root that can be read. ``known``: one that was read
    before, and is returned if its root still is the newest.

    A writer may commit meanwhile, and overwrite what an older root reaches. If a root changed, all
    is read again, and nothing is called damaged. If the newest root stays and is damaged, the older
    one is used, with an error in the log (V4). Raises ``CorruptionError`` if neither can be read.
    """
    for _ in range(_RETRIES_MAX):
        roots = read_roots(medium, uuid)
        if not roots:
            raise lost_roots(medium)
        if known is not None and known.root == roots[0]:
            return known
        damage: list[str] = []
        found, failure = _first_readable(medium, roots, damage)
        # A writer committed meanwhile, and may have reused what this read: that is no damage.
        if (failure is not None or damage) and read_roots(medium, uuid) != roots:
            continue
        if failure is not None and (found is None or not found.models):
            # An empty pool in place of a damaged one would hide the loss (decision 0071).
            raise failure
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
    medium: Medium, roots: list[Root], damage: list[str]
) -> tuple[Catalogue | None, CorruptionError | None]:
    failure = None
    for root in roots:
        try:
            # With the failure of the newer root, to be logged with the root that is used.
            return read_catalogue(medium, root, damage.append), failure
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
    require_inside(medium, record, medium.size)
    return record


def require_inside(medium: Medium, record: VersionRecord, size: int) -> None:
    """Raise ``CorruptionError`` unless bytes and log of a version are within the first ``size``
    bytes of the pool, after the fixed pages."""
    offset, length = record.reach["offset"], record.reach["length"]
    outside = (offset < DATA_START) | (offset > size) | (offset + length > size)
    for row in np.flatnonzero(outside)[:1].tolist():
        raise CorruptionError(
            f"version {record.info.id} reaches beyond the {size} bytes of {medium.info.name}, or "
            f"into its first pages, with {length[row]} bytes from byte {offset[row]}; was it "
            "truncated?"
        )


def version_runs(entry: VersionEntry, record: VersionRecord) -> Runs:
    """Return all pages that a version reaches: those of its record, bytes and log."""
    own = runs_of(record.reach["offset"], record.reach["length"])
    return merge([own, extents_runs(entry.pointer.extents)])
