"""``portus report --png``: the report as a picture, drawn by matplotlib."""

from __future__ import annotations

from typing import Final

from portus.cli import words
from portus.cli.report_charts import course_chart, saves_chart, steps_chart
from portus.cli.training import WHERE, JournaledRun, parts

_COLORS: Final = dict(
    zip(
        (*WHERE, "line"),
        ("#1f8a5b", "#c8372d", "#2f6fd0", "#8a6fc0", "#b3bac2", "#d5dae0"),
        strict=True,
    )
)

_UNITS: Final = (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


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
