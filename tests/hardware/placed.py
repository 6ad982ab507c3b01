"""``python -m tests.hardware.placed PATH...``: verifies tables in place, then goes on with them.

Says ``found N STEP`` of the tables in pool N, whose bytes all follow from their step, and ``saved N
STEP`` when that batch was committed. Every few steps it takes a mark, which has to stay as it was.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from portus.companions.embedding.moment import NO_ROWS, Moment, TensorLocation
from portus.companions.embedding.pool_tables import PlacedStore
from portus.engine.format.checksum import DIGEST_SIZE, digest
from portus.engine.spec import PAGE
from portus.reach.index.check import check
from portus.reach.index.directory import WRITERS, create_pool, has_pool
from portus.reach.index.findings import Severity
from portus.reach.index.in_place import InPlaceReader
from portus.reach.index.log import read_log
from portus.reach.media.local import LocalFiles

Bytes = npt.NDArray[np.uint8]

SHAPES: Final = ((400, 384), (5000, 12))
"""Rows, and bytes of one: a row with several cells, and several rows within a line."""

TOUCHED: Final = 40
"""Rows of each table that a batch changes; some are those of the batch before."""

DENSE: Final = 5000
LOG: Final = 48 * PAGE
MARKED_EVERY: Final = 7

_SHAPES: Final = (*SHAPES, (DENSE,), (DIGEST_SIZE,), (DIGEST_SIZE,))
_STORAGES: Final = [math.prod(each) for each in _SHAPES]


def _pickled() -> bytes:
    """A list of tensors of bytes, a storage for each, in a pickle as of torch; without torch."""

    def tensor(number: int, sizes: Sequence[int]) -> bytes:
        stored = b"(Vstorage\nctorch\nByteStorage\nV%d\nVcpu\nI%d\ntQ" % (number, math.prod(sizes))
        shape = b"".join(b"I%d\n" % size for size in sizes)
        strides = b"".join(b"I%d\n" % math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
        view = b"I0\n(%st(%stI00\nccollections\nOrderedDict\n)R" % (shape, strides)
        return b"ctorch._utils\n_rebuild_tensor_v2\n(%s%stR" % (stored, view)

    return b"\x80\x02(%sl." % b"".join(tensor(*each) for each in enumerate(_SHAPES))


def touched(step: int, table: int) -> npt.NDArray[np.int64]:
    """The rows that a batch changes: half are drawn from a few, and so come again and again."""
    chance, rows = np.random.default_rng([step, table]), SHAPES[table][0]
    again = chance.integers(rows // 10, size=TOUCHED // 2)
    return np.unique(np.append(again, chance.integers(rows, size=TOUCHED // 2)))


def values(step: int, table: int) -> Bytes:
    """What a batch writes there."""
    chance = np.random.default_rng([step, table, 1])
    return chance.integers(256, size=(len(touched(step, table)), SHAPES[table][1]), dtype=np.uint8)


def content(step: int) -> list[Bytes]:
    """The tables, and the dense part, after that batch."""
    tables = [np.zeros(each, np.uint8) for each in SHAPES]
    for before in range(1, step + 1):
        for number, table in enumerate(tables):
            table[touched(before, number)] = values(before, number)
    dense = np.full(DENSE, step % 251, np.uint8)
    dense[:8] = np.frombuffer(step.to_bytes(8, "little"), np.uint8)
    return [*tables, dense]


class Training:
    """Tables in a pool that this process changes."""

    def __init__(self, path: str) -> None:
        if not has_pool(path):
            create_pool(path, LocalFiles())
        self.pool: Final = WRITERS.open(path)
        self.store: Final = PlacedStore(self.pool, LOG)
        self.step = 0
        self.is_new = self.store.newest is None
        if self.is_new:
            self.places = [self._placed(rows * row, row) for rows, row in SHAPES]
        else:
            self.places = [self.store.places[number] for number in range(len(SHAPES))]

    def _placed(self, length: int, row: int) -> TensorLocation:
        place = self.store.place(length, row)
        self.pool.medium.store(place.extent.offset, bytes(length))
        return place

    def verified(self) -> int:
        """The step; every byte, every mark and every rule is looked at."""
        errors = [each for each in check(self.pool) if each.severity is Severity.ERROR]
        assert not errors, "; ".join(map(str, errors))
        newest = self.store.newest
        if newest is None:
            return 0
        record = self.pool.record(newest)
        there = InPlaceReader(self.pool.medium, record, read_log(self.pool.medium, record))
        dense = there.content(2)
        self.step = self.store.batch = int.from_bytes(dense[:8], "little")
        found = [b"".join(map(bytes, there.units(number))) for number in range(len(SHAPES))]
        self._compare("the tables", [*found, dense], self.step)
        for mark in self.store.marks():
            self._verify(mark.info.step)
        return self.step

    def _verify(self, step: int) -> None:
        [mark] = [each for each in self.store.marks() if each.info.step == step]
        record = self.pool.record(mark)
        found = []
        for index in range(len(SHAPES) + 1):
            data, start = bytearray(_STORAGES[index]), 0
            for extent in record.storage_extents(index):
                self.pool.medium.load(
                    extent.offset, memoryview(data)[start : start + extent.length]
                )
                start += extent.length
            assert bytes(record.units[index]["digest"]) == digest(data)
            found.append(bytes(data))
        self._compare(f"the mark of {step}", found, step)

    @staticmethod
    def _compare(what: str, found: list[bytes], step: int) -> None:
        for index, (each, expected) in enumerate(zip(found, content(step), strict=True)):
            assert each == expected.tobytes(), f"{what}: storage {index} is not that of step {step}"

    def advance(self) -> int:
        """One batch; its step."""
        step = self.step + 1
        rows = [(place, touched(step, number)) for number, place in enumerate(self.places)]
        self.store.log(rows)
        for number, (place, numbers) in enumerate(rows):
            for row, data in zip(numbers.tolist(), values(step, number), strict=True):
                self.pool.medium.store(place.extent.offset + row * place.row, data.data)
        self.store.commit(self._moment(step))
        self.step, self.is_new = step, False
        if step % MARKED_EVERY == 0:
            gone = [each.info.id for each in self.store.marks()]
            self.store.mark(step, step.to_bytes(16, "little"), gone)
        return step

    def _moment(self, step: int) -> Moment:
        dense = np.full(DENSE, step % 251, np.uint8)
        dense[:8] = np.frombuffer(step.to_bytes(8, "little"), np.uint8)
        digests = [np.empty(DIGEST_SIZE, np.uint8) for _ in SHAPES]
        return Moment(
            batch=step,
            contents=_pickled(),
            data=[*(np.empty(0, np.uint8) for _ in SHAPES), dense, *digests],
            rows=None if self.is_new else dict.fromkeys(range(len(SHAPES)), NO_ROWS),
            placed=dict(enumerate(self.places)),
            digests={number: 3 + number for number in range(len(SHAPES))},
        )


def main(paths: list[str]) -> None:
    trainings = [Training(path) for path in paths]
    for number, each in enumerate(trainings):
        print(f"found {number} {each.verified()}", flush=True)
    while True:
        for number, each in enumerate(trainings):
            print(f"saved {number} {each.advance()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
