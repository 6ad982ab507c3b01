"""``python -m tests.hardware.bench_verbs``: a storage host with verbs, against ``perftest``.

A state of 64 MiB in 200 tensors is saved to a pool on a DAX device and restored from it, in turns
with ``ib_read_bw`` and ``ib_write_bw`` on the same link; medians. What counts is the *wire*: from
the host's first request to its last completion. Flush, hash and commit are told apart.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from dataclasses import replace
from typing import Final

import numpy as np
import xxhash

from portus.engine.copying.segments import memory
from portus.engine.media.base import MappedMedium
from portus.engine.settings.keep import Keep
from portus.engine.spec import Extent
from portus.reach.daemon.counters import COUNTED
from portus.reach.index.directory import format_device
from portus.reach.media.local import LocalFiles
from portus.reach.versions.host import HostPool
from tests.hardware import verbs
from tests.hardware.conftest import DEVDAX
from tests.hardware.states import loaded, saved, snapshot_of, state_of
from tests.hosts import serving, url

SIZE: Final = 64 << 20
TENSORS: Final = 200
ROUNDS: Final = 7
BAR: Final = 0.8
_TRIES: Final = 20


def main() -> None:
    """Print one line for each thing that was measured, and the two ratios."""
    os.environ["PORTUS_TRANSPORT"] = "verbs"
    format_device(DEVDAX, LocalFiles(), force=True)
    took_s: dict[str, list[float]] = {}
    state = state_of(SIZE, TENSORS)
    targets = [np.zeros_like(each) for each in state]
    device = verbs.devices()[0]
    with serving(DEVDAX) as server:
        counters, hosted = server.house.counters, server.house.pools.of("default")
        medium = hosted.writer.medium
        assert isinstance(medium, MappedMedium)
        some = Extent(medium.size - SIZE, SIZE)

        def note(name: str, seconds: float) -> None:
            took_s.setdefault(name, []).append(seconds)

        pool = HostPool(url(server), "run")
        assert saved(pool, snapshot_of(state, 0)).bounced_bytes == 0  # registers
        for step in range(1, ROUNDS + 1):
            before = {name: counters.counts[name] for name in COUNTED}
            flushed_s = hosted.writer.persist_s
            stats = saved(pool, replace(snapshot_of(state, step), keep=Keep(last=1)))
            note("flush", hosted.writer.persist_s - flushed_s)
            after = {name: counters.counts[name] for name in COUNTED}
            assert after["bounced_bytes"] == 0
            note("pull, wire", after["wire_seconds"] - before["wire_seconds"])
            note("pull, wire and hash", after["pull_seconds"] - before["pull_seconds"])
            note("commit", after["commit_seconds"] - before["commit_seconds"])
            note("save, all of it", stats.total_s)
            note("ib_read_bw", perftest("ib_read_bw", device))
            begin_s = time.perf_counter()
            medium.persist([some])
            note("flush of 64 MiB", time.perf_counter() - begin_s)
            begin_s = time.perf_counter()
            xxhash.xxh3_128(memory(medium.address(some), SIZE)).digest()
            note("hash of 64 MiB", time.perf_counter() - begin_s)
            before = {name: counters.counts[name] for name in COUNTED}
            assert loaded(pool, targets, step)
            note("push, wire", counters.counts["wire_seconds"] - before["wire_seconds"])
            note("ib_write_bw", perftest("ib_write_bw", device))
        pool.close()
    medians = {name: statistics.median(times) for name, times in took_s.items()}
    for name, times in took_s.items():
        span = f"{min(times):.3f} to {max(times):.3f}"
        speed = SIZE / medians[name] / (1 << 20)
        print(f"{name:20} {medians[name]:.3f} s ({span}), {speed:.0f} MiB/s")
    for name, other in (("pull, wire", "ib_read_bw"), ("push, wire", "ib_write_bw")):
        ratio = medians[other] / medians[name]
        print(f"{name} / {other}: {ratio:.2f} of its speed (bar: {BAR})")
    print(json.dumps(took_s))


def perftest(program: str, device: str) -> float:
    """Seconds for ``SIZE`` bytes, at the average speed that ``program`` tells of itself."""
    count = SIZE // verbs.PIECE
    command = [program, "-d", device, "-x", "1", "-s", str(verbs.PIECE), "-n", str(count), "-F"]
    command += ["-t", str(verbs.DEPTH)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(_TRIES):
            time.sleep(1)  # it does not say when it listens
            done = subprocess.run([*command, "127.0.0.1"], capture_output=True, text=True)
            if done.returncode == 0:
                break
        else:
            raise OSError(f"{program}: {done.stderr}")
    finally:
        server.kill()
        server.wait()
    row = next(line for line in done.stdout.splitlines() if line.split()[:1] == [str(verbs.PIECE)])
    return SIZE / (float(row.split()[3]) * (1 << 20))


if __name__ == "__main__":
    main()
