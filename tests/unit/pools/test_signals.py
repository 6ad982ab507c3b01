"""Ctrl-C, SIGTERM, fork and spawn: no lock, thread or reservation is left, and saves go on (V8)."""

from __future__ import annotations

import _thread
import contextlib
import copy
import logging
import os
import pickle
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

from portus.engine.copying import native
from portus.engine.spec import PAGE
from portus.reach.pools.checkpointer import PoolCheckpointer
from tests.crash import saver
from tests.moments import WAIT_S_MAX, is_in, until
from tests.same import assert_same
from tests.unit.pools.stuck import Training, gated
from tests.warm import Warm

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only"),
    pytest.mark.timeout(90),
]


PRESSES = 1000
PRESS_S_MAX = 0.012
"""Seconds from the start of a step to Ctrl-C: a step and a save take about as long."""


class Run:
    """A training that saves through a gate. ``counts``: a part of its state is copied in the call
    of save; else all of it is copied late."""

    def __init__(self, path: Path, *, counts: bool = False) -> None:
        self.gate = gated(path)
        self.checkpointer = PoolCheckpointer(path)
        self.training = Training(counts=counts)
        self._step = 0
        for _ in range(5):  # then every commit takes the place of an older one
            self.save()
        self._used = self._finish()

    def save(self, *, synchronous: bool = False) -> None:
        """Train and save. May wait at the gate."""
        self.training.step()
        self._step += 1
        self.checkpointer.save(self.training.state(), self._step, synchronous=synchronous)

    def goes_on(self, *, lost: int, leaked: int = 0) -> None:
        """Open the gate: everything but ``lost`` saves comes to its end, no more than ``leaked``
        bytes stay reserved, and as many saves as may be in flight go through."""
        self.gate.open()
        self.checkpointer.wait(WAIT_S_MAX)
        committed = self.checkpointer.versions()[-1].commit
        assert committed >= self._step - lost
        for _ in range(3):
            self.save()
        assert self._finish() - self._used <= leaked
        assert self.checkpointer.steps() == [self._step - 1, self._step]
        assert_same(self.checkpointer.load(), copy.deepcopy(self.training.state()))

    def _finish(self) -> int:
        self.checkpointer.wait(WAIT_S_MAX)
        return self.gate.used()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool" / "run.portus"


@contextlib.contextmanager
def running(path: Path, *, counts: bool = False) -> Iterator[Run]:
    run = Run(path, counts=counts)
    try:
        yield run
    finally:
        run.gate.open()
        run.checkpointer.close()


def press_key(ident: int) -> None:
    """As a terminal does: what the thread waits in the kernel for is interrupted."""
    signal.pthread_kill(ident, signal.SIGINT)


def press_key_just_before_it_blocks(ident: int) -> None:
    """The signal is there, and nothing that the thread waits for is interrupted."""
    _thread.interrupt_main()


@contextlib.contextmanager
def ctrl_c(when: Callable[[], bool], press_it: Callable[[int], None] = press_key) -> Iterator[None]:
    """Inside, Ctrl-C is pressed once ``when`` holds; it must come out."""
    main = threading.main_thread()
    assert threading.current_thread() is main
    assert main.ident is not None

    def press(ident: int) -> None:
        until(when)
        press_it(ident)

    finger = threading.Thread(target=press, args=[main.ident])
    try:
        finger.start()
        yield
    except KeyboardInterrupt:
        finger.join()
    else:
        pytest.fail("Ctrl-C was not seen")


def in_main(function: str) -> Callable[[], bool]:
    return lambda: is_in(threading.main_thread(), function)


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("press", [press_key, press_key_just_before_it_blocks])
def test_ctrl_c_while_save_copies(
    path: Path, synchronous: bool, press: Callable[[int], None]
) -> None:
    with running(path, counts=True) as run:
        run.gate.shut()
        with ctrl_c(run.gate.reached.is_set, press):
            run.save(synchronous=synchronous)
        run.goes_on(lost=1)


@pytest.mark.parametrize("press", [press_key, press_key_just_before_it_blocks])
def test_ctrl_c_while_a_handle_is_waited_for(path: Path, press: Callable[[int], None]) -> None:
    with running(path) as run:
        run.gate.shut()
        run.save()
        with ctrl_c(in_main("result"), press):
            run.checkpointer.save(run.training.state(), 100).wait()
        run.goes_on(lost=0)


def test_ctrl_c_while_the_queue_is_full(path: Path) -> None:
    with running(path) as run:
        run.gate.shut()
        state = run.training.state()
        run.training.step()
        for step in (100, 101):
            run.checkpointer.save(state, step)
        with ctrl_c(in_main("admit")):
            run.checkpointer.save(state, 102)
        run.goes_on(lost=1)


def test_ctrl_c_while_all_saves_are_waited_for(path: Path) -> None:
    with running(path) as run:
        run.gate.shut()
        run.save()
        with ctrl_c(in_main("catch_up")):
            run.checkpointer.wait()
        run.goes_on(lost=0)


def test_ctrl_c_while_a_step_waits_at_the_fence(path: Path) -> None:
    with running(path) as run:
        run.gate.shut()
        run.save()
        assert run.gate.reached.wait(WAIT_S_MAX)
        with ctrl_c(in_main("release")):
            run.training.step()
        run.goes_on(lost=0)


def test_ctrl_c_while_closing_leaves_the_rest_to_a_second_close(path: Path) -> None:
    with running(path) as run:
        run.gate.shut()
        run.save()
        with ctrl_c(in_main("close")):
            run.checkpointer.close()
        run.gate.open()
        run.checkpointer.close()
    with PoolCheckpointer(path) as again:
        assert_same(again.load(), run.training.state())


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_moment_of_a_save_leaves_no_lock(path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    own = sys._getframe()

    def press(_: int, frame: FrameType | None) -> None:
        if frame is not own:  # in the library, or what it calls; not in this loop
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, press)
    pressed = 0
    try:
        with running(path, counts=True) as run:
            for number in range(PRESSES):
                try:
                    signal.setitimer(signal.ITIMER_REAL, random_.uniform(1e-4, PRESS_S_MAX))
                    run.save()
                    run.checkpointer.wait(WAIT_S_MAX)
                # RuntimeError: Python's own Condition.wait, interrupted just before it sleeps.
                except (KeyboardInterrupt, RuntimeError):
                    pressed += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                torch.set_grad_enabled(True)  # torch does not always put it back
                if number % 10 == 9:
                    for _ in range(3):  # as many as may be in flight, and one
                        run.save()
                    run.checkpointer.wait(WAIT_S_MAX)
            run.goes_on(lost=PRESSES, leaked=PRESSES // 50 * PAGE)
    finally:
        signal.signal(signal.SIGALRM, before)
    print(f"Ctrl-C pressed {pressed} times")
    assert pressed > PRESSES // 4


@pytest.mark.long
def test_sigterm_in_the_middle_of_saves_ends_the_process_and_leaves_a_whole_pool(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Warm("tests.crash.saver").start("save_for_ever", str(path), 1) as child:
        for _ in range(5):
            child.until("saved")
        child.send(signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
        reported = [int(line.split()[1]) for line in child.rest()]
    with caplog.at_level(logging.WARNING, "portus"), PoolCheckpointer(path) as checkpointer:
        assert not caplog.messages
        step = checkpointer.steps()[-1]
        assert step >= max(reported, default=5)
        assert_same(checkpointer.load(weights_only=False), saver.Training(step).state())


@pytest.mark.long
def test_a_program_that_ends_on_sigterm_finishes_what_it_asked_for(path: Path) -> None:
    with Warm("tests.crash.saver").start("save_until_told", str(path)) as child:
        for _ in range(5):
            step = int(child.until("asked").split()[1])
        child.send(signal.SIGTERM)
        assert child.wait() == 3
        step = max([step, *(int(line.split()[1]) for line in child.rest())])
    with PoolCheckpointer(path) as again:
        newest = again.steps()[-1]
        assert newest in (step, step + 1)
        assert_same(again.load(weights_only=False), saver.Training(newest).state())


@pytest.mark.long
def test_a_program_that_ends_while_a_thread_saves_ends_as_it_asked_to(path: Path) -> None:
    for number in range(6):
        pool = path.with_name(f"{number}.portus")
        with Warm("tests.crash.saver").start("end_while_a_thread_saves", str(pool)) as child:
            assert child.wait() == 5
            assert [line for line in child.rest() if line.startswith("told")] in (
                [],
                ["told: this Checkpointer is closed"],
            )
        with PoolCheckpointer(pool) as again:
            assert again.load(weights_only=False) is not None


@pytest.mark.long
def test_forked_children_leave_the_pool_to_their_parent(path: Path, tmp_path: Path) -> None:
    own = str(tmp_path / "own")
    with Warm("tests.crash.saver").start("fork_while_saving", str(path), own) as child:
        code = child.wait()
        assert child.rest() == ["child 0"] * 5
        assert code == 0


OF_C = pytest.param(
    "fork of C", marks=pytest.mark.skipif(native.helper() is None, reason="no helper in C")
)


@pytest.mark.parametrize("method", ["fork", OF_C, "spawn"])
def test_children_that_outlive_their_parent_hold_no_lock(
    path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Warm("tests.crash.saver").start("save_beside_a_child", str(path), method) as child:
        grandchild = int(child.until("child").split()[1])
        child.until("saved")
        child.kill()
    try:
        with caplog.at_level(logging.WARNING, "portus"), PoolCheckpointer(path) as checkpointer:
            assert not caplog.messages, "opened at once"
            found = checkpointer.load(weights_only=False)
            assert_same(found, saver.Training(checkpointer.steps()[-1]).state())
        os.kill(grandchild, 0)
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_checkpointer_is_not_sent_to_another_process(path: Path) -> None:
    with (
        PoolCheckpointer(path) as checkpointer,
        pytest.raises((TypeError, AttributeError), match="pickle"),
    ):
        pickle.dumps(checkpointer)
