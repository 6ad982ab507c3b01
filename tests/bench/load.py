"""Rows about a storage host under load: 1 to 64 clients that save all at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.hosting import Watched
from tests.bench.measure import Row
from tests.bench.saving import MIB
from tests.hosts import ROOT

CLIENTS = (1, 4, 16, 64)
BIG = 8 * MIB
SMALL = 64 << 10
FEW = 10
HUGE = 256 * MIB
SECONDS = 2.0


def load_rows(memory: Path, disk: Path, rounds: int) -> Iterator[Row]:
    """Bytes a second of all clients together; the slowest of a hundred small saves; and of those
    beside a client that saves much."""
    yield _beside_row(memory, rounds)
    for name, place, sizes in (("tmpfs", memory, (BIG, SMALL)), ("disk", disk, (SMALL,))):
        wanted = [f"{count}:{size}" for size in sizes for count in CLIENTS]
        with Watched(place / "hosted") as watched:
            before = watched.metrics()
            turns = [_measured(watched.host.url, wanted) for _ in range(rounds)]
            after = watched.metrics()
        saves, commits = (
            after[f"portus_{each}_total"] - before.get(f"portus_{each}_total", 0)
            for each in ("saves", "commits")
        )
        note = f"{saves:.0f} saves in {commits:.0f} commits on {name}, of all clients and sizes"
        for place_of, text in enumerate(wanted):
            count, size = map(int, text.split(":"))
            yield _row(name, count, size, [turn[place_of] for turn in turns], note)
        if BIG in sizes:
            yield _together_row([turn[: len(CLIENTS)] for turn in turns])


def _together_row(turns: list[list[dict[str, Any]]]) -> Row:
    few, many = CLIENTS[1], CLIENTS[-1]
    rates = {
        f"{turn['count']} clients": [
            each[place]["bytes"] / each[place]["wall_s"] / 1e9 for each in turns
        ]
        for place, turn in enumerate(turns[0])
    }
    return Row(
        name=f"saves of {BIG // MIB} MiB: {many} clients together against {few}",
        bar=0.5,
        at_most=False,
        this=f"{many} clients",
        that=f"{few} clients",
        unit="GB/s",
        figures=rates,
        note="the clients share the processors of the host",
    )


def _beside_row(memory: Path, rounds: int) -> Row:
    wanted = [f"{FEW}:{SMALL}", f"{FEW}:{SMALL}:{HUGE}"]
    with Watched(memory / "beside") as watched:
        turns = [_measured(watched.host.url, wanted) for _ in range(rounds)]
    alone, beside = zip(*turns, strict=True)
    return Row(
        name=f"saves of {SMALL >> 10} KiB, {FEW} clients, beside one of {HUGE // MIB} MiB: p99",
        bar=1.5,
        this="beside, ms",
        that="alone, ms",
        unit="",
        figures={
            "beside, ms": [1e3 * p99(turn["took_s"]) for turn in beside],
            "alone, ms": [1e3 * p99(turn["took_s"]) for turn in alone],
        },
        note="the big one saves without a pause, from a process of its own on the same processors",
    )


def p99(took_s: list[float]) -> float:
    """What one of a hundred takes longer than."""
    return sorted(took_s)[int(0.99 * (len(took_s) - 1))]


def _row(name: str, count: int, size: int, turns: list[dict[str, Any]], note: str) -> Row:
    clients = f"{count} client{'s' * (count > 1)} at once, {name}"
    if size == BIG:
        rates = [turn["bytes"] / turn["wall_s"] / 1e9 for turn in turns]
        what = f"saves of {BIG // MIB} MiB, {clients}: committed together"
        return Row(name=what, bar=None, unit="GB/s", figures={"portus": rates})
    return Row(
        name=f"saves of {SMALL >> 10} KiB, {clients}: p99",
        bar=None,
        this="p99, ms",
        unit="",
        figures={
            "p99, ms": [1e3 * p99(turn["took_s"]) for turn in turns],
            "median, ms": [
                1e3 * sorted(turn["took_s"])[len(turn["took_s"]) // 2] for turn in turns
            ],
            "saves/s": [turn["saves"] / turn["wall_s"] for turn in turns],
        },
        note=note,
    )


def _measured(url: str, wanted: list[str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.bench.clients", url, str(SECONDS), *wanted]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"clients failed:\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]
