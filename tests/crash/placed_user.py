"""A process whose tables are changed in place, on a simulated device, and what a crash may leave.

The tables are in the pool; what is in memory here is a shadow of them, to compare with, and is
stored row by row where an update would write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, cast

import numpy as np
import torch

from portus.companions.embedding.capture import bytes_of
from portus.companions.embedding.moment import NO_ROWS, Moment, RowsThere, TensorLocation
from portus.companions.embedding.pool_tables import PlacedStore
from portus.engine.spec import PAGE
from portus.engine.state.pickling import pickle_state
from portus.engine.state.walk import walk
from portus.reach.index.directory import open_writer
from portus.reach.media.lock import ProcessLocks
from portus.reach.pools.restore import load
from tests.crash.embedding_user import (
    EMPTY,
    State,
    Tensors,
    change_dense,
    dense_of,
    digest_of,
    shown,
)
from tests.crash.logged import POOL, DeviceProcess, Report
from tests.simulation.crash import CrashFiles

LOG: Final = 10 * PAGE
DEVICE: Final = 180 * PAGE

WIDE, NARROW = "wide", "narrow"


def first() -> Tensors:
    """Tables of which a row has several cells, and of which several rows share one; a dense
    part."""
    return {
        "step": 0,
        WIDE: torch.zeros(12, 96),
        NARROW: torch.zeros(320, 6, dtype=torch.int16),
        **{f"dense{number}": torch.zeros(18) for number in range(4)},
        "batch": torch.tensor(0),
        "digests": [torch.zeros(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)],
    }


class User(DeviceProcess[State]):
    """One process. Wrong ones override a part of it."""

    store_kind: type[PlacedStore] = PlacedStore

    def __init__(self, files: CrashFiles, report: Report[State]) -> None:
        super().__init__(files, report, EMPTY)
        self.pool = open_writer(POOL, self.medium_files(), locks=ProcessLocks())
        self.store = self.store_kind(self.pool, LOG)
        newest = self.store.newest
        if newest is None:
            self.tensors: Tensors = first()
            self.places = {each: self.placed(each) for each in (WIDE, NARROW)}
        else:
            self.tensors = cast(Tensors, load(self.pool, newest))
            names = {self.index(each): each for each in (WIDE, NARROW)}
            self.places = {names[index]: each for index, each in self.store.places.items()}
        self.is_new = newest is None
        self.dense: Tensors = {}
        """The dense part that is durable, if that is another one."""
        self.dense_batch = 0
        self.upcoming: Mapping[str, Sequence[int]] = {}
        """Of the batch after the next one that ends."""
        self.state = shown(self.pool)
        self.report((self.state,))

    def placed(self, name: str) -> TensorLocation:
        """A place for a table, with what the table has."""
        tensor = self.tensors[name]
        place = self.store.place(tensor.nbytes, tensor.nbytes // len(tensor))
        self.pool.medium.store(place.extent.offset, tensor.numpy().tobytes())
        return place

    def index(self, name: str) -> int:
        return next(each.storage for each in walk(self.tensors).tensors if each.name == name)

    def log(self, rows: Mapping[str, Sequence[int]]) -> None:
        """What an update of these rows needs, before it."""
        self.store.log(self.rows(rows))

    def rows(self, rows: Mapping[str, Sequence[int]]) -> list[RowsThere]:
        return [(self.places[name], np.array(sorted(each))) for name, each in rows.items() if each]

    def write(self, rows: Mapping[str, Sequence[int]], step: int) -> None:
        """Update rows, one store for each, as a processor might."""
        for name, numbers in rows.items():
            tensor, place = self.tensors[name], self.places[name]
            for number in numbers:
                tensor[number] += step
                data = tensor[number].numpy().tobytes()
                self.pool.medium.store(place.extent.offset + number * place.row, data)

    def batch(
        self,
        wide: Sequence[int],
        narrow: Sequence[int],
        *,
        ahead: Mapping[str, Sequence[int]] | None = None,
        more: Mapping[str, Sequence[int]] | None = None,
        is_relaxed: bool = False,
        sliced: int = 0,
        ends: bool = False,
    ) -> None:
        """One batch. ``ahead``: what was announced of it; ``more``: what a second optimizer
        updates after the first one. ``is_relaxed``: its dense part is the one before, and not to be
        durable with it; ``sliced``: is to be written in so many slices; ``ends``: is durable in the
        end, in a version of its own."""
        step = int(self.tensors["batch"]) + 1
        rows = {WIDE: wide, NARROW: narrow}
        if ahead is not None:
            self.log(ahead)
        self.update(rows, step)
        if more is not None:
            self.update(more, step)
        self.tensors["batch"].fill_(step)
        if sliced:
            self.dense = dense_of(self.tensors)
        if not is_relaxed:
            change_dense(self.tensors, step)
            self.dense_batch = step
        self.end(step, sliced, is_left=is_relaxed or bool(sliced), ends=ends)

    def update(self, rows: Mapping[str, Sequence[int]], step: int) -> None:
        self.log(rows)
        self.write(rows, step)

    def end(self, step: int, sliced: int = 0, *, is_left: bool = False, ends: bool = False) -> None:
        """The batch is over: both this one and the one before may be found from now on."""
        moment = self.moment(step)
        if is_left:
            left = [self.index(each) for each in dense_of(self.tensors) if each != "step"]
            moment = replace(moment, left=left, sliced=sliced)
        moment = replace(moment, ahead=self.rows(self.upcoming))
        self.upcoming = {}
        if not is_left:
            self.dense = {}
        marks = self.state[1]
        after = [(digest_of({**self.tensors, **self.dense}), marks)]
        if ends:
            after.append((digest_of(self.tensors), marks))
            self.dense = {}
        self.report((self.state, *after))
        self.store.commit(moment)
        self.is_new = False
        self.state = after[-1]
        self.report((self.state,))

    def moment(self, step: int) -> Moment:
        flat = walk(self.tensors)
        index = {each.name: each.storage for each in flat.tensors}
        placed = {index[name]: place for name, place in self.places.items()}
        return Moment(
            batch=step,
            contents=pickle_state(self.tensors).pickle,
            data=[bytes_of(each) for each in flat.storages],
            rows=None if self.is_new else dict.fromkeys(placed, NO_ROWS),
            dense_batch=self.dense_batch,
            placed=placed,
            digests={index[name]: index[f"digests.{i}"] for i, name in enumerate(self.places)},
        )

    def mark(self, token: bytes) -> None:
        """Keep this batch, and no other."""
        gone = [each.info.id for each in self.store.marks()]
        newest, _ = self.state
        after = (newest, ((token, newest),))
        self.report((self.state, after))
        self.store.mark(int(self.tensors["batch"]), token, gone)
        self.state = after
        self.report((after,))

    def close(self) -> None:
        self.store.seal()
        self.pool.close()


Plan = Callable[[User], None]


def train(user: User) -> None:
    """Batches until the log was folded in, and one more. Rows share cells with those of the batch
    before."""
    user.batch([3], [7])
    user.batch([1, 5], [0, 319, 8])
    user.batch([5, 3], [9], ahead={WIDE: [5], NARROW: [9, 100]})
    user.batch([11], [9], more={WIDE: [0], NARROW: [10, 200]})
    user.batch([0], [200])
    user.batch([2], [100])


def same_rows(user: User) -> None:
    """Batches that change what the batch before changed."""
    for _ in range(3):
        user.batch([3], [7])


def go_on(user: User) -> None:
    """What a process does that follows another."""
    user.batch([3, 4], [8], more={WIDE: [3]})
    user.close()


def begin(user: User) -> None:
    user.batch([3], [7])
    user.batch([4, 7], [4, 7])


def left_half_done(user: User) -> None:
    """A process that ends in the middle of a batch."""
    user.batch([3], [7])
    user.update({WIDE: [3, 6]}, 2)
    user.close()


def marked(user: User) -> None:
    """A mark, and what is changed after it."""
    user.batch([3], [7])
    user.mark(b"a" * 16)
    user.batch([3, 5], [7])
    user.mark(b"b" * 16)
    user.batch([5], [6])


def sliced(user: User) -> None:
    """A dense part in slices, marks beside it, and the next one; rows that the next batch changes
    are announced."""
    user.batch([3], [7])
    user.batch([1, 5], [0, 319], sliced=2)
    user.mark(b"a" * 16)
    user.batch([5], [8], is_relaxed=True, ends=True)
    user.mark(b"b" * 16)
    user.batch([5], [8], is_relaxed=True, ahead={WIDE: [5]})
    user.batch([5, 2], [9], sliced=1, ends=True)
    user.batch([5], [9], is_relaxed=True)


def sliced_and_announced(user: User) -> None:
    """The last slice and the undo of the batch after it are of one commit."""
    user.batch([3], [7])
    user.batch([5], [8], sliced=2)
    user.upcoming = {WIDE: [5, 6], NARROW: [8]}
    user.batch([5], [8], is_relaxed=True, ends=True)
    user.batch([5, 6], [8], is_relaxed=True)
    user.batch([6], [8], is_relaxed=True)


def sliced_and_folded(user: User) -> None:
    """The log is folded in between two slices, when a batch begins; and then when one ends, with
    the dense part that comes in slices."""
    user.batch([3], [7])
    user.batch([1, 5], [0, 8], sliced=4)
    user.batch([5], [8], is_relaxed=True)
    user.batch(range(12), range(0, 320, 3), is_relaxed=True)
    user.batch([5], [8], is_relaxed=True, ends=True)
    user.batch([2], [9], sliced=4)
    user.batch([3], [9], is_relaxed=True)
    user.batch(range(12), [], more={NARROW: range(320)}, is_relaxed=True, ends=True)
    user.batch([5], [8], is_relaxed=True)
