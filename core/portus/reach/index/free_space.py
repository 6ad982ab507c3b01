"""The space of a pool that its writer may use, and the reservations in it.

Space is not free if a root reaches it, a reader has pinned it, or a reservation holds it (V1, V10).
Space that was returned to the file system is a *hole*: it is free, but must be filled before it is
reserved. A store through an address into a hole is SIGBUS on a full disk. A hole that is filled
first turns lack of space into an error of the reservation.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from portus.engine.media.base import Medium
from portus.engine.spec import PAGE, Extent
from portus.reach.format.layout import DATA_START
from portus.reach.index.catalogue import Catalogue
from portus.reach.index.space import (
    EMPTY,
    Runs,
    choose,
    extents_runs,
    gaps,
    last,
    merge,
    page_count,
    runs_of,
    without,
)
from portus.reach.media.pool import Locks


@dataclass(frozen=True, slots=True)
class SpaceRequest:
    """A request for free pages, as one extent or as several, and the number of pages to leave
    besides. ``apart``: far from what was taken before."""

    pages: int
    contiguous: bool
    spare: int
    apart: bool = False


def pages_for_records(pages: int) -> int:
    """Return the free pages to leave to records when data takes ``pages``."""
    return 1 + pages // 64 if pages else 0


class FreeSpace:
    """The space of one pool that is being written. Any thread may call."""

    def __init__(self, medium: Medium, locks: Locks) -> None:
        self._medium: Final = medium
        self._locks: Final = locks
        self._guard: Final = threading.RLock()
        self.roots: Sequence[Catalogue] = ()
        """The catalogues of the slots, newest first."""
        self._reach: Final[dict[int, Runs]] = {}
        self._held: Final[list[Runs]] = []
        self._holes: Runs = EMPTY
        self._strangers: set[int] = set()
        self._strange: Runs = EMPTY

    def start(
        self, roots: Sequence[Catalogue], reach: Mapping[int, Runs], holes: Sequence[Extent]
    ) -> None:
        """Take over the state of a pool just opened. ``reach``: by the ids of all versions."""
        self.advance(roots, reach)
        self._holes = extents_runs(holes)
        # Pinned after the writer before us retired them: their pages are unknown (V1).
        self._strangers = self._locks.pins() - self._reach.keys()
        self._strange = runs_of([DATA_START], [self._medium.size - DATA_START])

    def advance(self, roots: Sequence[Catalogue], reach: Mapping[int, Runs]) -> None:
        """Record that the slots hold ``roots`` now; ``reach`` is that of the new versions."""
        with self._guard:
            self._reach.update(reach)
            self.roots = roots

    # What is free.

    def free(self) -> Runs:
        """Return the pages that can be reserved."""
        with self._guard:
            return without(self._unreached_runs(), self._holes)

    def free_holes(self) -> Runs:
        """Return the free pages that are holes."""
        with self._guard:
            unreached = self._unreached_runs()
            return without(unreached, without(unreached, self._holes))

    def missing(self, wanted: SpaceRequest) -> int:
        """Return by how many pages the pool would have to grow for ``wanted``."""
        pages = wanted.pages + wanted.spare
        return pages if wanted.contiguous else pages - page_count(self.free())

    def pinned_versions(self) -> list[int]:
        """Return the versions that readers hold."""
        return sorted(self._locks.pins() & {*self._reach})

    def _unreached_runs(self) -> Runs:
        """Return the pages that nothing reaches, holes included. The caller holds the guard."""
        gone = self._reach.keys() - set[int]().union(*(each.ids() for each in self.roots))
        # Asked after the version is gone from both roots: a reader pins first and looks for it in
        # the root afterwards, so one of the two notices the other.
        pinned = self._locks.pins() if gone or self._strangers else set()
        for version in gone - pinned:
            del self._reach[version]
        self._strangers &= pinned
        strange = [self._strange] if self._strangers else []
        records = [catalogue.record_runs for catalogue in self.roots]
        reached = np.concatenate([EMPTY, *self._reach.values(), *records, *self._held, *strange])
        return gaps(reached, DATA_START // PAGE, self._medium.size // PAGE)

    # Who has reserved it.

    def take(self, wanted: SpaceRequest) -> list[Extent] | None:
        """Reserve pages until ``release``, and return them, or None if there are not enough."""
        with self._guard:
            free = self.free()
            # Chosen and reserved under one guard: no page goes to two saves (V1).
            extents = (last if wanted.apart else choose)(free, wanted.pages)
            if extents is None or (wanted.contiguous and len(extents) > 1):
                return None
            if page_count(free) < wanted.pages + wanted.spare:
                return None
            self._held.append(extents_runs(extents))
            return extents

    def hold(self, offsets: npt.ArrayLike, lengths: npt.ArrayLike) -> list[Extent]:
        """Keep the pages of a committed version from reuse. Return extents for ``release``."""
        runs = runs_of(offsets, lengths)
        with self._guard:
            self._held.append(runs)
        return extents_of(runs)

    def release(self, extents: Sequence[Extent]) -> None:
        """Release the extents of one ``take`` or ``hold``."""
        runs = extents_runs(extents)
        with self._guard:
            for index, held in enumerate(self._held):
                if held.shape == runs.shape and bool((held == runs).all()):
                    del self._held[index]
                    return
        assert not len(runs), f"{extents} was not reserved"

    # Holes.

    def give_back(self, kept_pages: int, at_most: int | None) -> list[Extent]:
        """Make holes of free pages: of ``at_most``, or of all but ``kept_pages`` and the existing
        holes. Return their extents, which the caller then discards."""
        with self._guard:
            free = self.free()
            if at_most is None:
                kept = choose(free, min(page_count(free), kept_pages)) or []
                given = without(self._unreached_runs(), extents_runs(kept))
            else:
                given = extents_runs(choose(free, min(page_count(free), at_most)) or [])
            # Noted before they are punched: from now on no save reserves them unfilled.
            self._holes = merge([self._holes, given])
        return extents_of(given)

    def choose_holes(self, pages: int, *, contiguous: bool) -> list[Extent]:
        """Return holes of ``pages`` pages at most; none if they would not be enough."""
        with self._guard:
            holes = self.free_holes()
            count = min(pages, page_count(holes))
            extents = choose(holes, count) or []
        is_enough = not contiguous or (count >= pages and len(extents) == 1)
        return extents if is_enough else []

    def fill(self, extents: Sequence[Extent]) -> None:
        """Remove ``extents`` from the holes: the caller has given them space again."""
        with self._guard:
            self._holes = without(self._holes, extents_runs(extents))


def extents_of(runs: Runs) -> list[Extent]:
    """Return runs of pages as extents."""
    return [Extent(first * PAGE, (after - first) * PAGE) for first, after in runs.tolist()]
