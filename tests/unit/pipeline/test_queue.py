from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from portus.pipeline.queue import SAVES_MAX, Queue


class _Work:
    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        self._act = act
        self.ran = threading.Event()
        self.ended: list[BaseException] = []

    def run(self) -> None:
        self._act()
        self.ran.set()

    def fail(self, error: BaseException) -> None:
        if not self.ran.is_set():
            self.ended.append(error)


def test_work_runs_in_the_order_it_was_put() -> None:
    queue, seen = Queue("portus-test"), []
    for number in range(50):
        queue.put(_Work(lambda number=number: seen.append(number)))  # type: ignore[misc]
    queue.close()
    assert seen == list(range(50))


def test_a_third_save_waits_for_a_place() -> None:
    queue, gate = Queue("portus-test"), threading.Event()
    for _ in range(SAVES_MAX):
        assert queue.admit(0.05)
        queue.put(_Work(gate.wait), is_save=True)  # type: ignore[arg-type]
    threading.Timer(0.2, gate.set).start()
    assert not queue.admit(0.05)
    assert queue.admit()
    assert gate.is_set()
    queue.dismiss()
    queue.close()


def test_an_error_in_one_work_ends_it_alone() -> None:
    queue = Queue("portus-test")

    def break_down() -> None:
        raise ZeroDivisionError("broken")

    bad, good = _Work(break_down), _Work()
    queue.put(bad)
    queue.put(good)
    queue.close()
    assert isinstance(bad.ended[0], ZeroDivisionError)
    assert good.ran.is_set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dying_thread_ends_everything_that_waits_for_it_and_the_next_work_runs() -> None:
    queue, gate = Queue("portus-test"), threading.Event()

    def die() -> None:
        gate.wait()
        raise SystemExit

    dead, waiting = _Work(die), _Work()
    queue.admit()
    queue.put(dead, is_save=True)
    queue.admit()
    queue.put(waiting, is_save=True)
    gate.set()
    assert queue.drain(5)
    assert isinstance(dead.ended[0], SystemExit)
    assert isinstance(waiting.ended[0], SystemExit)
    after = _Work()
    assert queue.admit(1), "both places are free again"
    queue.put(after, is_save=True)
    queue.close()
    assert after.ran.is_set()


def test_an_idle_queue_has_no_thread_after_close() -> None:
    queue = Queue("portus-test")
    queue.put(_Work())
    queue.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "portus-test"]
