"""Commits that wait for each other are made as one, and share what becomes of it (V3)."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest

from portus.engine.spec import Extent
from portus.errors import AbandonedError, MediumError
from portus.reach.format.layout import DATA_START
from portus.reach.index.check import check
from portus.reach.index.commit_queue import Line, RoomError
from portus.reach.index.commit_records import Change
from portus.reach.index.pool import PoolWriter
from portus.reach.index.roots import format_pool
from portus.reach.media.lock import ProcessLocks
from portus.reach.media.space import Memory
from tests.unit.index.engine import save

CLIENTS = 8


class Counting(Memory):
    """Counts persists; one of them may fail, once, as a descriptor reports it."""

    persists = 0
    failing = 0

    def persist(self, ranges: Sequence[Extent]) -> None:
        self.persists += 1
        if self.persists == self.failing:
            raise MediumError(errno.EIO, "simulated: the disk lost what was written")
        super().persist(ranges)


@pytest.fixture
def pool() -> PoolWriter:
    medium = Counting(DATA_START)
    format_pool(medium)
    made = PoolWriter(medium, ProcessLocks())
    made.release(made.reserve(1 << 20))  # growth takes the turn too
    return made


def medium_of(pool: PoolWriter) -> Counting:
    assert isinstance(pool.medium, Counting)
    return pool.medium


def until(truth: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not truth():
        assert time.monotonic() < end
        time.sleep(0.001)


def in_line(
    turn: AbstractContextManager[object],
    line: Line[Any],
    run: Callable[[int], None],
    count: int,
) -> None:
    """``run`` each number below ``count`` in a thread of its own, all waiting for the turn."""
    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    with turn:
        for number, thread in enumerate(threads, 1):
            thread.start()
            until(lambda number=number: line.waiting == number)  # type: ignore[misc]
    for thread in threads:
        thread.join(20)


def at_once(pool: PoolWriter, acts: Sequence[Callable[[], object]]) -> list[BaseException | None]:
    """Each in a thread of its own, all of them waiting for the turn; what was raised."""
    errors: list[BaseException | None] = [None] * len(acts)

    def run(number: int) -> None:
        try:
            acts[number]()
        except BaseException as error:
            errors[number] = error

    in_line(pool._committing, pool._line, run, len(acts))
    return errors


def saves(pool: PoolWriter, models: Sequence[str]) -> list[Callable[[], object]]:
    return [lambda model=model: save(pool, [model.encode() * 100], model=model) for model in models]  # type: ignore[misc]


def test_those_that_wait_share_two_persists(pool: PoolWriter) -> None:
    save(pool, [b"first"])
    before, sequence = medium_of(pool).persists, pool.catalogue().root.sequence
    assert at_once(pool, saves(pool, [f"m{n}" for n in range(CLIENTS)])) == [None] * CLIENTS
    assert medium_of(pool).persists == before + 2
    assert pool.catalogue().root.sequence == sequence + 1
    assert len(pool.catalogue().ids()) == 1 + CLIENTS
    assert check(pool) == []
    again = PoolWriter(pool.medium, ProcessLocks())
    assert again.catalogue().models == pool.catalogue().models


@pytest.mark.parametrize("persist", [1, 2])
def test_a_shared_persist_that_fails_fails_for_all_of_them(pool: PoolWriter, persist: int) -> None:
    save(pool, [b"first"])
    medium_of(pool).failing = medium_of(pool).persists + persist
    errors = at_once(pool, saves(pool, [f"m{n}" for n in range(CLIENTS)]))
    assert all(isinstance(error, MediumError) for error in errors)
    assert {error.errno for error in errors if isinstance(error, OSError)} == {errno.EIO}
    assert len(set(map(id, errors))) == CLIENTS, "each has an error of its own"
    assert medium_of(pool).persists == medium_of(pool).failing, "nothing is tried again"


def test_versions_of_one_model_are_committed_one_after_another(pool: PoolWriter) -> None:
    before = medium_of(pool).persists
    assert at_once(pool, saves(pool, ["a", "b", "a", "a"])) == [None] * 4
    assert medium_of(pool).persists == before + 2 * 3
    commits = [entry.info.commit for entry in pool.catalogue().models["a"]]
    assert commits == sorted(set(commits))
    assert check(pool) == []


def test_what_is_retired_by_some_and_saved_by_others_is_one_commit(pool: PoolWriter) -> None:
    first, second = (save(pool, [b"x"], model=model).info.id for model in "ab")
    acts = [lambda: pool.retire([first]), *saves(pool, ["c"]), lambda: pool.retire([second])]
    assert at_once(pool, acts) == [None] * 3
    assert set(pool.catalogue().models) == {"c"}
    assert check(pool) == []


def test_without_room_for_all_each_is_tried_alone() -> None:
    made: list[list[int]] = []

    def act(changes: Sequence[Change]) -> Sequence[int]:
        numbers = [number for each in changes for number in each.retire]
        made.append(numbers)
        if len(numbers) > 1 or numbers[0] == 1:
            raise RoomError(errno.ENOSPC, "no room")
        return numbers

    turn = threading.RLock()
    line = Line(turn, act)
    results: dict[int, object] = {}

    def run(number: int) -> None:
        try:
            results[number] = line.make(Change(None, retire=[number]))
        except MediumError as error:
            results[number] = error.errno

    in_line(turn, line, run, 3)
    assert results == {0: 0, 1: errno.ENOSPC, 2: 2}
    assert made == [[0, 1, 2], [0], [1], [2]]


def test_an_interruption_of_who_has_the_turn_is_told_to_the_others() -> None:
    def act(changes: Sequence[Change]) -> Sequence[int]:
        raise KeyboardInterrupt

    turn = threading.RLock()
    line = Line(turn, act)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            line.make(Change(None, retire=[number]))
        except BaseException as error:
            errors.append(error)

    in_line(turn, line, run, 3)
    assert sorted(type(error).__name__ for error in errors) == [
        *("AbandonedError", "AbandonedError", "KeyboardInterrupt")
    ]
    assert sum(isinstance(error, AbandonedError) for error in errors) == 2


class Interrupted:
    """A turn that Ctrl-C comes out of, before it is had."""

    def __enter__(self) -> None:
        raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None: ...


def test_ctrl_c_in_the_wait_takes_the_change_back() -> None:
    made: list[Sequence[Change]] = []

    def act(changes: Sequence[Change]) -> Sequence[Change]:
        made.append(changes)
        return changes

    line = Line(Interrupted(), act)
    with pytest.raises(KeyboardInterrupt):
        line.make(Change(None))
    assert line.waiting == 0
    assert made == []
