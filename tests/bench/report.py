"""The rows as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import asdict
from pathlib import Path

import torch

import portus
from portus.transport import native
from tests.bench.measure import Row


def line(row: Row) -> str:
    """One row of the table, in Markdown."""
    value, sign = row.value, "<=" if row.at_most else ">="
    figures = ", ".join(
        f"{name} {_median(values):.4g} {row.unit}" for name, values in row.figures.items()
    )
    spread = f"{value.median:.3g} ({value.least:.3g} to {value.most:.3g})"
    bar = "" if row.bar is None else f"{sign} {row.bar:.3g}"
    verdict = "" if row.bar is None else "yes" if row.met else "NO"
    note = f"; {row.note}" if row.note else ""
    return f"| {row.name} | {bar} | {spread} | {verdict} | {figures}{note} |"


HEAD = "| what | bar | median (least to most) | met | medians |\n|---|---|---|---|---|"


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "portus": portus.__version__,
        "helper in C": native.available(),
        "load": os.getloadavg()[0],
    }


def write_json(rows: list[Row], path: Path) -> None:
    """Everything that was measured."""
    data = {
        "machine": machine(),
        "rows": [{**asdict(row), "value": asdict(row.value), "met": row.met} for row in rows],
    }
    path.write_text(json.dumps(data, indent=1) + "\n")


def write_picture(rows: list[Row], path: Path) -> None:
    """Each ratio against its bar, and the growth curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(15, 0.28 * len(rows) + 3))
    plain = [row for row in rows if row.bar is not None]
    places = range(len(plain))
    left.barh(places, [_headroom(row) for row in plain],
              color=["tab:green" if row.met else "tab:red" for row in plain])  # fmt: skip
    left.axvline(1.0, color="black", linewidth=0.8)
    left.set_yticks(places, [row.name for row in plain], fontsize=7)
    left.invert_yaxis()
    left.set_xscale("log")
    left.set_xlabel("how far on the right side of its bar (1 = just met)")
    for unit in ("MiB", "tensors"):
        points = []
        for row in rows:
            found = re.search(rf"growth: (\d+) {unit}", row.name)
            if found:
                points.append((int(found[1]), row.value.median))
        if points:
            right.plot(*zip(*points, strict=True), marker="o", label=f"by {unit}")
    right.set_xscale("log")
    right.set_ylim(bottom=0)
    right.set_xlabel("MiB in 64 tensors, or tensors in 256 MiB")
    right.set_ylabel("time to commit / memcpy")
    if right.has_data():
        right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def write_worlds(rows: list[Row], path: Path) -> None:
    """How a sharded save goes as the world grows, if that was measured."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        named = re.fullmatch(r"world size (\d+): (.*)", row.name)
        if named is not None:
            for way, values in row.figures.items():
                points = found.setdefault(named[2], {}).setdefault(way, [])
                points.append((int(named[1]), _median(values)))
    if not found:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    styles = dict(zip(found, ("-", "--"), strict=True))
    colours: dict[str, str] = {}
    for what, ways in found.items():
        for way, points in ways.items():
            colour = colours.setdefault(way, f"C{len(colours)}")
            worlds, seconds = zip(*points, strict=True)
            label, style = f"{way}: {what}", styles[what]
            axes.plot(worlds, seconds, color=colour, linestyle=style, marker="o", label=label)
            axes.set_xticks(worlds)
    axes.set_xlabel("ranks that share one state, on one machine")
    axes.set_ylabel("seconds")
    axes.set_yscale("log")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _headroom(row: Row) -> float:
    median = max(row.value.median, 1e-9)
    assert row.bar is not None
    return row.bar / median if row.at_most else median / row.bar


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
