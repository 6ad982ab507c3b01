"""The numbers that README quotes: where they are kept, and README's text.

``make bench ARGS=--readme`` measures them, writes ``readme.json`` beside this file, and writes
README's table from it. A test holds the two to each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.bench.pages import table, written

README: Final = Path(__file__).parents[2] / "README.md"
MEASURED: Final = Path(__file__).with_suffix(".json")
MARK: Final = "numbers"
_HEAD: Final = "what | median | least to most | medians of what was compared"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of README's table. ``row``: what the name of its row begins with. ``is_ratio``: its
    figure is so many times another, and otherwise in the row's unit."""

    what: str
    row: str
    is_ratio: bool = True


LINES: Final = (
    Line("Commit of 1 GiB in 64 tensors into tmpfs, checksums on: time over one memcpy",
         "commit, tmpfs, 1024 MiB in 64 tensors"),
    Line("The same in 400 tensors", "commit, tmpfs, 1024 MiB in 400 tensors"),
    Line("The same of ResNet50's weights, 97 MiB", "commit, tmpfs, ResNet50, weights"),
    Line("`torch.save` of 1 GiB in 64 tensors into tmpfs: time over that commit",
         "torch.save over commit, tmpfs, 1024 MiB in 64 tensors"),
    Line("`torch.save` and fsync of 512 MiB on a disk: time over a durable commit",
         "torch.save + fsync over commit, disk"),
    Line("Durable commit of 512 MiB on a disk: time over a rewrite of a file of that size, with "
         "fdatasync", "commit, disk, 512 MiB, over rewrite"),
    Line("`save()` returns, 1,000 known tensors", "save() returns, 1,000 known", is_ratio=False),
    Line("Extra training time for a save of 288 MiB under Lightning, tmpfs, over the better of "
         "Lightning's own two ways", "extra training wall time per save"),
    Line("Steps/s of a small training while 2 GiB are saved, over those without",
         "steps/s of small operations"),
    Line("A save and the step beside it with `guard=\"exact\"`: time over `guard=\"probe\"`",
         "a save and a step, guard exact over probe"),
    Line("A training that saves as often as `Cadence` says, on a disk: time added",
         "overhead at the chosen interval", is_ratio=False),
    Line("Steps/s of a training with a mirror in a directory, over those without",
         "steps/s with a mirror in a directory"),
    Line("Restore of 1 GiB in place, verified, from tmpfs: time over one memcpy",
         "restore_into, tmpfs, 1 GiB, over memcpy"),
    Line("The same beside a process that keeps a core busy, for both",
         "restore_into, tmpfs, beside a busy process, 1 GiB, over memcpy"),
    Line("The same restore from the page cache of a disk",
         "restore_into, page cache of a disk, 1 GiB, over memcpy"),
    Line("`torch.load` and `load_state_dict` from tmpfs, nothing verified: time over that restore",
         "torch.load + load_state_dict over restore_into, tmpfs"),
    Line("Memory that a save of 720 MiB adds", "memory added by a save", is_ratio=False),
    Line("Accelerate's `save_state`, 288 MiB, tmpfs: stock blocks training for, over Portus",
         "accelerate save_state, 288 MiB, tmpfs: training is blocked"),
    Line("The same, until it is durable", "accelerate save_state, 288 MiB, tmpfs: time to durable"),
    Line("A sharded state of 256 MiB at 4 ranks: `dcp.save` blocks training for, over Portus",
         "sharded state of 256 MiB: training is blocked for"),
)  # fmt: skip


def text(data: dict[str, Any]) -> str:
    """README's sentence about the machine, and its table."""
    rows = [
        f"| {line.what} | {_figure(row, line)} | {_spread(row)} | {_medians(row)} |"
        for line, row in ((line, _row_of(line, data["rows"])) for line in LINES)
    ]
    return f"{_machine(data['machine'])}\n\n{table(_HEAD, rows)}"


def write(data: dict[str, Any]) -> None:
    """Keep what was measured, and write README from it."""
    page = written(README.read_text(), {MARK: text(data)})  # raises if a line has no row
    MEASURED.write_text(json.dumps(data, indent=1) + "\n")
    README.write_text(page)


def rewritten(page: str) -> str:
    """``page`` with the numbers that are kept."""
    return written(page, {MARK: text(json.loads(MEASURED.read_text()))})


def _row_of(line: Line, rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    (row,) = (row for row in rows if row["name"].startswith(line.row))
    found: dict[str, Any] = row
    return found


def _figure(row: dict[str, Any], line: Line) -> str:
    return f"{_short(row['value']['median'])}{'x' if line.is_ratio else ' ' + row['unit']}"


def _spread(row: dict[str, Any]) -> str:
    return f"{_short(row['value']['least'])} to {_short(row['value']['most'])}"


def _medians(row: dict[str, Any]) -> str:
    """Only the figures that the row's ratio is of, and what was noted."""
    shown = [row["this"], *([row["that"]] if row["that"] else [])]
    figures = [f"{name} {_short(row['medians'][name])} {row['unit']}" for name in shown]
    return "; ".join([", ".join(figures if row["that"] else []), row["note"]]).strip("; ")


def _machine(machine: dict[str, Any]) -> str:
    helper = "the helper in C" if machine["helper in C"] else "no helper in C"
    return (
        f"Measured on {machine['day']}: {machine['cores']} cores ({machine['processor']}), "
        f"{machine['memory_gib']} GiB, Linux {machine['kernel']}, Python {machine['python']}, "
        f"torch {machine['torch']}, {helper}. Load when it began: {machine['load']:.1f}."
    )


def _short(figure: float) -> str:
    """Three digits, and no exponent."""
    if abs(figure) >= 100:
        return f"{figure:,.0f}"
    return "0" if not figure else f"{float(f'{figure:.3g}'):f}".rstrip("0").rstrip(".")
