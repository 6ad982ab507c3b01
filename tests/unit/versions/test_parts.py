"""What the rows of a version say of its bytes, and how room is dealt out."""

from __future__ import annotations

import random

from portus.engine.spec import Extent
from portus.reach.versions.parts import part


def test_a_part_of_extents_holds_the_same_bytes(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        extents = [Extent(1000 * i, rng.randrange(1, 9)) for i in rng.sample(range(9), 5)]
        places = [extent.offset + i for extent in extents for i in range(extent.length)]
        start = rng.randrange(len(places))
        end = rng.randrange(start, len(places) + 1)
        found = part(extents, start, end)
        assert [e.offset + i for e in found for i in range(e.length)] == places[start:end]
