"""Threads that are waited for, and Ctrl-C in the wait."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from portus.engine.copying.thread import JoinableThread, finish, share_work
from portus.reach.versions.parallel import NAME, abreast, in_any_order
from tests.moments import is_in, until

WAIT_S = 30.0


@contextlib.contextmanager
def keys(count: int, where: str = "join", then: threading.Event | None = None) -> Iterator[None]:
    """Ctrl-C for the main thread, ``count`` times, each while it is in ``where``."""
    main = threading.main_thread()

    def press() -> None:
        for _ in range(count):
            until(lambda: is_in(main, where))
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)  # more than a slice: it is heard
        if then is not None:
            then.set()

    presser = threading.Thread(target=press)
    presser.start()
    yield
    presser.join(WAIT_S)
    assert not presser.is_alive()


def test_who_was_interrupted_in_the_wait_can_wait_again() -> None:
    gate, through = threading.Event(), list[bool]()
    thread = JoinableThread(lambda: through.append(gate.wait(WAIT_S)), "a test")
    assert not thread.is_alive()
    thread.start()
    with pytest.raises(KeyboardInterrupt), keys(1):
        thread.join(WAIT_S)
    assert thread.is_alive()
    began = time.monotonic()
    thread.join(0.4)
    assert time.monotonic() - began >= 0.4
    assert thread.is_alive()
    assert not through
    gate.set()
    thread.join()
    assert through == [True]
    assert not thread.is_alive()


@pytest.mark.long
def test_a_wait_for_its_end_lasts_till_then_and_ctrl_c_comes_after() -> None:
    gate, through = threading.Event(), list[bool]()
    thread = JoinableThread(lambda: through.append(gate.wait(WAIT_S)), "a test")
    thread.start()
    with pytest.raises(KeyboardInterrupt), keys(3, then=gate):
        finish([thread])
    assert through == [True]


@pytest.mark.long
def test_after_ctrl_c_no_thread_uses_what_it_was_given() -> None:
    gate, under_way, begun = threading.Event(), set[int](), list[int]()

    def work(item: int) -> None:
        begun.append(item)
        under_way.add(item)
        assert gate.wait(WAIT_S)
        under_way.remove(item)

    with pytest.raises(KeyboardInterrupt), keys(3, then=gate):
        in_any_order(work, range(9), 3)
    assert sorted(begun) == [0, 1, 2]
    assert not under_way
    gate.clear()
    results = abreast(work, range(9), 2)
    with pytest.raises(KeyboardInterrupt), keys(1, "result", then=gate):
        next(results)
    results.close()
    assert not under_way
    assert not [each for each in threading.enumerate() if each.name.startswith(NAME)]


def test_after_ctrl_c_in_shared_work_no_thread_writes_any_more() -> None:
    """Not even to an array that its owner gave back since."""
    gate, begun, target = threading.Event(), list[int](), np.zeros(2, np.uint8)

    def work(items: Iterator[int]) -> None:
        for item in items:
            begun.append(item)
            assert gate.wait(WAIT_S)
            target[:] = 1

    with pytest.raises(KeyboardInterrupt), keys(2, then=gate):
        share_work(work, range(9), 2, "a test")
    assert target.all(), "it is over, and was when the exception came out"
    target[:] = 0
    time.sleep(0.1)
    assert not target.any()
    assert sorted(begun) == [0, 1]


def test_ctrl_c_in_the_start_of_a_thread_leaves_none_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, begun, ended = threading.Thread.start, threading.Event(), list[int]()

    def work(items: Iterator[int]) -> None:
        for item in items:
            begun.set()
            time.sleep(0.2)
            ended.append(item)

    def start_interrupted(thread: threading.Thread) -> None:
        start(thread)
        assert begun.wait(WAIT_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_interrupted)
    with pytest.raises(KeyboardInterrupt):
        share_work(work, range(9), 2, "a test")
    assert ended, "the item that had begun may write to memory of the caller"
