"""Rows about verbs, measured in the lab: everything is emulated, so that only ratios count."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from tests.bench.hosting import Parts, shares_row
from tests.bench.measure import Row
from tests.hosts import ROOT

WAYS = (("pulled", "pull, wire", "ib_read_bw"), ("pushed back", "push, wire", "ib_write_bw"))


def verbs_rows() -> Iterator[Row]:
    """None where the lab cannot run; it says why. Its rounds are its own."""
    command = [sys.executable, "-m", "tests.lab", "--timeout", "500"]
    done = subprocess.run(
        [*command, "python", "-m", "tests.hardware.bench_verbs"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for took_s in found:
        for what, wire, other in WAYS:
            yield Row(
                name=f"{what} by verbs in the lab, 64 MiB in 200 tensors: speed over {other}",
                bar=0.8,
                at_most=False,
                this=other,
                that=wire,
                figures={name: took_s[name] for name in (wire, other)},
            )
        rounds = len(took_s["commit"])
        name = "64 MiB in 200 tensors, verbs, a DAX device in the lab"
        yield shares_row(name, parts(took_s), rounds, warmups=0)


def parts(took_s: dict[str, list[float]]) -> Parts:
    """Of each save. Nothing is copied: bytes are received where they stay."""
    columns = ("pull, wire", "pull, wire and hash", "flush", "commit", "save, all of it")
    for wire, pull, flush, commit, total in zip(*(took_s[each] for each in columns), strict=True):
        known = {"copy": 0.0, "hash": pull - wire, "wire": wire, "flush": flush}
        yield known | {"index": commit - flush, "rest": total - pull - commit, "total": total}
