"""The numbers of README and of docs/benchmarks.md: where they are kept, and both tables.

``make bench ARGS=--readme`` measures them, writes ``readme.json`` beside this file, and writes
both tables from it: six rows in README, all of them in docs/benchmarks.md. A test compares the
pages with the file. One run measures all, so that no figures of different days stand side by side.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.bench.pages import table, written

README: Final = Path(__file__).parents[2] / "README.md"
BENCHMARKS: Final = README.parent / "docs" / "benchmarks.md"
MEASURED: Final = Path(__file__).with_suffix(".json")
MARK: Final = "numbers"
_HEAD: Final = "what | median | least to most | medians of what was compared"
_SHORT_HEAD: Final = "what | median | least to most"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the tables.

    row: the beginning of the name of its row.
    is_ratio: the figure is a ratio; otherwise it is in the row's unit.
    in_readme: README has the line too.
    """

    what: str
    row: str
    is_ratio: bool = True
    in_readme: bool = False


LINES: Final = (
    Line("Commit of 1 GiB in 64 tensors into tmpfs, checksums on: time over one memcpy",
         "commit, tmpfs, 1024 MiB in 64 tensors", in_readme=True),
    Line("The same in 400 tensors", "commit, tmpfs, 1024 MiB in 400 tensors"),
    Line("The same of ResNet50's weights, 97 MiB", "commit, tmpfs, ResNet50, weights"),
    Line("`torch.save` of 1 GiB in 64 tensors into tmpfs: time over that commit",
         "torch.save over commit, tmpfs, 1024 MiB in 64 tensors"),
    Line("`torch.save` and fsync of 512 MiB on a disk: time over a durable commit",
         "torch.save + fsync over commit, disk", in_readme=True),
    Line("Durable commit of 512 MiB on a disk: time over a rewrite of a file of that size, with "
         "fdatasync", "commit, disk, 512 MiB, over rewrite"),
    Line("`save()` returns, 1,000 known tensors", "save() returns, 1,000 known", is_ratio=False),
    Line("Extra training time for a save of 288 MiB under Lightning, tmpfs, over the better of "
         "Lightning's own two ways", "extra training wall time per save", in_readme=True),
    Line("Steps/s of a small training while 2 GiB are saved, over those without",
         "steps/s of small operations", in_readme=True),
    Line("A save and the step beside it with `guard=\"exact\"`: time over `guard=\"probe\"`",
         "a save and a step, guard exact over probe"),
    Line("A training that saves as often as `Cadence` says, on a disk: time added",
         "overhead at the chosen interval", is_ratio=False),
    Line("Steps/s of a training with a mirror in a directory, over those without",
         "steps/s with a mirror in a directory"),
    Line("Restore of 1 GiB in place, verified, from tmpfs: time over one memcpy",
         "restore_into, tmpfs, 1 GiB, over memcpy", in_readme=True),
    Line("The same restore while another process keeps one core busy, which slows both",
         "restore_into, tmpfs, beside a busy process, 1 GiB, over memcpy"),
    Line("The same restore from the page cache of a disk",
         "restore_into, page cache of a disk, 1 GiB, over memcpy"),
    Line("`torch.load` and `load_state_dict` from tmpfs, nothing verified: time over that restore",
         "torch.load + load_state_dict over restore_into, tmpfs"),
    Line("Memory that a save of 720 MiB adds", "memory added by a save",
         is_ratio=False, in_readme=True),
    Line("Accelerate's `save_state`, 288 MiB, tmpfs: stock blocks training for, over Portus",
         "accelerate save_state, 288 MiB, tmpfs: training is blocked"),
    Line("The same, until it is durable", "accelerate save_state, 288 MiB, tmpfs: time to durable"),
    Line("A sharded state of 256 MiB at 4 ranks: `dcp.save` blocks training for, over Portus",
         "sharded state of 256 MiB: training is blocked for"),
)  # fmt: skip


def text(data: dict[str, Any]) -> str:
    """The machine in one sentence, and the table of docs/benchmarks.md: every line."""
    rows = [
        f"| {line.what} | {_figure(row, line)} | {_spread(row)} | {_medians(row)} |"
        for line, row in ((line, _row_of(line, data["rows"])) for line in LINES)
    ]
    return f"{_machine(data['machine'])}\n\n{table(_HEAD, rows)}"


def short_text(data: dict[str, Any]) -> str:
    """The machine in one sentence, and the table of README: the lines that it has."""
    rows = [
        f"| {line.what} | {_figure(row, line)} | {_spread(row)} |"
        for line, row in ((line, _row_of(line, data["rows"])) for line in LINES if line.in_readme)
    ]
    return f"{_machine(data['machine'])}\n\n{table(_SHORT_HEAD, rows)}"


TEXTS: Final = {README: short_text, BENCHMARKS: text}
"""What writes the table of each page."""


def write(data: dict[str, Any]) -> None:
    """Keep what was measured, and write both pages from it."""
    pages = {page: _with_table(page, data) for page in TEXTS}  # raises if a line has no row
    MEASURED.write_text(json.dumps(data, indent=1) + "\n")
    for page, content in pages.items():
        page.write_text(content)


def rewritten(page: Path) -> str:
    """The text of ``page`` with the numbers that are kept."""
    return _with_table(page, json.loads(MEASURED.read_text()))


def _with_table(page: Path, data: dict[str, Any]) -> str:
    return written(page.read_text(), {MARK: TEXTS[page](data)})


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
