"""The picture of a report, which matplotlib draws."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from portus.cli import words
from portus.cli.training import WHERE, JournaledRun, parts
from portus.companions.journal.account import Account, Placed, PlacedLine

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS: Final = {
    "kept": "#1f8a5b",
    "lost": "#c8372d",
    "saves": "#2f6fd0",
    "down": "#8a6fc0",
    "other": "#b3bac2",
}
"""The colors of the parts of the time."""

_UNITS: Final = (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))

Point = tuple[float, float]
"""A time, in seconds, and a value."""


def intervals(its: Account) -> list[list[Point]]:
    """Return, for each session, points of (moment, steps to the next save) as decided, or else as
    saves came. A last point repeats the last interval at the session's end, or at its last save."""
    ends = {each.begun.session: each.end_s for each in its.sessions}
    found: list[list[Point]] = []
    for choices in by_session(its.choices):
        points = [(each.time_s, float(each.line.decision.steps)) for each in choices]
        end_s = max(ends[choices[0].line.session], points[-1][0])
        found.append([*points, (end_s, points[-1][1])])
    if found:
        return found
    for saves in by_session(its.saves):
        gaps = [(a.time_s, float(b.at - a.at)) for a, b in itertools.pairwise(saves)]
        if gaps:
            found.append([*gaps, (saves[-1].time_s, gaps[-1][1])])
    return found


def by_session(placed: Iterable[PlacedLine[Placed]]) -> list[list[PlacedLine[Placed]]]:
    """Return the lines of each session, so that no curve connects two sessions."""
    found: dict[str, list[PlacedLine[Placed]]] = {}
    for each in placed:
        found.setdefault(each.line.session, []).append(each)
    return list(found.values())


def figure(seen: JournaledRun) -> Figure:
    """Return the picture. Raise ``ModuleNotFoundError`` without matplotlib."""
    from matplotlib.figure import Figure

    its = seen.account
    unit, unit_s = next((each for each in _UNITS if its.wall_s >= 2 * each[1]), _UNITS[-1])
    drawn = Figure(figsize=(11, 7), layout="tight")
    where, *panels = drawn.subplots(2, 2).flat
    for row, (name, value) in enumerate(parts(its)):
        share = value / its.wall_s if its.wall_s else 0.0
        where.barh(row, 100 * share, color=_COLORS[name])
        where.text(100 * share + 1, row, f"{share:.1%}, {words.seconds(value)}", va="center")
    where.set_yticks(range(len(WHERE)), list(WHERE.values()))
    where.invert_yaxis()
    where.set_xlim(0, 130)
    where.set_xlabel("share of wall time, %")
    where.set_title(f"goodput {its.goodput:.1%}")
    for panel, draw in zip(panels, (_draw_steps, _draw_saves, _draw_intervals), strict=True):
        draw(panel, its, unit_s)
        named = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
        if named:
            panel.legend(named.values(), named.keys(), fontsize=8)
        panel.set_xlabel(unit)
        panel.grid(visible=True, alpha=0.3)
        panel.set_ylim(bottom=0)
    return drawn


def _draw_steps(panel: Axes, its: Account, unit_s: float) -> None:
    panel.set_title("Steps over time, and what restarts lost")
    for spell in its.sessions:
        own = [
            (each.time_s, float(each.at))
            for each in its.saves
            if spell.begin_s <= each.time_s <= spell.end_s and spell.base <= each.at <= spell.end
        ]
        ends = [(spell.begin_s, float(spell.base)), (spell.end_s, float(spell.end))]
        _line(panel, sorted([*ends, *own]), unit_s, color=_COLORS["kept"], label="steps")
    for before, spell in itertools.pairwise(its.sessions):
        panel.axvline(spell.begin_s / unit_s, color="#d5dae0", linewidth=1, label="a restart")
        if before.end > spell.base:
            lost = [(before.end_s, float(before.end)), (before.end_s, float(spell.base))]
            _line(panel, lost, unit_s, color=_COLORS["lost"], linewidth=3, label="lost")


def _draw_saves(panel: Axes, its: Account, unit_s: float) -> None:
    panel.set_title("What a save took, seconds")
    for saves in by_session(its.saves):
        copied = [(each.time_s, each.line.copy_s / each.line.saves) for each in saves]
        blocked = [(each.time_s, each.line.blocked_s / each.line.saves) for each in saves]
        _line(panel, copied, unit_s, color=_COLORS["saves"], label="copying and hashing")
        _line(panel, blocked, unit_s, color=_COLORS["lost"], label="training was blocked")


def _draw_intervals(panel: Axes, its: Account, unit_s: float) -> None:
    panel.set_title("Steps from one save to the next")
    for points in intervals(its):
        _line(panel, points, unit_s, color=_COLORS["saves"], drawstyle="steps-post")


def _line(panel: Axes, points: list[Point], unit_s: float, **look: Any) -> None:
    moments, values = zip(*points, strict=True)
    marker = "." if len(points) == 1 else ""
    panel.plot([each / unit_s for each in moments], values, marker=marker, **look)
