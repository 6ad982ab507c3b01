"""A dense part that is written in slices: what they were, and what must hold of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from portus.companions.embedding.slices import Slices
from portus.engine.spec import Extent

Written = list[tuple[int, int]]
"""Of each slice: of which batch the dense part is, and the bytes that were stored."""


def noted(patch: pytest.MonkeyPatch) -> Written:
    """The slices that are written from now on."""
    written: Written = []
    store_slice = Slices._store

    def note(self: Slices, room: int | None) -> Iterator[Extent]:
        stored = list(store_slice(self, room))
        written.append((self.batch, sum(each.length for each in stored)))
        return iter(stored)

    patch.setattr(Slices, "_store", note)
    return written


def require_even(written: Written, gaps: Sequence[int], gap: int) -> None:
    """One for each batch of a quarter of ``gap``, of about the same size, and ``gaps`` up to what
    is allowed."""
    assert max(gaps) == gap - 1, "never as old as allowed: is the bound too strict, or all in one?"
    first = [size for batch, size in written if batch == written[0][0]]
    assert len(first) == gap // 4, "not one slice for each batch"
    assert max(first) - min(first) < len(first)
