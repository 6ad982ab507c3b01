"""``portus report --png``: the report as a picture, drawn by matplotlib."""

from __future__ import annotations

import io
from typing import Final

from portus.cli.training import (
    WHERE,
    JournaledRun,
    by_session,
    intervals,
    parts,
    seconds_text,
)

_COLORS: Final = dict(
    zip(WHERE, ("#1f8a5b", "#c8372d", "#2f6fd0", "#8a6fc0", "#b3bac2"), strict=True)
)

_UNITS: Final = (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def picture(seen: JournaledRun) -> bytes:
    """Return a PNG. Raises ``ModuleNotFoundError`` without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    its = seen.account
    unit, unit_s = next((each for each in _UNITS if its.wall_s >= 2 * each[1]), _UNITS[-1])
    figure, panels = pyplot.subplots(2, 2, figsize=(11, 7))
    where, course, saves, steps = panels.flat
    for row, (name, value) in enumerate(parts(its)):
        share = value / its.wall_s if its.wall_s else 0.0
        where.barh(row, 100 * share, color=_COLORS[name])
        where.text(100 * share + 1, row, f"{share:.1%}, {seconds_text(value)}", va="center")
    where.set_yticks(range(len(WHERE)), list(WHERE.values()))
    where.invert_yaxis()
    where.set_xlim(0, 130)
    where.set_xlabel("share of wall time, %")
    where.set_title(f"goodput {its.goodput:.1%}")
    for spell in its.spells:
        times = [spell.begin_s / unit_s, spell.end_s / unit_s]
        course.plot(times, [spell.base, spell.end], color=_COLORS["kept"])
    for before, spell in zip(its.spells, its.spells[1:], strict=False):
        at = before.end_s / unit_s
        course.plot([at, at], [before.end, spell.base], color=_COLORS["lost"], linewidth=2.5)
    course.set_title(f"steps: {its.steps} kept, {its.lost_steps} lost (red)")
    for number, session in enumerate(by_session(its.saves)):
        moments = [each.time_s / unit_s for each in session]
        for name, color, values in (
            ("blocked", "lost", [each.line.blocked_s for each in session]),
            ("copied", "saves", [each.line.copy_s for each in session]),
        ):
            dot = "." if len(session) == 1 else ""
            label = None if number else name
            saves.plot(moments, values, color=_COLORS[color], marker=dot, label=label)
    saves.set_title("what a save took, seconds")
    if its.saves:
        saves.legend(fontsize=8)
    for points in intervals(its):
        times = [moment / unit_s for moment, _ in points]
        steps.step(times, [each for _, each in points], where="post", color=_COLORS["saves"])
    steps.set_title("steps from one save to the next")
    for panel in (course, saves, steps):
        panel.set_xlabel(unit)
        panel.grid(visible=True, alpha=0.3)
        panel.set_ylim(bottom=0)
    figure.tight_layout()
    made = io.BytesIO()
    figure.savefig(made, dpi=90, format="png", metadata={"Software": None})
    pyplot.close(figure)
    return made.getvalue()
