"""A signal handler calls Portus while it has interrupted a call of Portus: files that load, nothing
waits for itself, and what was asked for before does not undo it (V5, V8)."""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import portus
from portus.client.fence.snapshot import Snapshots
from portus.client.files import reference
from portus.client.files.keeper import Keeper
from portus.client.pool_checkpointer import PoolCheckpointer
from portus.errors import MediumError, UsageError
from portus.index.pool import PoolWriter
from portus.pipeline.queue import Queue
from tests.moments import Lines, at
from tests.unit.client.same import assert_same
from tests.unit.client.stuck import WAIT_S_MAX, Training, gated

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only"),
    pytest.mark.timeout(60),
]

Act = Callable[[], object]


@contextlib.contextmanager
def handled_by(act: Act) -> Iterator[Act]:
    """What is given sends this process a signal, whose handler does ``act``, and is over with it
    when it returns. What ``act`` raises comes out of what it interrupted."""
    before = signal.signal(signal.SIGUSR1, lambda number, frame: act())
    try:
        yield lambda: signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def interrupted(moment: Any, call: Act, act: Act) -> list[Any]:
    """What ``act`` returned, or raised, in a handler that interrupted ``call`` where it calls
    ``moment``."""
    found: list[Any] = []

    def note() -> None:
        assert portus.is_nested()
        try:
            found.append(act())
        except UsageError as error:
            found.append(error)

    with handled_by(note) as send, at("call", moment, send):
        call()
    assert not portus.is_nested()
    return found


# Where locks are held: of the snapshot, the pool, the keeper, the queue.
MOMENTS = [Snapshots.take, PoolWriter.ensure, Keeper.is_new, Keeper.place, Queue.put]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__qualname__)
def test_a_save_within_a_save_is_a_real_file_when_it_returns(tmp_path: Path, moment: Any) -> None:
    inner = tmp_path / "new" / "signal.ckpt"
    with PoolCheckpointer(tmp_path / "pool") as checkpointer:
        state = Training(counts=True).state()

        def save() -> Any:
            handle = checkpointer.save(state, 7, reference=inner, synchronous=True)
            assert handle.done
            assert handle.committed
            assert not portus.is_reference(inner)
            assert_same(torch.load(inner), state)
            checkpointer.wait()
            return handle.wait()

        def outer() -> None:
            checkpointer.save(state, 1, reference=tmp_path / "outer.ckpt")

        found = interrupted(moment, outer, save)
        assert (found[0].step, found[0].id, found[0].commit) == (7, 0, 0)
        checkpointer.wait()
        assert checkpointer.steps() == [1]
        assert_same(torch.load(tmp_path / "outer.ckpt"), state)


def test_without_a_path_a_save_within_a_save_says_what_to_do(tmp_path: Path) -> None:
    with PoolCheckpointer(tmp_path / "pool") as checkpointer:
        found = interrupted(
            Keeper.is_new,
            lambda: checkpointer.save({"a": 1}, 1, reference=tmp_path / "outer.ckpt"),
            lambda: checkpointer.save({"a": 2}, 2),
        )
        assert isinstance(found[0], UsageError)
        assert "reference=" in str(found[0])
        checkpointer.wait()
        assert checkpointer.steps() == [1]


def test_a_file_that_cannot_be_written_is_an_error_and_what_was_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"as before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(MediumError, match="File too large") as met:
            portus.write_file({"a": torch.zeros(1 << 20)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert met.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert path.read_bytes() == b"as before"


def test_parts_of_a_save_within_a_save_are_files_each(tmp_path: Path) -> None:
    paths = {str(tmp_path / "x.bin"): "x", str(tmp_path / "y.bin"): "y"}
    with PoolCheckpointer(tmp_path / "pool") as checkpointer:
        interrupted(
            Snapshots.take,
            lambda: checkpointer.save({"x": 1, "y": 2}, 1, reference=paths),
            lambda: checkpointer.save({"x": 3, "y": 4}, 2, reference=paths),
        )
        checkpointer.wait()
        assert [torch.load(path) for path in paths] == [3, 4]
        assert checkpointer.load(1) == {"x": 1, "y": 2}


@pytest.mark.parametrize(
    ("moment", "there"),
    [*itertools.product((Snapshots.take, Queue.put), (False, True)), (reference.place, False)],
    ids=lambda each: getattr(each, "__qualname__", None) or ("there" if each else "new"),
)
@pytest.mark.parametrize("links", [True, False], ids=["links", "copies"])
def test_what_was_asked_for_before_does_not_replace_it(
    tmp_path: Path, moment: Any, there: bool, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "last.ckpt"
    gate = gated(tmp_path / "run.portus")
    with PoolCheckpointer(tmp_path / "run.portus", keep=1) as checkpointer:
        at_first = path if there else tmp_path / "another.ckpt"
        checkpointer.save({"step": 0}, 0, reference=at_first, synchronous=True)
        gate.shut()
        try:
            checkpointer.save({"step": 1}, 1, reference=at_first)
            interrupted(
                moment,
                lambda: checkpointer.save({"step": 2}, 2, reference=path),
                lambda: checkpointer.save({"step": 3}, 3, reference=path),
            )
        finally:
            gate.open()
        checkpointer.wait(WAIT_S_MAX)
        assert torch.load(path) == {"step": 3}
        assert not portus.is_reference(path)
        checkpointer.save({"step": 4}, 4, reference=path, synchronous=True)
        assert torch.load(path) == {"step": 4}
        checkpointer.save({"step": 5}, 5, reference=path, synchronous=True)
        assert checkpointer.steps() == ([5] if there else [1, 5]), (
            "nothing holds what the file led to before"
        )
        assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def no_links(*_: object, **__: object) -> None:
    raise OSError(1, "no hard links here")


def test_a_removal_asked_for_before_does_not_remove_it_and_one_after_does(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    gate = gated(tmp_path / "run.portus")
    with PoolCheckpointer(tmp_path / "run.portus", keep=1) as checkpointer:
        checkpointer.save({"step": 1}, 1, reference=path, synchronous=True)
        gate.shut()
        checkpointer.save({"step": 2}, 2)
        checkpointer.remove(path)
        interrupted(
            Queue.put,
            lambda: checkpointer.remove(tmp_path / "another"),
            lambda: checkpointer.save({"step": 3}, 3, reference=path),
        )
        gate.open()
        checkpointer.wait(WAIT_S_MAX)
        assert torch.load(path) == {"step": 3}
        interrupted(
            Queue.put,
            lambda: checkpointer.save({"step": 4}, 4),
            lambda: checkpointer.remove(path),
        )
        checkpointer.wait(WAIT_S_MAX)
        assert not path.exists()


def test_loads_within_a_save_find_what_is_committed_or_say_why_not(tmp_path: Path) -> None:
    done, coming = tmp_path / "done.ckpt", tmp_path / "coming.ckpt"
    gate = gated(tmp_path / "run.portus")
    with PoolCheckpointer(tmp_path / "run.portus") as checkpointer:
        checkpointer.save({"step": 1}, 1, reference=done, synchronous=True)
        gate.shut()
        checkpointer.save({"step": 2}, 2, reference=coming)

        def load() -> list[Any]:
            found: list[Any] = []
            for each in (
                lambda: torch.load(done),
                lambda: portus.load_reference(done),
                checkpointer.load,
                checkpointer.steps,
                lambda: torch.load(coming),
                lambda: checkpointer.load(2),
                lambda: checkpointer.restore_into({"step": 0}),
                checkpointer.wait,
                checkpointer.fence,
                checkpointer.close,
                lambda: PoolCheckpointer(tmp_path / "another.portus"),
                lambda: portus.mend(tmp_path),
                lambda: portus.materialize(done),
            ):
                try:
                    found.append(each())
                except UsageError as error:
                    found.append(error)
            return found

        found = interrupted(
            Snapshots.take, lambda: checkpointer.save({"step": 3}, 3, reference=coming), load
        )[0]
        gate.open()
        assert found[:4] == [{"step": 1}, {"step": 1}, {"step": 1}, [1]]
        assert all(isinstance(each, UsageError) for each in found[4:])
        assert all("signal handler" in str(each) for each in (found[4], *found[6:]))
        checkpointer.wait(WAIT_S_MAX)
        assert torch.load(coming) == {"step": 3}


@pytest.mark.long
def test_a_step_of_a_handler_does_not_wait_for_the_save_that_it_interrupted(
    tmp_path: Path,
) -> None:
    gate = gated(tmp_path / "run.portus")
    with PoolCheckpointer(tmp_path / "run.portus") as checkpointer:
        training = Training()
        for step in range(3):
            checkpointer.save(training.state(), step, synchronous=True)
            training.step()
        gate.shut()
        handle = checkpointer.save(training.state(), 3)
        interrupted(
            Keeper.is_new,
            lambda: checkpointer.save(training.state(), 4, reference=tmp_path / "x.ckpt"),
            training.step,
        )
        gate.open()
        with pytest.raises(portus.AbandonedError, match="fence_timeout"):
            handle.wait(WAIT_S_MAX)


def test_a_handler_that_interrupted_nothing_of_ours_saves_to_the_pool(tmp_path: Path) -> None:
    path = tmp_path / "signal.ckpt"
    with PoolCheckpointer(tmp_path / "pool") as checkpointer:

        def save() -> None:
            assert not portus.is_nested()
            checkpointer.save({"step": 1}, 1, reference=path, synchronous=True)

        with handled_by(save) as send:
            send()
        assert portus.is_reference(path)
        assert checkpointer.steps() == [1]


# --- at any line ----------------------------------------------------------------------------


def train(steps: int, saves: Callable[[int, Training], None]) -> Training:
    torch.manual_seed(0)
    training = Training(counts=True)
    for step in range(steps):
        training.step()
        saves(step, training)
    return training


def search(path: Path, seed: int, signals: int) -> None:
    """A signal at another line of another call of ours in each step of a training."""
    random_ = random.Random(seed)
    expected: dict[Path, Any] = {}
    lengths: dict[str, int] = {}
    fired = nested = 0
    with PoolCheckpointer(path / "pool", keep=2) as checkpointer:
        training: Training
        kinds: dict[str, Callable[[int, Any], object]] = {
            "new": lambda step, state: checkpointer.save(state, step, reference=path / f"{step}"),
            "again": lambda step, state: checkpointer.save(state, step, reference=path / "last"),
            "sync": lambda step, state: checkpointer.save(state, step, synchronous=True),
            "remove": lambda step, state: checkpointer.remove(path / f"{step - 3}"),
            "wait": lambda step, state: checkpointer.wait(),
            "load": lambda step, state: checkpointer.load(),
        }

        def handle() -> None:
            nonlocal fired, nested
            nested += portus.is_nested()
            target = path / f"signal-{fired}.ckpt"
            checkpointer.save(training.state(), 1000 + fired, reference=target, synchronous=True)
            assert portus.is_reference(target) != portus.is_nested()
            expected[target] = copy.deepcopy(training.state())
            fired += 1

        def call(step: int, now: Training) -> None:
            nonlocal training
            training = now
            name = random_.choice(list(kinds))
            length = lengths.get(name, 0)
            with handled_by(handle) as send:
                lines = Lines(random_.randrange(length) if length else -1, send)
                with lines:
                    kinds[name](step, now.state())
            lengths[name] = lines.count

        checkpointer.save(train(1, lambda step, now: None).state(), 0)
        done = train(3 * signals, lambda step, now: call(step, now) if fired < signals else None)
    print(f"{fired} signals, {nested} of them within a call that holds locks")
    assert fired == signals
    assert nested > signals // 2
    assert_same(done.state(), train(3 * signals, lambda step, now: None).state())
    for target, state in expected.items():
        assert_same(torch.load(target), state)


@pytest.mark.long
def test_a_signal_at_any_line_of_a_call_leaves_a_file_and_no_lock(
    tmp_path: Path, seed: int
) -> None:
    search(tmp_path, seed, 30)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_200_signals_at_any_line_leave_200_files(tmp_path: Path, seed: int) -> None:
    search(tmp_path, seed, 200)
