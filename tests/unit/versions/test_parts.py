"""What the rows of a version say of its bytes, and how room is dealt out."""

from __future__ import annotations

import os

import numpy as np
import pytest

from portus.engine.format.checksum import UNIT, storage_digest
from portus.engine.spec import PAGE, Extent
from portus.reach.format.layout import EXTENT
from portus.reach.versions.parts import StorageRows, rows_of
from portus.reach.versions.pool_draft import _split


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


@pytest.mark.parametrize("length", [1, 9, 10, 11, 15, 30])
def test_room_that_is_split_is_all_there_and_in_order(length: int) -> None:
    places = [Extent(100, 10), Extent(300, 5), Extent(200, 15)]
    own, rest = _split(places, length)

    def numbers(extents: list[Extent]) -> list[int]:
        return [n for each in extents for n in range(each.offset, each.offset + each.length)]

    assert len(numbers(own)) == length
    assert numbers(own) + numbers(rest) == numbers(places)
