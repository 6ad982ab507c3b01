"""Several things at once, in any order."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from portus.reach.versions.parallel import NAME, Rooms, in_any_order

WAIT_S = 30.0


def test_a_slow_item_holds_up_none_behind_it() -> None:
    last_is_through = threading.Event()
    through: list[int] = []

    def work(item: int) -> None:
        if item == 0:
            assert last_is_through.wait(WAIT_S)
        through.append(item)
        if item == 9:
            last_is_through.set()

    in_any_order(work, range(10), 2)
    assert through == [*range(1, 10), 0]


def test_no_more_than_the_count_are_under_way() -> None:
    under_way, most, guard = 0, 0, threading.Lock()
    all_there = threading.Barrier(3)

    def work(_: int) -> None:
        nonlocal under_way, most
        with guard:
            under_way += 1
            most = max(most, under_way)
        all_there.wait(WAIT_S)
        with guard:
            under_way -= 1

    in_any_order(work, range(12), 3)
    assert most == 3


def test_after_an_error_none_is_begun_and_no_thread_is_left() -> None:
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        if item == 2:
            raise ValueError("the third")

    with pytest.raises(ValueError, match="the third"):
        in_any_order(work, range(10), 1)
    assert begun == [0, 1, 2]
    assert not [each for each in threading.enumerate() if each.name.startswith(NAME)]


def test_a_room_that_was_given_is_lent_again_once_no_view_of_it_is_left() -> None:
    rooms = Rooms(1 << 20)

    def place(view: memoryview) -> int:
        return np.frombuffer(view, np.uint8).ctypes.data

    given = rooms.give(1 << 20)
    first, part, array = place(given), given[7:9], np.frombuffer(given, np.uint8)
    del given
    others = [rooms.give(1)]
    part.release()
    others.append(rooms.give(1))
    assert first not in map(place, others), "an array has it still"
    del array
    assert place(rooms.give(10)) == first
