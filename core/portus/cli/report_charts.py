"""The charts of a report, for a browser and as a picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, TypeVar

from portus.cli import words
from portus.companions.journal.account import Account, Placed, PlacedLine

POINTS_MAX: Final = 1500
"""Points of a line, at most; more are reduced to the highest of each few."""

Point = tuple[float, float]
"""A time, in seconds, and a value."""

Value = TypeVar("Value")


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
        lines.append(Line("kept", sorted([*ends, *_highest(own)])))
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
        most = max(1, POINTS_MAX * len(saves) // len(its.saves))
        copied = [(each.time_s, each.line.copy_s) for each in saves]
        blocked = [(each.time_s, each.line.blocked_s) for each in saves]
        lines += [Line("saves", _highest(copied, most)), Line("lost", _highest(blocked, most))]
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
    ends = {each.session.begun.session: each.end_s for each in its.sessions}
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


def cut(values: Sequence[Value], most: int) -> list[Sequence[Value]]:
    """Return the values in at most ``most`` parts of about equal length; no part is empty."""
    count = min(most, len(values))
    bounds = [len(values) * n // count for n in range(count + 1)] if count else []
    return [values[a:b] for a, b in itertools.pairwise(bounds)]


def _highest(points: Sequence[Point], most: int = POINTS_MAX) -> list[Point]:
    return [max(each, key=itemgetter(1)) for each in cut(points, most)]
