"""Clients of one storage host, each a process, that save all at once.

python -m tests.bench.clients URL SECONDS COUNT:SIZE[:BESIDE]...

For each COUNT:SIZE a line of JSON: how many saves, of how many bytes together, in which time, and
how long each took, in seconds. BESIDE: bytes of a client more, which saves without a pause and is
not counted. Clients are forked, so that torch is imported once.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import torch

import portus

WARMUPS = 2


def save_for(
    url: str, number: int, size: int, seconds: float, start: Barrier, told: Connection
) -> None:
    """Save as often as it goes; tell how long each save took."""
    torch.set_num_threads(1)
    state = {"x": torch.full((size // 4,), float(number))}
    took: list[float] = []
    with portus.PoolCheckpointer(url, f"client-{number}", keep=1, on_error="raise") as checkpointer:
        for step in range(WARMUPS):
            checkpointer.save(state, step).wait()
        start.wait()
        begin = end = time.monotonic()
        while end - begin < seconds:
            state["x"].add_(1.0)
            before = time.monotonic()
            checkpointer.save(state, len(took) + WARMUPS).wait()
            end = time.monotonic()
            took.append(end - before)
        told.send((begin, end, took))


def measured(url: str, count: int, size: int, beside: int, seconds: float) -> dict[str, Any]:
    """What ``count`` clients did at once."""
    fork = multiprocessing.get_context("fork")
    sizes = [size] * count + [beside] * (beside > 0)
    start, pipes, clients = fork.Barrier(len(sizes)), [], []
    for number, own in enumerate(sizes):
        near, far = fork.Pipe(duplex=False)
        arguments = (url, number, own, seconds, start, far)
        clients.append(fork.Process(target=save_for, args=arguments))
        clients[-1].start()
        far.close()
        pipes.append(near)
    results = [pipe.recv() for pipe in pipes][:count]
    for client in clients:
        client.join()
    took = [each for _, _, own in results for each in own]
    wall_s = max(end for _, end, _ in results) - min(begin for begin, _, _ in results)
    return {
        "count": count,
        "size": size,
        "saves": len(took),
        "bytes": len(took) * size,
        "wall_s": wall_s,
        "took_s": took,
    }


def main() -> None:
    url, seconds, *configurations = sys.argv[1:]
    gc.freeze()
    for text in configurations:
        count, size, beside = map(int, f"{text}:0".split(":")[:3])
        print(json.dumps(measured(url, count, size, beside, float(seconds))), flush=True)


if __name__ == "__main__":
    main()
