"""Pieces of files: end to end all of it, small enough, and equal where their bytes are."""

from __future__ import annotations

import random

import numpy as np
import pytest

from portus.engine.format import checksum
from portus.engine.format.checksum import UNIT, digest
from portus.reach.index.file_table import PackedFile
from portus.reach.mirror import pieces
from portus.reach.mirror.pieces import Piece, pieces_of

UNIT_HERE = 64
ALONE_HERE = 16
SHARED_HERE = 40


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that files of some hundred bytes have many pieces of all kinds."""
    monkeypatch.setattr(pieces, "UNIT", UNIT_HERE)
    monkeypatch.setattr(pieces, "ALONE", ALONE_HERE)
    monkeypatch.setattr(pieces, "SHARED", SHARED_HERE)
    monkeypatch.setattr(checksum, "UNIT", UNIT_HERE)


def cut(file: PackedFile, data: bytes | bytearray) -> list[Piece]:
    """The pieces of a file with these bytes."""
    digests = []
    for start, length in zip(file.offset.tolist(), file.length.tolist(), strict=True):
        units = range(0, max(length, 1), checksum.UNIT)
        ends = [min(at + checksum.UNIT, length) for at in units]
        digests += [
            digest(data[start + at : start + end]) for at, end in zip(units, ends, strict=True)
        ]
    spans = file.spans()
    gaps = np.flatnonzero(spans.storage == len(file.length))
    begins, lengths = spans.begin[gaps].tolist(), spans.length[gaps].tolist()
    around = b"".join(
        data[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)
    )
    return pieces_of(file, digests, lambda at, size: around[at : at + size])


def random_file(source: random.Random) -> PackedFile:
    end, offset, length = 0, [], []
    for _ in range(source.randrange(8)):
        end += source.choice([0, 0, 1, 3, 4, 5, 70, 200])
        offset.append(end)
        length.append(source.choice([0, 1, 10, 15, 16, 17, 63, 64, 65, 200]))
        end += length[-1]
    order = source.sample(range(len(offset)), len(offset))
    end += source.choice([0, 1, 100])
    lengths = np.array([length[each] for each in order], np.int64)
    return PackedFile("a", end, np.array([offset[each] for each in order], np.int64), lengths)


@pytest.mark.usefixtures("small")
def test_pieces_are_all_of_a_file_and_equal_if_and_only_if_their_bytes_are(seed: int) -> None:
    source, shared = random.Random(seed), 0
    for _ in range(300):
        file = random_file(source)
        data = bytearray(source.randbytes(file.size))
        before = cut(file, data)
        ends = [each.start + each.size for each in before]
        assert [each.start for each in before] == [0, *ends[:-1]][: len(before)]
        assert ends[-1:] == ([file.size] if file.size else [])
        assert all(0 < each.size <= UNIT_HERE for each in before)
        if file.size:
            data[source.randrange(file.size)] ^= 1
        for old, new in zip(before, cut(file, data), strict=True):
            assert (old.start, old.size) == (new.start, new.size)
            shared += old.key == new.key
        changed = [old.key != new.key for old, new in zip(before, cut(file, data), strict=True)]
        assert sum(changed) == min(file.size, 1)
    assert shared > 300


@pytest.mark.parametrize("longer", [1, 100, 5 << 20])
def test_a_large_storage_is_in_the_same_pieces_wherever_it_lies(longer: int) -> None:
    source = random.Random(1)
    large, after = (source.randbytes(size) for size in (UNIT + (5 << 20), UNIT))

    def of(head: int) -> dict[tuple[bytes, int], int]:
        small = source.randbytes(1000)
        data = b"".join((source.randbytes(head), large, small, bytes(128), after))
        lengths = np.array([len(large), len(small), len(after)])
        starts = np.array([head, head + len(large), len(data) - len(after)])
        return {
            each.key: each.size for each in cut(PackedFile("a", len(data), starts, lengths), data)
        }

    before, now = of(1000), of(1000 + longer)
    new = sum(size for key, size in now.items() if key not in before)
    assert new == 1000 + longer + 1000 + 128, "what changed, and what is beside it"
