"""Rows about Accelerate and torch.distributed.checkpoint, each a job in processes of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.measure import Row, Spread
from tests.bench.sharded_job import WAYS
from tests.hosts import ROOT

RANKS = 4
WORLDS = (1, 2, 4, 8)
STATE_MIB = 256
SHOWN = {
    "blocked_s": ("training is blocked for", "s"),
    "commit_s": ("time to commit", "s"),
    "written_mib": ("written", "MiB"),
    "memory_mib": ("memory added", "MiB"),
    "restore_s": ("restore", "s"),
}
FOUR_BLOCKED_S_MAX = 0.015


def accelerate_rows(memory: Path, disk: Path, rounds: int) -> Iterator[Row]:
    """``save_state`` of stock Accelerate against the same through Portus."""
    for name, place, bars in (("tmpfs", memory, (10.0, 3.0)), ("disk", disk, (10.0, None))):
        found = _job("tests.bench.accelerate_job", place / "accelerate", str(rounds))
        for number, (what, bar) in enumerate(zip(("blocked", "durable"), bars, strict=True)):
            text = {"blocked": "training is blocked for", "durable": "time to durable"}[what]
            yield Row(
                name=f"accelerate save_state, 288 MiB, {name}: {text}, stock over Portus",
                bar=bar,
                at_most=False,
                this="stock",
                that="portus",
                figures={way: [pair[number] for pair in pairs] for way, pairs in found.items()},
            )


def deepspeed_rows(disk: Path, rounds: int) -> Iterator[Row]:
    """``save_checkpoint`` of stock DeepSpeed, made durable, against the same through Portus."""
    found = _job("tests.bench.deepspeed_job", disk / "deepspeed", str(rounds))
    for number, (text, bar) in enumerate((("training is blocked for", 0.1), ("added", 0.6))):
        yield Row(
            name=f"deepspeed save_checkpoint, ZeRO-2, 160 MB: {text}",
            bar=bar,
            that="stock",
            figures={way: [pair[number] for pair in pairs] for way, pairs in found.items()},
        )


def sharded_rows(memory: Path, rounds: int, ways: tuple[str, ...] = tuple(WAYS)) -> Iterator[Row]:
    """Ways of torch to save a sharded state, at four ranks."""
    found = _sharded(memory, RANKS, rounds, ways)
    for name, (what, unit) in SHOWN.items():
        figures = {way: [each[name] for each in turns] for way, turns in found.items()}
        is_time = name.endswith("_s")
        text = f", dcp.save over Portus, {RANKS} ranks" if is_time else f", {RANKS} ranks"
        yield Row(
            name=f"sharded state of {STATE_MIB} MiB: {what}{text}",
            bar=None,
            this="dcp.save" if is_time else "portus",
            that="portus" if is_time else None,
            unit=unit,
            figures=figures,
        )


def world_rows(memory: Path, rounds: int) -> Iterator[Row]:
    """The same state over more and more ranks, against the best of torch's ways, by its median: of
    all to block, of the asynchronous ones to commit. Drawn."""
    others = tuple(way for way in WAYS if way != "portus")
    for count in WORLDS:
        found = _sharded(memory, count, rounds, tuple(WAYS))
        bars = (("blocked_s", others, 1.0), ("commit_s", others[1:], 0.5))
        for name, against, bar in (*bars, ("restore_s", others[:1], 1.0)):
            figures = {way: [each[name] for each in turns] for way, turns in found.items()}
            best = min(against, key=lambda way: Spread.of(figures[way]).median)
            what = f"world size {count}: {SHOWN[name][0]}"
            yield Row(name=what, bar=bar, that=best, figures=figures, note=f"against {best}")
            if name == "blocked_s" and count == RANKS:
                seconds = {"portus": figures["portus"]}
                yield Row(name=f"{what}, in seconds", bar=FOUR_BLOCKED_S_MAX, figures=seconds)


def _sharded(memory: Path, count: int, rounds: int, ways: tuple[str, ...]) -> dict[str, Any]:
    place = memory / "sharded"
    return _job("tests.bench.sharded_job", place, str(count), str(STATE_MIB), str(rounds), *ways)


def _job(module: str, place: Path, *arguments: str) -> dict[str, Any]:
    """What a job printed last; its directory is removed."""
    place.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", module, str(place), *arguments],
        cwd=ROOT,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    shutil.rmtree(place)
    if done.returncode:
        raise RuntimeError(f"{module} failed:\n{done.stderr[-4000:]}")
    printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(printed[-1])
    return result
