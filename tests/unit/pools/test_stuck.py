"""A medium that gets stuck costs versions, and never the training (V8, design: the fence)."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from portus.errors import AbandonedError
from portus.reach.pools.checkpointer import PoolCheckpointer
from tests.moments import WAIT_S_MAX, is_in, until
from tests.same import assert_same
from tests.unit.pools.stuck import Gate, Training, gated

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only"),
    pytest.mark.timeout(60),
]

FENCE_S = 0.2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool" / "run.portus"


@pytest.fixture
def gate(path: Path) -> Iterator[Gate]:
    gate = gated(path)
    yield gate
    gate.open()


@pytest.fixture
def checkpointer(gate: Gate, path: Path) -> Iterator[PoolCheckpointer]:
    with PoolCheckpointer(path, fence_timeout=FENCE_S) as opened:
        yield opened
        gate.open()


@pytest.mark.long
def test_a_stuck_medium_costs_the_version_and_not_the_training(
    checkpointer: PoolCheckpointer, gate: Gate
) -> None:
    training = Training()
    checkpointer.save(training.state(), 1).wait(WAIT_S_MAX)
    training.step()
    gate.shut()
    lost = checkpointer.save(training.state(), 2)
    assert gate.reached.wait(WAIT_S_MAX)
    for _ in range(20):
        training.step()
    assert lost.stats.fence_s >= FENCE_S
    with pytest.raises(AbandonedError, match="fence_timeout"):
        lost.wait(0)
    gate.open()
    after = copy.deepcopy(training.state())
    assert checkpointer.save(training.state(), 3).wait(WAIT_S_MAX).step == 3
    assert checkpointer.steps() == [1, 3]
    assert_same(checkpointer.load(), after)


@pytest.mark.long
def test_training_goes_on_while_a_medium_stays_stuck(
    checkpointer: PoolCheckpointer, gate: Gate
) -> None:
    training = Training()
    checkpointer.save(training.state(), 0).wait(WAIT_S_MAX)
    training.step()
    gate.shut()
    lost = []
    for step in range(1, 6):
        lost.append(checkpointer.save(training.state(), step))
        training.step()
    for handle in lost:
        with pytest.raises(AbandonedError):
            handle.wait(0)
    gate.open()
    checkpointer.wait(WAIT_S_MAX)
    after = copy.deepcopy(training.state())
    checkpointer.save(training.state(), 6).wait(WAIT_S_MAX)
    assert checkpointer.steps() == [0, 6]
    assert_same(checkpointer.load(), after)


def copier_of(name: str) -> threading.Thread:
    (thread,) = (each for each in threading.enumerate() if each.name == f"portus-{name}")
    return thread


def kill_thread(thread: threading.Thread, kind: type[BaseException]) -> None:
    """Raise ``kind`` in ``thread`` as soon as it runs again."""
    assert thread.ident is not None
    number, kind_ = ctypes.c_ulong(thread.ident), ctypes.py_object(kind)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(number, kind_) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [SystemExit, MemoryError])
def test_a_copier_that_dies_costs_what_was_asked_for_and_nothing_else(
    checkpointer: PoolCheckpointer, gate: Gate, kind: type[BaseException]
) -> None:
    training = Training()
    checkpointer.save(training.state(), 1).wait(WAIT_S_MAX)
    training.step()
    gate.shut()
    copied, queued = (checkpointer.save(training.state(), step) for step in (2, 3))
    assert gate.reached.wait(WAIT_S_MAX)
    copier = copier_of("files")
    kill_thread(copier, kind)
    gate.open()
    with pytest.raises(AbandonedError, match=kind.__name__):
        copied.wait(WAIT_S_MAX)
    if kind is SystemExit:
        copier.join(WAIT_S_MAX)
        with pytest.raises(AbandonedError, match="SystemExit"):
            queued.wait(WAIT_S_MAX)
    training.step()
    for step in (4, 5):
        checkpointer.save(training.state(), step).wait(WAIT_S_MAX)
    assert checkpointer.steps() == [4, 5]
    assert_same(checkpointer.load(), training.state())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_copier_that_dies_between_two_saves_holds_nobody_up(
    checkpointer: PoolCheckpointer,
) -> None:
    training = Training()
    checkpointer.save(training.state(), 1).wait(WAIT_S_MAX)
    copier = copier_of("files")
    until(lambda: is_in(copier, "wait"))
    kill_thread(copier, SystemExit)
    handle = checkpointer.save(training.state(), 2)
    with contextlib.suppress(AbandonedError):
        handle.wait(WAIT_S_MAX)
    copier.join(WAIT_S_MAX)
    checkpointer.save(training.state(), 3).wait(WAIT_S_MAX)
    assert checkpointer.steps()[-1] == 3
    assert_same(checkpointer.load(), training.state())
