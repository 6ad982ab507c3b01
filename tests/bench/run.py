"""``make bench``: every row of docs/benchmarks.md in one run.

python -m tests.bench.run [--rounds 5] [--only commit] [--out bench-results]
python -m tests.bench.run --readme      the rows of README and docs/benchmarks.md; writes both
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.bench import (
    frameworks,
    hosting,
    killed,
    lab,
    load,
    loading,
    mirrors,
    paced,
    readme,
    report,
    saving,
    shelves,
    tables,
    training,
    writing,
)
from tests.bench.measure import Row

Group = Callable[[Path, Path, int], Iterable[Row]]

GROUPS: dict[str, Group] = {
    "commit": lambda memory, disk, rounds: saving.commit_rows(memory, rounds),
    "fixed": lambda memory, disk, rounds: [saving.fixed_row(memory, rounds)],
    "durable": lambda memory, disk, rounds: saving.durable_rows(disk, rounds),
    "call": lambda memory, disk, rounds: [saving.call_row(memory, rounds)],
    "training": lambda memory, disk, rounds: training.training_rows(memory, rounds),
    "dip": lambda memory, disk, rounds: [training.dip_row(memory, rounds)],
    "clock": lambda memory, disk, rounds: [training.clock_row(rounds)],
    "cadence": lambda memory, disk, rounds: paced.paced_rows(disk, rounds),
    "hog": lambda memory, disk, rounds: paced.hog_rows(disk),
    "killed": lambda memory, disk, rounds: killed.killed_rows(disk, (rounds + 1) // 2),
    "guard": lambda memory, disk, rounds: [saving.guard_row(memory, rounds)],
    "restore": loading.restore_rows,
    "first": lambda memory, disk, rounds: [training.first_row(memory, max(3, rounds // 2))],
    "memory": lambda memory, disk, rounds: [saving.memory_row(memory, rounds)],
    "frozen": lambda memory, disk, rounds: [saving.frozen_row(memory)],
    "open": lambda memory, disk, rounds: [loading.open_row(memory, rounds)],
    "host": lambda memory, disk, rounds: hosting.wire_rows(memory, rounds),
    "shares": hosting.share_rows,
    "mirror": mirrors.mirror_rows,
    "mirrored": lambda memory, disk, rounds: [mirrors.directory_row(memory, disk, rounds)],
    "load": lambda memory, disk, rounds: load.load_rows(memory, disk, (rounds + 1) // 2),
    "verbs": lambda memory, disk, rounds: lab.verbs_rows(),
    "accelerate": frameworks.accelerate_rows,
    "deepspeed": lambda memory, disk, rounds: frameworks.deepspeed_rows(disk, rounds),
    "sharded": lambda memory, disk, rounds: frameworks.sharded_rows(memory, rounds),
    "worlds": lambda memory, disk, rounds: frameworks.world_rows(memory, max(3, rounds // 2)),
    "shelf": shelves.shelf_rows,
    "tables": lambda memory, disk, rounds: tables.table_rows(memory, disk, max(1, rounds // 2)),
    "growth": lambda memory, disk, rounds: saving.growth_rows(memory, max(3, rounds // 2)),
    "writer": writing.writer_rows,
}


README_ROUNDS = 3


def readme_rows(memory: Path, disk: Path, rounds: int) -> Iterator[Row]:
    """Every row of the tables of README and docs/benchmarks.md, and what is measured with them."""
    yield from saving.gib_rows(memory, rounds)
    yield from saving.paper_rows(memory, rounds, ["ResNet50"])
    yield from saving.durable_rows(disk, rounds)
    yield saving.call_row(memory, rounds)
    yield from loading.restore_rows(memory, disk, rounds)
    yield saving.memory_row(memory, rounds)
    yield saving.guard_row(memory, rounds)
    yield from frameworks.accelerate_rows(memory, disk, rounds)
    yield from frameworks.sharded_rows(memory, rounds, ("dcp.save", "portus"))
    yield mirrors.directory_row(memory, disk, max(1, rounds - 1))
    yield from paced.shape_rows("BERT", disk, rounds, seconds=15.0)
    yield from training.training_rows(memory, max(1, rounds - 1))
    yield training.dip_row(memory, rounds)  # the last: it leaves torch with one thread


def main() -> None:
    """Measure, print a table as it grows, and leave JSON and PNG behind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, help="counted rounds of each row (5; 3)")
    parser.add_argument("--only", choices=GROUPS, nargs="*", help="some groups of rows")
    parser.add_argument(
        "--readme", action="store_true", help="write the tables of README and docs/benchmarks.md"
    )
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a tmpfs directory")
    parser.add_argument("--disk", type=Path, default=Path(), help="a directory on a disk")
    parser.add_argument("--out", type=Path, default=Path("bench-results"), help="for the results")
    arguments = parser.parse_args()

    if arguments.readme and arguments.only is not None:
        parser.error("--readme measures its own rows: leave out --only")
    groups = {"readme": readme_rows} if arguments.readme else GROUPS
    rounds = arguments.rounds or (README_ROUNDS if arguments.readme else 5)

    start, rows, machine = time.monotonic(), [], report.machine()
    print(machine)
    print(report.HEAD)
    with (
        folder(arguments.memory, "portus-bench-") as memory,
        folder(arguments.disk, ".portus-bench-") as disk,
    ):
        for name in arguments.only or groups:
            for row in groups[name](memory, disk, rounds):
                rows.append(row)
                print(report.line(row), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    measured = report.as_data(rows, machine)
    (arguments.out / "bench.json").write_text(json.dumps(measured, indent=1) + "\n")
    if arguments.readme:
        readme.write(measured)
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
