"""The charts of a report, which its page shows, and the picture of it, which matplotlib draws."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from portus.cli import words
from portus.cli.training import WHERE, JournaledRun, parts
from portus.companions.journal.account import Account, Placed, PlacedLine

_COLORS: Final = dict(
    zip(
        (*WHERE, "line"),
        ("#1f8a5b", "#c8372d", "#2f6fd0", "#8a6fc0", "#b3bac2", "#d5dae0"),
        strict=True,
    )
)

_UNITS: Final = (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))

Point = tuple[float, float]
"""A time, in seconds, and a value."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart. ``color``: a key of ``WHERE``, or "line"."""

    color: str
    points: Sequence[Point]
    width: int = 2


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over the time of a run. ``key``: the meaning of each color. ``note``: a sentence under
    the lines, or in their place. ``is_seconds``: values are seconds, else steps."""

    title: str
    lines: Sequence[Line]
    key: dict[str, str] = field(default_factory=dict)
    note: str = ""
    is_seconds: bool = False

    def text(self, value: float) -> str:
        """Return a value for people."""
        return words.seconds(value) if self.is_seconds else f"{value:.0f}"


def course_chart(its: Account) -> Chart:
    """Return the chart of steps over time, with lost steps in red."""
    lines = []
    top = float(max([1, *(each.end for each in its.sessions)]))
    for spell in its.sessions:
        ends = [(spell.begin_s, float(spell.base)), (spell.end_s, float(spell.end))]
        own = [
            (each.time_s, float(each.at))
            for each in its.saves
            if spell.begin_s <= each.time_s <= spell.end_s and spell.base <= each.at <= spell.end
        ]
        lines.append(Line("kept", sorted([*ends, *own])))
    for before, spell in itertools.pairwise(its.sessions):
        lines.append(Line("line", [(spell.begin_s, 0.0), (spell.begin_s, top)], width=1))
        if before.end > spell.base:
            lost = [(before.end_s, float(before.end)), (before.end_s, float(spell.base))]
            lines.append(Line("lost", lost, width=3))
    key = {"kept": "steps", "lost": "lost", "line": "a restart"}
    return Chart("Steps over time, and what restarts lost", lines, key)


def saves_chart(its: Account) -> Chart:
    """Return the chart of the time of each save, and of how long it blocked training."""
    title, lines = "What a save took", []
    if not its.saves:
        return Chart(title, (), note="no version was committed")
    for saves in by_session(its.saves):
        copied = [(each.time_s, each.line.copy_s) for each in saves]
        blocked = [(each.time_s, each.line.blocked_s) for each in saves]
        lines += [Line("saves", copied), Line("lost", blocked)]
    key = {"lost": "training was blocked", "saves": "copying and hashing"}
    written = words.size(max(each.line.copied_bytes for each in its.saves))
    note = f"{words.seconds(its.median_blocked_s)} blocked, the median; {written} written at most"
    return Chart(title, lines, key, note, is_seconds=True)


def steps_chart(its: Account) -> Chart:
    """Return the chart of the steps between saves, as stairs."""
    lines = []
    for points in intervals(its):
        stairs: list[Point] = []
        for (moment, steps), (until, _) in itertools.pairwise(points):
            stairs += [(moment, steps), (until, steps)]
        lines.append(Line("saves", stairs))
    note = "" if lines else "there were fewer than two saves"
    return Chart("Steps from one save to the next", lines, note=note)


def intervals(its: Account) -> list[list[Point]]:
    """Return, for each session, points of (moment, steps to the next save) as decided, or else as
    saves came. A last point repeats the last interval at the session's end, or at its last save."""
    ends = {each.begun.session: each.end_s for each in its.sessions}
    found: list[list[Point]] = []
    for choices in by_session(its.choices):
        points = [(each.time_s, float(each.line.interval)) for each in choices]
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


def draw(seen: JournaledRun, path: str) -> None:
    """Write the report as a PNG. Raise ``ModuleNotFoundError`` without matplotlib."""
    import matplotlib

    # It needs no display, which servers lack.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    its = seen.account
    unit, unit_s = next((each for each in _UNITS if its.wall_s >= 2 * each[1]), _UNITS[-1])
    figure, panels = pyplot.subplots(2, 2, figsize=(11, 7))
    where, *drawn = panels.flat
    for row, (name, value) in enumerate(parts(its)):
        share = value / its.wall_s if its.wall_s else 0.0
        where.barh(row, 100 * share, color=_COLORS[name])
        where.text(100 * share + 1, row, f"{share:.1%}, {words.seconds(value)}", va="center")
    where.set_yticks(range(len(WHERE)), list(WHERE.values()))
    where.invert_yaxis()
    where.set_xlim(0, 130)
    where.set_xlabel("share of wall time, %")
    where.set_title(f"goodput {its.goodput:.1%}")
    charts = (course_chart(its), saves_chart(its), steps_chart(its))
    for panel, chart in zip(drawn, charts, strict=True):
        unnamed = dict(chart.key)
        for line in chart.lines:
            panel.plot(
                [moment / unit_s for moment, _ in line.points],
                [value for _, value in line.points],
                color=_COLORS[line.color],
                linewidth=line.width,
                marker="." if len(line.points) == 1 else "",
                label=unnamed.pop(line.color, None),
            )
        if unnamed != chart.key:
            panel.legend(fontsize=8)
        panel.set_title(f"{chart.title}{', seconds' if chart.is_seconds else ''}")
        panel.set_xlabel(unit)
        panel.grid(visible=True, alpha=0.3)
        panel.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=90, format="png", metadata={"Software": None})
    pyplot.close(figure)
