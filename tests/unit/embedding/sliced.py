"""A dense part that is written in slices: what they were, and what must hold of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from portus.companions.embedding.fold import Slices
from portus.engine.copying.segments import Stop
from tests.crash.embedded import Training


class Halves(Training):
    """One whose dense part is about two tensors of the same size: its generator, and another."""

    def extra(self) -> dict[str, Any]:
        return {**super().extra(), "more": torch.zeros(5056, dtype=torch.uint8)}


Written = list[tuple[int, int, int]]
"""Of each piece: of which batch the dense part is, which slice of it was due, and its bytes."""


def noted(patch: pytest.MonkeyPatch) -> Written:
    """The slices that are written from now on."""
    written: Written = []
    go_on = Slices.go_on

    def note(self: Slices, stop: Stop) -> None:
        before = self.done
        go_on(self, stop)
        written.append((self.moment.dense_batch, self.due, self.done - before))

    patch.setattr(Slices, "go_on", note)
    return written


def require_even(written: Written, gaps: Sequence[int], gap: int) -> None:
    """One for each batch of a quarter of ``gap``, of about the same size, and ``gaps`` up to what
    is allowed."""
    assert max(gaps) == gap - 1, "never as old as allowed: is the bound too strict, or all in one?"
    first = [(due, size) for batch, due, size in written if batch == written[0][0]]
    sizes = [sum(size for due, size in first if due == each) for each in range(1, gap // 4 + 1)]
    assert all(sizes), "not one slice for each batch"
    assert max(sizes) - min(sizes) <= 2 * max(size for _, size in first)
