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
SECONDS = 2.0


def load_rows(memory: Path, disk: Path, rounds: int) -> Iterator[Row]:
    """Bytes a second of all clients together; the slowest of a hundred small saves."""
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
