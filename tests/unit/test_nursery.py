"""The nursery: what it says of children that hang, end, or say a lot."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tests.nursery import Nursery, Say, nursery

LINES = 100_000


def warm_up() -> None:
    """The nursery calls it."""


def wait_for_the_other(say: Say) -> None:
    say("waits")
    threading.Event().wait()


def hold_a_lock_in_a_thread_and_fork(say: Say) -> None:
    threading.Thread(target=the_one_to_blame, daemon=True).start()
    child = os.fork()
    if child == 0:
        a_worker()
    say(f"forked {child}")
    threading.Event().wait()


def the_one_to_blame() -> None:
    threading.Event().wait()


def a_worker() -> None:
    signal.pause()


def end_with(_: Say, code: int) -> None:
    os._exit(code)


def say_a_lot(say: Say) -> None:
    for number in range(LINES):
        say(str(number))


def mine() -> Nursery:
    return nursery("tests.unit.test_nursery")


@pytest.mark.long
def test_a_child_that_hangs_is_told_with_what_all_threads_of_all_children_do() -> None:
    with (
        mine().start("wait_for_the_other") as waits,
        mine().start("hold_a_lock_in_a_thread_and_fork") as holds,
        mine().start("end_with", 3) as ended,
    ):
        assert waits.line() == "waits"
        worker = int(holds.until("forked").split()[1])
        assert ended.wait() == 3
        with pytest.raises(AssertionError) as told:
            waits.wait(silence_s=0.01)
        said = str(told.value)
        assert said.startswith(f"child {waits.pid} said nothing for 0.01 s")
        for function in ("wait_for_the_other", "the_one_to_blame", "a_worker"):
            assert f"in {function}\n" in said
        assert f"child {ended.pid} ended with 3" in said
        assert f"process {worker}\n" in said
        assert (waits.wait(), holds.wait()) == (-signal.SIGABRT, -signal.SIGABRT)


@pytest.mark.long
def test_a_limit_of_ones_own_on_a_line_ends_nobody() -> None:
    with mine().start("wait_for_the_other") as child:
        child.line()
        with pytest.raises(AssertionError, match=r"said nothing for 0\.01 s$"):
            child.line(0.01)
        assert child.kill() == []
        assert child.wait() == -signal.SIGKILL


def test_a_child_that_says_more_than_a_pipe_holds_ends() -> None:
    with mine().start("say_a_lot") as child:
        assert child.wait() == 0
        assert child.rest() == [str(number) for number in range(LINES)]
