"""``python -m tests.hardware.bench_verbs``: what verbs on a DAX device reach, against ``perftest``.

A state of 64 MiB in 200 tensors is pulled one-sided from memory into the device, and pushed back,
in turns with ``ib_read_bw`` and ``ib_write_bw`` on the same link; medians. Flush and hash apart.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Final

import xxhash

from portus.media.dax import open_device
from portus.spec import Extent
from tests.hardware import verbs
from tests.hardware.conftest import DEVDAX

SIZE: Final = 64 << 20
TENSORS: Final = 200
ROUNDS: Final = 7


def main() -> None:
    """Print one line for each thing that was measured."""
    medium = open_device(DEVDAX, writable=True)
    whole = Extent(0, SIZE)
    device, place = verbs.devices()[0], medium.address(whole)
    took_s: dict[str, list[float]] = {}

    def measured(name: str, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        result = call()
        passed_s = result if isinstance(result, float) else time.perf_counter() - start
        took_s.setdefault(name, []).append(passed_s)

    with verbs.mapped(None, SIZE) as memory, verbs.pair(device) as (storage, trainer):
        ctypes.memmove(memory, os.urandom(SIZE), SIZE)
        pieces = list(itertools.pairwise(SIZE * n // TENSORS for n in range(TENSORS + 1)))
        tensors = [trainer.register(memory + a, b - a) for a, b in pieces]
        stored = [storage.register(place + a, b - a) for a, b in pieces]
        remotes = [tensor.remote for tensor in tensors]
        for _ in range(ROUNDS):
            measured("pull", lambda: storage.move_all(verbs.READ, stored, remotes))
            assert ctypes.string_at(place, SIZE) == ctypes.string_at(memory, SIZE)
            measured("flush", lambda: medium.persist([whole]))
            measured("hash", lambda: xxhash.xxh3_128(ctypes.string_at(place, SIZE)).digest())
            measured("ib_read_bw", lambda: perftest("ib_read_bw", device))
            measured("push", lambda: storage.move_all(verbs.WRITE, stored, remotes))
            measured("ib_write_bw", lambda: perftest("ib_write_bw", device))
    medium.close()
    for name, times in took_s.items():
        median = statistics.median(times)
        span = f"{min(times):.3f} to {max(times):.3f}"
        print(f"{name:12} {median:.3f} s ({span}), {SIZE / median / (1 << 20):.0f} MiB/s")


def perftest(program: str, device: str) -> float:
    """Seconds for ``SIZE`` bytes, at the average speed that ``program`` tells of itself."""
    count = SIZE // verbs.PIECE
    command = [program, "-d", device, "-x", "1", "-s", str(verbs.PIECE), "-n", str(count), "-F"]
    command += ["-t", str(verbs.DEPTH)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(1)  # it does not say when it listens
        done = subprocess.run(
            [*command, "127.0.0.1"], stdout=subprocess.PIPE, text=True, check=True, timeout=120
        )
    finally:
        server.kill()
        server.wait()
    row = next(line for line in done.stdout.splitlines() if line.split()[:1] == [str(verbs.PIECE)])
    return SIZE / (float(row.split()[3]) * (1 << 20))


if __name__ == "__main__":
    main()
