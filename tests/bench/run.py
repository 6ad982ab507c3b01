"""``make bench``: every row of docs/benchmarks.md in one run.

python -m tests.bench.run [--rounds 5] [--only commit] [--out bench-results]
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.bench import frameworks, hosting, lab, load, loading, report, saving, training
from tests.bench.measure import Row

Group = Callable[[Path, Path, int], Iterable[Row]]

GROUPS: dict[str, Group] = {
    "commit": lambda memory, disk, rounds: saving.commit_rows(memory, rounds),
    "durable": lambda memory, disk, rounds: [saving.durable_row(disk, rounds)],
    "call": lambda memory, disk, rounds: [saving.call_row(memory, rounds)],
    "training": lambda memory, disk, rounds: training.training_rows(memory, rounds),
    "dip": lambda memory, disk, rounds: [training.dip_row(memory, rounds)],
    "clock": lambda memory, disk, rounds: [training.clock_row(rounds)],
    "restore": lambda memory, disk, rounds: loading.restore_rows(memory, rounds),
    "first": lambda memory, disk, rounds: [training.first_row(memory, max(3, rounds // 2))],
    "memory": lambda memory, disk, rounds: [saving.memory_row(memory, rounds)],
    "frozen": lambda memory, disk, rounds: [saving.frozen_row(memory)],
    "open": lambda memory, disk, rounds: [loading.open_row(memory, rounds)],
    "host": lambda memory, disk, rounds: hosting.wire_rows(memory, rounds),
    "shares": hosting.share_rows,
    "load": lambda memory, disk, rounds: load.load_rows(memory, disk, (rounds + 1) // 2),
    "verbs": lambda memory, disk, rounds: lab.verbs_rows(),
    "accelerate": frameworks.accelerate_rows,
    "sharded": lambda memory, disk, rounds: frameworks.sharded_rows(memory, rounds),
    "worlds": lambda memory, disk, rounds: frameworks.world_rows(memory, max(3, rounds // 2)),
    "growth": lambda memory, disk, rounds: saving.growth_rows(memory, max(3, rounds // 2)),
}


def main() -> None:
    """Measure, print a table as it grows, and leave JSON and PNG behind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of each row")
    parser.add_argument("--only", choices=GROUPS, nargs="*", help="some groups of rows")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a tmpfs directory")
    parser.add_argument("--disk", type=Path, default=Path(), help="a directory on a disk")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="for the results")
    arguments = parser.parse_args()

    start, rows = time.monotonic(), []
    print(report.machine())
    print(report.HEAD)
    with (
        folder(arguments.memory, "portus-bench-") as memory,
        folder(arguments.disk, ".portus-bench-") as disk,
    ):
        for name in arguments.only or GROUPS:
            for row in GROUPS[name](memory, disk, arguments.rounds):
                rows.append(row)
                print(report.line(row), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    report.write_json(rows, arguments.out / "bench.json")
    report.write_picture(rows, arguments.out / "bench.png")
    report.write_worlds(rows, arguments.out / "worlds.png")
    missed = [row.name for row in rows if not row.met]
    print(f"\n{len(rows)} rows in {time.monotonic() - start:.0f} s; {len(missed)} bars missed")
    for name in missed:
        print(f"  missed: {name}")
    print("results:", *sorted(map(str, arguments.out.iterdir())))


@contextlib.contextmanager
def folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A directory for one run, gone after it. What a run that was killed left goes first."""
    for left in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), alone_in(left):
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    with alone_in(made):
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def alone_in(path: Path) -> Iterator[None]:
    """Whoever uses a directory has it locked. Raises ``BlockingIOError`` if another has."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
