"""A process with tables on a simulated disk or device, and what a crash may leave of them.

A ``State`` is what was committed last, and what each mark has, as digests. A fact is the states
that a crash may leave from now on; the last one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch

from portus.companions.embedding import store
from portus.companions.embedding.capture import bytes_of
from portus.companions.embedding.moment import Moment, Rows
from portus.companions.embedding.store import TableStore
from portus.companions.embedding.tables import copy_rows
from portus.engine.copying.segments import Stop
from portus.engine.format.checksum import digest
from portus.engine.media.base import Medium
from portus.engine.spec import PAGE
from portus.engine.state.pickling import pickle_state
from portus.engine.state.walk import walk
from portus.errors import MediumError
from portus.reach.index.directory import open_writer
from portus.reach.index.reader import PoolReader
from portus.reach.media.lock import ProcessLocks
from portus.reach.pools.restore import load
from tests.crash.logged import POOL, DeviceProcess, Process, Report, pool_file, require_unbroken
from tests.simulation.crash import CrashFiles

LOG: Final = 4 * PAGE
DEVICE: Final = 110 * PAGE
DENSE_BYTES: Final = 4 * 72

State = tuple[bytes, tuple[tuple[bytes, bytes], ...]]
"""The digest of the newest batch, and token and digest of each mark."""

EMPTY: Final[State] = (b"", ())

Tensors = dict[str, Any]


def first() -> Tensors:
    """Tables whose rows lie across pages, and a dense part."""
    return {
        "step": 0,
        "wide": torch.zeros(12, 700),
        "narrow": torch.zeros(300, 6, dtype=torch.int16),
        **{f"dense{number}": torch.zeros(DENSE_BYTES // 16) for number in range(4)},
        "batch": torch.tensor(0),
    }


def dense_of(tensors: Tensors) -> Tensors:
    """The dense part."""
    return {key: each for key, each in tensors.items() if key.startswith("dense") or key == "step"}


def change_dense(tensors: Tensors, step: int) -> None:
    for key, each in dense_of(tensors).items():
        # Text of the contents, that changes now and then.
        tensors[key] = step // 3 if key == "step" else each + step


def digest_of(state: object) -> bytes:
    tensors = cast(Tensors, state)
    parts = [each.numpy().tobytes() for each in tensors.values() if isinstance(each, torch.Tensor)]
    return digest(b"".join(parts) + bytes([tensors["step"]]))


def shown(pool: PoolReader) -> State:
    """What a pool has, by loading it."""
    models = pool.catalogue().models
    newest = models.get(store.MODEL)
    if newest is None:
        return EMPTY
    marks = models.get(store.MARKS)
    kept = [] if marks is None else marks
    return (
        digest_of(load(pool, newest[-1])),
        tuple((each.info.token, digest_of(load(pool, each))) for each in kept),
    )


class User(Process[State]):
    """One process. Wrong ones override a part of it."""

    log_bytes = LOG
    fold_from = 1.0

    def __init__(self, files: CrashFiles, report: Report[State]) -> None:
        super().__init__(files, report, EMPTY)
        self.pool = open_writer(POOL, self.medium_files(), locks=ProcessLocks())
        self.store = TableStore(self.pool, self.log_bytes)
        self.store.fold_from = self.fold_from
        newest = self.store.newest
        self.is_new = newest is None
        self.tensors: Tensors = (
            first() if newest is None else cast(Tensors, load(self.pool, newest))
        )
        self.dense_batch = 0
        self.dense: Tensors = {}
        """The dense part that is durable, if that is another one."""
        self.state = shown(self.pool)
        self.report((self.state,))

    def batch(
        self,
        wide: Sequence[int],
        narrow: Sequence[int],
        *,
        whole: bool = False,
        is_relaxed: bool = False,
        pieces: int = 0,
        sliced: int = 0,
    ) -> None:
        """One batch, which changes some rows of each table; ``is_relaxed``: and whose dense part is
        not to be durable; ``sliced``: and whose dense part is to be written in so many slices;
        ``pieces``: so many are folded in in the midst of each table's update."""
        tensors = self.tensors
        step = int(tensors["batch"]) + 1
        numbers = {"wide": torch.tensor(wide), "narrow": torch.tensor(narrow)}
        for name, number in numbers.items():
            tensors[name][number] += step - 100
            for _ in range(pieces):
                self.fold_on()
            tensors[name][number] += 100
        tensors["batch"].fill_(step)
        if sliced:
            self.dense = dense_of(tensors)
        if not is_relaxed:
            change_dense(tensors, step)
            self.dense_batch = step
        moment = self.moment(step, None if whole or self.is_new else numbers)
        if is_relaxed or sliced:
            dense = [
                each.storage for each in walk(tensors).tensors if each.name in dense_of(tensors)
            ]
            moment = replace(moment, left=dense, sliced=sliced)
        else:
            self.dense = {}
        after = (digest_of({**tensors, **self.dense}), self.state[1])
        self.report((self.state, after))
        self.store.commit(moment)
        self.is_new = False
        self.state = after
        self.report((after,))

    def moment(self, step: int, numbers: dict[str, torch.Tensor] | None) -> Moment:
        flat = walk(self.tensors)
        rows: dict[int, Rows] = {}
        for spec in flat.tensors:
            if numbers is not None and spec.name in numbers:
                rows[spec.storage] = copy_rows(self.tensors[spec.name], numbers[spec.name])
        return Moment(
            step,
            pickle_state(self.tensors).pickle,
            [bytes_of(each) for each in flat.storages],
            None if numbers is None else rows,
            dense_batch=self.dense_batch,
        )

    def fold_on(self) -> None:
        """A piece of folding the log in."""
        self.store.go_on(Stop())

    def slice_on(self, *, is_last: bool = False) -> None:
        """A slice of the dense part; after the last one that is durable."""
        after = (digest_of(self.tensors), self.state[1]) if is_last else self.state
        self.report((self.state, after))
        while self.store.is_behind:
            self.store.go_on(Stop())
        if is_last:
            self.dense = {}
        self.state = after
        self.report((after,))

    def mark(self, token: bytes, *, alone: bool = True) -> None:
        """Keep this batch, and, if ``alone``, no other."""
        gone = [each.info.id for each in self.store.marks()] if alone else []
        newest, kept = self.state
        after = (newest, (*(() if alone else kept), (token, newest)))
        self.report((self.state, after))
        self.store.mark(int(self.tensors["batch"]), token, gone)
        self.state = after
        self.report((after,))

    def close(self) -> None:
        self.store.seal()
        self.pool.close()


class Roomy(User):
    """One whose log is not folded in."""

    log_bytes = 5 * LOG


class Folding(User):
    """One whose log is folded in from its first entry on, beside the batches."""

    log_bytes = 4 * LOG
    fold_from = 0.01


class FoldingOnDevice(DeviceProcess[State], Folding):
    """The same on a DAX device."""


class RoomyOnDevice(DeviceProcess[State], Roomy):
    """One on a DAX device, whose log is not folded in."""


class OnDevice(DeviceProcess[State], User):
    """One whose tables are on a DAX device."""


# --- what processes do ----------------------------------------------------------------------

Plan = Callable[[User], None]


def train(user: User) -> None:
    """Batches until the log was folded in, and one more."""
    user.batch([3], [7])
    user.batch([1, 5], [0, 299, 8])
    user.batch([5], [8])
    user.batch([11, 0], [9])
    user.batch([2], [100])


def relaxed(user: User) -> None:
    """Batches without a dense part, over folding in."""
    user.batch([3], [7])
    user.batch([1, 5], [0, 299, 8], is_relaxed=True)
    user.batch([5], [8], is_relaxed=True)
    user.batch([11, 0], [9])
    user.batch([2], [100], is_relaxed=True)


def sliced(user: User) -> None:
    """A dense part in slices, the next one, and marks; what an entry had of one before it."""
    user.batch([3], [7])
    user.batch([1], [0])
    user.batch([1, 5], [0, 299, 8], sliced=2)
    user.slice_on()
    user.batch([5], [8], is_relaxed=True)
    user.mark(b"a" * 16)
    user.slice_on(is_last=True)
    user.batch([11, 0], [9], is_relaxed=True)
    user.batch([2], [100], sliced=1)
    user.mark(b"b" * 16, alone=False)
    user.slice_on(is_last=True)
    user.batch([4], [2], is_relaxed=True)


def sliced_and_folded(user: User) -> None:
    """A dense part in slices, while the log is folded in; then one that is folded in before all of
    its slices are there."""
    user.batch([3], [7])
    user.batch([1, 5], [0, 299, 8])
    user.batch([5, 9], [8], pieces=1, sliced=2)
    user.slice_on()
    user.batch([11], [9], is_relaxed=True)
    user.slice_on(is_last=True)
    for _ in range(5):
        user.fold_on()
    user.batch([2], [100], is_relaxed=True)
    user.batch([9], [1], is_relaxed=True)
    user.batch([8], [3], sliced=3)
    user.slice_on()
    user.batch([4], [2], whole=True)
    user.batch([6], [5], is_relaxed=True)


def marked(user: User) -> None:
    """Marks before and after a batch, and before and after folding in."""
    user.batch([3], [7])
    user.mark(b"a" * 16)
    user.batch([1, 5], [0, 299, 8])
    user.mark(b"b" * 16, alone=False)
    user.batch([5, 6], [8])
    user.batch([7], [8])
    user.mark(b"c" * 16)
    user.batch([8], [1])


def folded(user: User) -> None:
    """Batches while the log is folded in, a piece in the midst of an update; and what comes behind
    the version that is made of them, folded in within one update."""
    user.batch([3], [7])
    user.batch([1, 5], [0, 299, 8])
    user.batch([5, 9], [8])
    user.batch([11], [9, 12], pieces=1)
    user.batch([2], [100])
    user.fold_on()
    user.fold_on()
    user.batch([9], [1])
    user.batch([4], [2])
    user.batch([6], [3], pieces=2)
    user.batch([7], [4])


def folded_and_marked(user: User) -> None:
    """Marks of before a fold, within it, and behind it; the dense part of an older batch."""
    user.batch([3], [7])
    user.batch([1, 5], [0, 299, 8])
    user.mark(b"a" * 16)
    user.fold_on()
    user.batch([5, 9], [8], is_relaxed=True)
    user.mark(b"b" * 16, alone=False)
    user.batch([11], [9, 12], pieces=1, is_relaxed=True)
    for _ in range(3):
        user.fold_on()
    user.mark(b"c" * 16)
    user.batch([2], [100], is_relaxed=True)
    user.mark(b"d" * 16, alone=False)
    user.batch([9], [1])


def written_by_others(user: User) -> None:
    """A table changed otherwise than by rows: all is taken anew."""
    user.batch([3], [7])
    user.tensors["wide"][:] = 9
    user.batch([1], [8], whole=True)
    user.batch([2], [8])


def go_on(user: User) -> None:
    """What a process does that follows another."""
    user.batch([4], [4])
    user.close()


def begin(user: User) -> None:
    user.batch([4, 7], [4])


def survive_folding(user: User) -> None:
    """The same while the log is folded in."""
    try:
        folded(user)
    except MediumError:
        go_on(type(user)(user.files, user.report))


def survive(user: User) -> None:
    """Batches, one of which fails; the pool is opened again in the same boot."""
    try:
        train(user)
    except MediumError:
        go_on(type(user)(user.files, user.report))


# --- what a crash may leave -----------------------------------------------------------------


def verify(
    files: CrashFiles,
    facts: Sequence[tuple[State, ...]],
    find: Callable[[CrashFiles], Medium | None] = pool_file,
) -> None:
    """The pool has one of the states that the last fact allows, and no rule of the format is
    broken. Who opens it for writing finds the same: the next process tells."""
    allowed = facts[-1] if facts else (EMPTY,)
    medium = find(files)
    if medium is None:
        assert EMPTY in allowed
        return
    reader = PoolReader(medium, ProcessLocks())
    found = shown(reader)
    assert found in allowed, f"found {found}, expected {allowed}"
    require_unbroken(files, reader)
