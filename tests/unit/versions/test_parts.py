"""What the rows of a version say of its bytes, and how room is dealt out."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from portus.engine.format.checksum import UNIT, storage_digest
from portus.engine.spec import PAGE, Extent
from portus.reach.format.layout import EXTENT
from portus.reach.versions.parts import StorageRows, part, rows_of


@pytest.mark.parametrize("units", [1, 2, 3])
def test_the_digest_of_a_storage_is_that_of_all_its_units(units: int) -> None:
    one = np.array([0], np.int64)
    digests = np.frombuffer(os.urandom(16 * units), np.uint8).reshape(units, 16)
    lengths = np.array([units * UNIT], np.int64)
    extents = np.array([(PAGE, units * UNIT)], EXTENT.dtype)
    group = StorageRows(one, extents, np.array([1], np.int64), digests, np.zeros(1, np.int64))
    storages, _, rows = rows_of([group], lengths)
    said = [bytes(row) for row in digests]
    assert [bytes(row["digest"]) for row in rows] == said
    assert bytes(storages["digest"][0]) == (storage_digest(said) if units > 1 else said[0])


def test_a_part_of_extents_holds_the_same_bytes(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        extents = [Extent(1000 * i, rng.randrange(1, 9)) for i in rng.sample(range(9), 5)]
        places = [extent.offset + i for extent in extents for i in range(extent.length)]
        start = rng.randrange(len(places))
        end = rng.randrange(start, len(places) + 1)
        found = part(extents, start, end)
        assert [e.offset + i for e in found for i in range(e.length)] == places[start:end]
