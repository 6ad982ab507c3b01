"""The rows as a table, as JSON and as a picture."""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import portus
from portus.engine.copying import native
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
        "day": datetime.date.today().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "portus": portus.__version__,
        "helper in C": native.helper() is not None,
        "load": os.getloadavg()[0],
    }


def _processor() -> str:
    """As the kernel calls it."""
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        found = re.search(r"^model name\s*: (.*)$", file.read(), re.MULTILINE)
    return found[1] if found else platform.machine()


def as_data(rows: Sequence[Row], measured_on: dict[str, object]) -> dict[str, Any]:
    """Everything that was measured."""
    return {"machine": measured_on, "rows": [_row_data(row) for row in rows]}


def _row_data(row: Row) -> dict[str, object]:
    medians = {name: _median(values) for name, values in row.figures.items()}
    return {**asdict(row), "value": asdict(row.value), "met": row.met, "medians": medians}


def write_picture(rows: list[Row], path: Path) -> None:
    """Each ratio against its bar, and the growth curves if they were measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plain, growth = [row for row in rows if row.bar is not None], _growth(rows)
    wide = 2 if plain and growth else 1
    figure, axes = pyplot.subplots(
        1, wide, figsize=(7.5 * wide, 0.28 * len(plain) + 3), squeeze=False
    )
    if plain:
        _draw_bars(axes[0][0], plain)
    if growth:
        _draw_growth(axes[0][-1], growth)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _draw_bars(axes: Any, rows: list[Row]) -> None:
    places = range(len(rows))
    axes.barh(places, [_headroom(row) for row in rows],
              color=["tab:green" if row.met else "tab:red" for row in rows])  # fmt: skip
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(places, [row.name for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("how far on the right side of its bar (1 = just met)")


def _growth(rows: list[Row]) -> dict[str, list[tuple[int, float]]]:
    """By unit: size, and time to commit over memcpy."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        named = re.search(r"growth: (\d+) (MiB|tensors)", row.name)
        if named is not None:
            found.setdefault(named[2], []).append((int(named[1]), row.value.median))
    return found


def _draw_growth(axes: Any, growth: dict[str, list[tuple[int, float]]]) -> None:
    for unit, points in growth.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=f"by {unit}")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("MiB in 64 tensors, or tensors in 256 MiB")
    axes.set_ylabel("time to commit / memcpy")
    axes.legend()


def write_worlds(rows: list[Row], path: Path) -> None:
    """How a sharded save goes as the world grows, if that was measured."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        named = re.fullmatch(r"world size (\d+): ([^,]*)", row.name)
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
    styles = dict(zip(found, ("-", "--", ":"), strict=True))
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
