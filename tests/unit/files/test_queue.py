from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from portus.engine.files.queue import SAVES_MAX, Queue, Turn
from portus.errors import UsageError


class _Work:
    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        self._act = act
        self.ran = threading.Event()
        self.ended: list[BaseException] = []
        self.hurried = False

    def run(self) -> None:
        self._act()
        self.ran.set()

    def fail(self, error: BaseException) -> None:
        if not self.ran.is_set():
            self.ended.append(error)

    def hurry(self) -> None:
        self.hurried = True


def test_work_runs_in_the_order_it_was_put() -> None:
    queue, seen = Queue("portus-test"), []
    for number in range(50):
        queue.put(_Work(lambda number=number: seen.append(number)))  # type: ignore[misc]
    queue.close()
    assert seen == list(range(50))


def test_a_third_save_waits_for_a_place() -> None:
    queue, gate = Queue("portus-test"), threading.Event()
    for _ in range(SAVES_MAX):
        place = Turn()
        assert queue.admit(place, 0.05)
        queue.put(_Work(gate.wait), place)  # type: ignore[arg-type]
    third = Turn()
    assert not queue.admit(third, 0.05)
    threading.Timer(0.2, gate.set).start()
    assert queue.admit(third)
    assert gate.is_set()
    assert queue.dismiss(third)
    queue.close()


def test_small_saves_have_places_of_two_steps_of_each_saver_at_most() -> None:
    queue, gate = Queue("portus-test", bytes_max=1 << 10), threading.Event()
    one, other = object(), object()
    for saver, step in [(one, 1), (one, 1), (one, 2), (one, 2), (other, 7), (other, 8)]:
        place = Turn(1, saver, step)
        assert queue.admit(place, 0)
        queue.put(_Work(gate.wait), place)  # type: ignore[arg-type]
    assert not queue.admit(Turn(1, one, 3), 0)
    assert not queue.admit(Turn(1 << 10, one, 2), 0), "and of so many bytes at most"
    gate.set()
    third = Turn(1, one, 3)
    assert queue.admit(third, 5)
    assert queue.dismiss(third)
    queue.close()


def test_a_place_is_given_back_once_and_not_while_work_is_on_it() -> None:
    queue, gate = Queue("portus-test"), threading.Event()
    places = [Turn(), Turn()]
    works = [_Work(gate.wait), _Work()]  # type: ignore[arg-type]
    assert queue.dismiss(places[0]), "it was never taken"
    for place, work in zip(places, works, strict=True):
        assert queue.admit(place, 0)
        queue.put(work, place)
    assert not any(queue.dismiss(place) for place in places)
    assert not queue.admit(Turn(), 0.01)
    gate.set()
    assert queue.catch_up(5)
    assert all(queue.dismiss(place) for place in places)
    for _ in range(SAVES_MAX):
        assert queue.admit(Turn(), 0)
    assert not queue.admit(Turn(), 0), "no place more than there were"
    queue.close()


def test_who_catches_up_does_not_wait_for_what_is_put_meanwhile() -> None:
    queue, asked, gate = Queue("portus-test"), threading.Event(), threading.Event()
    later = _Work(gate.wait)  # type: ignore[arg-type]

    class First(_Work):
        def hurry(self) -> None:
            asked.set()

    def put_more() -> None:
        assert asked.wait(60)
        queue.put(later)

    queue.put(First(put_more))
    assert queue.catch_up(60)
    assert not queue.catch_up(0.01)
    gate.set()
    queue.close()
    assert later.ran.is_set()


def test_whoever_waits_hurries_what_is_before_him() -> None:
    queue, gate = Queue("portus-test"), threading.Event()
    first, second, third = (_Work(gate.wait) for _ in range(3))  # type: ignore[arg-type]
    for work in (first, second):
        place = Turn()
        queue.admit(place)
        queue.put(work, place)
    assert not first.hurried
    assert not queue.admit(Turn(), 0.01)
    assert (first.hurried, second.hurried) == (True, False)
    queue.put(third)
    assert not queue.catch_up(0.01)
    assert second.hurried
    assert third.hurried
    gate.set()
    queue.close()


@pytest.mark.parametrize("wait", ["catch_up", "close"])
def test_work_put_when_ctrl_c_kept_its_thread_from_starting_still_runs(
    monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    queue, work = Queue("portus-test"), _Work()

    def ctrl_c(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            queue.put(work)
    getattr(queue, wait)()
    assert work.ran.is_set()
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
    for work in (dead, waiting):
        place = Turn()
        queue.admit(place)
        queue.put(work, place)
    gate.set()
    assert queue.catch_up(5)
    assert isinstance(dead.ended[0], SystemExit)
    assert isinstance(waiting.ended[0], SystemExit)
    after = _Work()
    for _ in range(SAVES_MAX):
        place = Turn()
        assert queue.admit(place, 1), "both places are free again"
    queue.put(after, place)
    queue.close()
    assert after.ran.is_set()


def test_an_idle_queue_has_no_thread_after_close() -> None:
    queue = Queue("portus-test")
    queue.put(_Work())
    queue.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "portus-test"]


def test_close_waits_for_a_thread_that_was_admitted_and_admits_no_other() -> None:
    queue, place = Queue("test"), Turn()
    admitted, go_on = threading.Event(), threading.Event()
    work = _Work()

    def save() -> None:
        own = Turn()
        assert queue.admit(own)
        admitted.set()
        assert go_on.wait(20)
        queue.put(work, own)

    saver = threading.Thread(target=save)
    saver.start()
    assert admitted.wait(20)
    closer = threading.Thread(target=queue.close)
    closer.start()
    while not queue._closing:
        time.sleep(0.001)
    with pytest.raises(UsageError, match="closed"):
        queue.admit(place)
    assert closer.is_alive()
    go_on.set()
    closer.join(20)
    saver.join(20)
    assert work.ran.is_set()
