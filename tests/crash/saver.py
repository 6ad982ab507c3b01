"""A training run all of whose state follows from its step, and processes that save it."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from portus.engine.copying import native
from portus.engine.job.settings import Settings
from portus.engine.paths.process import load
from portus.engine.pipeline.handle import SaveHandle
from portus.errors import BusyError, UsageError
from portus.reach.index.directory import WRITERS
from portus.reach.index.place import Place
from portus.reach.pools.checkpointer import PoolCheckpointer
from portus.reach.pools.view import PoolView
from portus.reach.training.training_files import TrainingFiles
from tests.nursery import Say
from tests.same import assert_same

KEEP = 3
SIZES = (1, 60, 3000, 9000)
"""Numbers in each of the weights: 94 KiB of them, and as much of momentum."""

_FROZEN = torch.arange(5000.0)


class Training:
    """At step n each momentum is n times its pattern, and each weight minus their sum: integers
    in float64, so exact. A buffer is n everywhere, an array is drawn from n, and a part is frozen.
    """

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self._patterns = [1 + torch.arange(size, dtype=torch.float64) % 97 for size in SIZES]
        total = step * (step + 1) // 2
        self._weights = [torch.nn.Parameter(-total * each) for each in self._patterns]
        self._buffer = torch.full((700,), step)
        self.optimizer = torch.optim.SGD(self._weights, lr=1.0, momentum=1.0, foreach=False)
        for weight, pattern in zip(self._weights, self._patterns, strict=True):
            weight.grad = pattern.clone()
            if step:
                self.optimizer.state[weight]["momentum_buffer"] = step * pattern

    def advance(self) -> None:
        """One step of a real optimizer: the fence holds it up as it does any other."""
        self.optimizer.step()
        self.step += 1
        self._buffer.fill_(self.step)

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "weights": {str(i): weight.detach() for i, weight in enumerate(self._weights)},
            "optimizer": self.optimizer.state_dict(),
            "buffer": self._buffer,
            "drawn": np.random.default_rng(self.step).integers(0, 1 << 30, 500),
            "frozen": _FROZEN,
            "note": f"step {self.step}",
        }


def resumed(checkpointer: PoolCheckpointer) -> Training:
    """The newest version, or the beginning."""
    if not checkpointer.steps():
        return Training()
    loaded = checkpointer.load(weights_only=False)
    training = Training(loaded["step"])
    checkpointer.restore_into(training.state(), weights_only=False)
    return training


def save_for_ever(say: Say, pool: str, ahead: int) -> None:
    """Resume, and save every step. A step is told once its save was reported, ``ahead`` saves
    after it was asked for."""
    say("begin")
    checkpointer = PoolCheckpointer(pool, keep=KEEP)
    training = resumed(checkpointer)
    say(f"resumed {training.step}")
    asked: deque[tuple[int, SaveHandle]] = deque()
    while True:
        training.advance()
        asked.append((training.step, checkpointer.save(training.state(), training.step)))
        if len(asked) > ahead:
            step, handle = asked.popleft()
            handle.wait()
            say(f"saved {step}")


def save_pointers_for_ever(say: Say, pool: str, folder: str) -> None:
    """As Lightning's top-k, at paths with the states in a pool: each step has a pointer of its own,
    the one before is removed, and "last" is replaced every time."""
    say("begin")
    files = pointers_to(pool, folder)
    last = f"{folder}/last.ckpt"
    step = load(last, weights_only=False)["step"] if os.path.exists(last) else 0
    training = Training(step)
    say(f"resumed {step}")
    for before in itertools.count(step):
        training.advance()
        handle = files.save(training.state(), last, training.step)
        own = files.save(training.state(), f"{folder}/{training.step}.ckpt", training.step)
        files.remove(f"{folder}/{before}.ckpt")
        handle.wait()
        own.wait()
        say(f"saved {training.step}")


def pointers_to(pool: str, folder: str) -> TrainingFiles:
    """What saves to a pool, with pointers in ``folder``."""
    files = TrainingFiles(Settings(on_error="raise"), pool=Place.parse(pool))
    files.begin("run", f"{folder}/../.portus", folder)
    return files


def save_until_told(say: Say, pool: str) -> None:
    """Save every step until SIGTERM, which this program takes for a wish to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    checkpointer = PoolCheckpointer(pool, keep=KEEP)
    training = resumed(checkpointer)
    while True:
        training.advance()
        checkpointer.save(training.state(), training.step)
        say(f"asked {training.step}")


def end_while_a_thread_saves(say: Say, pool: str) -> None:
    """The program ends, and a thread that nobody waits for saves on, copying in the call."""
    checkpointer = PoolCheckpointer(pool, keep=KEEP, snapshot="sync")
    state = {"x": torch.zeros(1 << 20)}

    def save() -> None:
        try:
            for step in itertools.count():
                checkpointer.save(state, step)
                if step == 3:
                    say("saves")
        except UsageError as error:
            say(f"told: {error}")

    threading.Thread(target=save, daemon=True).start()
    while not checkpointer.steps():
        time.sleep(0.001)
    sys.exit(5)


def save_beside_a_child(say: Say, pool: str, method: str) -> None:
    """Save for ever, with a child that was forked (by C too) or spawned while the pool was open."""
    checkpointer = PoolCheckpointer(pool, keep=KEEP)
    checkpointer.save(Training(1).state(), 1).wait()
    if method == "fork of C":
        say(f"child {_forked_by_c()}")
    else:
        context: Any = multiprocessing.get_context(method)
        child = context.Process(target=signal.pause, daemon=True)
        child.start()
        say(f"child {child.pid}")
    checkpointer.close()
    save_for_ever(say, pool, 0)


def _forked_by_c() -> int:
    """A child that Python knows nothing of."""
    pid = int(ctypes.PyDLL(None).fork())
    while pid == 0:
        signal.pause()
    return pid


def fork_while_saving(say: Say, pool: str, own: str) -> None:
    """Fork right after each of some saves; each child says what it can and cannot do."""
    checkpointer = PoolCheckpointer(pool, keep=KEEP)
    training = Training()
    for number in range(5):
        training.advance()
        handle = checkpointer.save(training.state(), training.step)
        child = os.fork()
        if child == 0:
            _in_fork(checkpointer, training, f"{own}/{number}")
            sys.exit(0)  # not os._exit: what runs at the end of a program runs in the child too
        _, status = os.waitpid(child, 0)
        handle.wait()
        say(f"child {os.waitstatus_to_exitcode(status)}")
    training.advance()
    checkpointer.save(training.state(), training.step).wait()
    assert_same(checkpointer.load(weights_only=False), training.state())
    checkpointer.close()


def _in_fork(checkpointer: PoolCheckpointer, training: Training, own: str) -> None:
    for call in (
        lambda: checkpointer.save({}, 1),
        checkpointer.load,
        checkpointer.wait,
        lambda: checkpointer.restore_into({}),
    ):
        with pytest.raises(UsageError, match="another process opened"):
            call()
    training.advance()  # nobody copies from here, so there is nothing to wait for
    with pytest.raises(BusyError, match=f"pid {os.getppid()} "):
        WRITERS.open(checkpointer.path, timeout_s=0)
    with PoolView(checkpointer.path) as view:
        assert len(view.steps()) <= KEEP + 1
    with PoolCheckpointer(f"{own}.portus") as mine:
        mine.save(training.state(), training.step)
        training.advance()
        assert_same(mine.load(weights_only=False), Training(training.step - 1).state())
    checkpointer.close()


def warm_up() -> None:
    """What torch and numpy import at the first step and the first save, and no thread."""
    torch.set_num_threads(1)
    Training().advance()
    np.unique(np.arange(2))
    native.helper()
