"""A job is told to go: real signals, real processes."""

from __future__ import annotations

import json
import logging
import multiprocessing
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import portus
from portus.companions.job import preemption as module
from portus.errors import UsageError
from tests.warm import Warm

SIGNALS = [signal.SIGTERM, signal.SIGUSR1]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_the_step_that_a_signal_came_in_is_the_last(number: signal.Signals) -> None:
    heard: list[int] = []
    times = portus.times_preempted()
    before = signal.signal(number, lambda number, _: heard.append(number))
    try:
        theirs = signal.getsignal(number)
        with portus.Preemption() as preemption:
            cadence = portus.Cadence(1000, preemption=preemption)
            found = []
            for step in range(4):
                if step == 2:
                    signal.raise_signal(number)
                found.append(cadence.should_save())
            assert found == [False, False, True, True]
            assert preemption.leaving
            assert preemption.told is number
            assert portus.times_preempted() == times + 1
        assert heard == [number], "whoever had a handler is called"
        assert signal.getsignal(number) is theirs
        signal.raise_signal(number)
        assert heard == [number, number]
    finally:
        signal.signal(number, before)
    assert module._open == ()
    assert signal.set_wakeup_fd(-1) == -1


def test_a_child_is_ended_by_its_signal_and_its_parent_hears_nothing() -> None:
    with portus.Preemption() as preemption:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        child.terminate()
        child.join(10)
        assert child.exitcode == -signal.SIGTERM
        assert not preemption.should_leave()


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="SIGINT is Ctrl-C"):
        portus.Preemption(signals=[signal.SIGINT])
    for value in (0, -1, "soon", True):
        with pytest.raises(UsageError, match="preempt_within: expected"):
            portus.Preemption(value)


def test_what_is_told_after_the_end_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "portus")
    preemption = portus.Preemption(signals=())
    preemption.note(signal.SIGTERM)
    assert not preemption.should_leave()
    with preemption.start():
        pass
    preemption.note(signal.SIGTERM)
    assert not preemption.should_leave()
    assert not caplog.messages


def test_who_asked_to_be_woken_meanwhile_still_is() -> None:
    ears, mouth = socket.socketpair()
    mouth.setblocking(False)
    with ears, mouth:
        with portus.Preemption():
            signal.set_wakeup_fd(mouth.fileno())  # as event loops do
        assert signal.set_wakeup_fd(-1) == mouth.fileno()


def test_closed_on_another_thread_it_gives_way(tmp_path: Path) -> None:
    with Warm("tests.unit.job.told").start("close_elsewhere", str(tmp_path)) as child:
        assert child.wait() == -signal.SIGTERM, "a signal ends the process again"
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b""] * 16


@pytest.mark.parametrize("how", ["in Python", "in C"])
def test_a_training_that_hangs_is_ended_after_a_time(tmp_path: Path, how: str) -> None:
    with Warm("tests.unit.job.told").start("hang", str(tmp_path), how) as child:
        child.until("hangs")
        start = time.monotonic()
        child.send(signal.SIGTERM)
        assert child.wait() == 128 + signal.SIGTERM
        assert time.monotonic() - start < 20
        said = "\n".join(child.rest())
    assert "0.2 s after SIGTERM the training has not left" in said
    assert said.count("The newest committed version is step 7 of model 'net'") == 1


@pytest.mark.long
def test_a_log_that_hangs_holds_nothing_up_for_long() -> None:
    with Warm("tests.unit.job.told").start("hang_in_the_log") as child:
        child.until("hangs")
        child.send(signal.SIGTERM)
        assert child.wait() == 128 + signal.SIGTERM


@pytest.mark.long
def test_all_ranks_leave_at_the_same_step_whichever_was_told(tmp_path: Path) -> None:
    with Warm("tests.unit.job.told").start("two_ranks", str(tmp_path)) as child:
        assert child.wait() == 0
    found: list[dict[str, Any]] = [
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)
    ]
    for each in found:
        assert each["step"] == 6, "begun at the step that it came in, read at the next"
        assert each["other"] == 6
        assert each["nobody"] == 0
        assert each["validation"] == [3, 1], "rank 0 has few batches, and waits at their end"
        assert each["after"] == [3, 1]
        assert each["anew"] == 0
    print(f"{found[1]['cost_us']:.0f} us a step")


def test_at_its_end_its_thread_has_ended() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.05)  # or it is lucky
    try:
        for _ in range(20):
            with portus.Preemption():
                pass
            assert "portus-preemption" not in [each.name for each in threading.enumerate()]
    finally:
        sys.setswitchinterval(interval)
