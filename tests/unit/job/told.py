"""Trainings that are told to go; for the nursery."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import portus
from tests.nursery import Say


def hang(say: Say, place: str, how: str) -> None:
    """Saves one step and does not come to the end of the next."""
    os.dup2(1, 2)  # the log too
    with portus.Preemption("0.2s"), portus.PoolCheckpointer(f"{place}/pool.portus", "net") as saves:
        saves.save({"weight": torch.ones(10)}, 7).wait()
        thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)
        thread.start()
        say("hangs")
        if how == "in C":
            # No signal interrupts this, so no handler of Python's ever runs.
            ctypes.CDLL(None).pthread_join(ctypes.c_ulong(thread.ident or 0), None)
        thread.join()


def hang_in_the_log(say: Say) -> None:
    """A record is being written, to where nobody reads."""
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    with portus.Preemption("0.2s"):
        assert handler.lock is not None
        with handler.lock:
            say("hangs")
            threading.Event().wait()


def close_elsewhere(_: Say, place: str) -> None:
    """Hears signals no more, since another thread said so; opens files, and is told to go."""
    preemption = portus.Preemption().start()
    (watch,) = (each for each in threading.enumerate() if each.name == "portus-preemption")
    closing = threading.Thread(target=preemption.close)
    closing.start()
    closing.join()
    watch.join()
    for number in range(16):
        os.open(f"{place}/{number}", os.O_WRONLY | os.O_CREAT)
    signal.raise_signal(signal.SIGTERM)


def two_ranks(_: Say, place: str) -> None:
    """Rank 1 is a child of rank 0. What each of them found is in ``place``, by rank."""
    child = os.fork()
    rank = 0 if child else 1
    dist.init_process_group("gloo", f"file://{place}/store", rank=rank, world_size=2)
    found: dict[str, object] = {
        "step": leaves_at_step(rank, told=0),
        "other": leaves_at_step(rank, told=1),
        "nobody": leaves_at_step(rank, told=None),
        "validation": leaves_in_validation(rank, batches=(3, 400)),
        "after": leaves_in_validation(rank, batches=(400, 3)),
    }
    found["cost_us"] = cost_us()
    with portus.Preemption() as preemption:
        found["anew"] = int(preemption.should_leave())
        dist.destroy_process_group()
        dist.init_process_group("gloo", f"file://{place}/anew", rank=rank, world_size=2)
    Path(place, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def leaves_at_step(rank: int, told: int | None) -> int:
    """The step at which this rank leaves, if rank ``told`` is told in step 5 of 20."""
    with portus.Preemption() as preemption:
        for step in range(1, 21):
            if step == 5 and rank == told:
                signal.raise_signal(signal.SIGUSR1)
            if preemption.should_leave():
                return step
    return 0


def leaves_in_validation(rank: int, batches: tuple[int, int]) -> list[int]:
    """A validation follows each step; in the third, rank 1 is told in its last batch but one. The
    step that this rank left after, and whether that was in the validation."""
    with portus.Preemption() as preemption:
        for step in range(1, 20):
            if preemption.should_leave():
                return [step, 0]
            for batch in range(batches[rank]):
                if preemption.should_leave_validation():
                    return [step, 1]
                if step == 3 and rank == 1 and batch == batches[rank] - 2:
                    signal.raise_signal(signal.SIGTERM)
            if preemption.validation_ends():
                return [step, 1]
    return [0, 0]


def cost_us(steps: int = 200, step_s: float = 1e-3) -> float:
    """What a step waits for, on the mean, in steps that take a little."""
    spent = 0.0
    with portus.Preemption() as preemption:
        for _ in range(steps):
            time.sleep(step_s)
            start = time.perf_counter()
            preemption.should_leave()
            spent += time.perf_counter() - start
    return spent / steps * 1e6
