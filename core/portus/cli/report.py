"""``portus report [RUN]``: where the time of a training went, and how much each restart lost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from portus.cli import report_charts, report_page, words
from portus.cli.in_place import in_place
from portus.cli.options import POOL, Text, argument, option
from portus.cli.output import Json, Output, Row, fields
from portus.cli.report_charts import by_session, intervals
from portus.cli.training import (
    WHERE,
    JournaledRun,
    parts,
    restart_rows,
    state_text,
    summary,
    training_of,
)
from portus.companions.cadence.bound import WHY

WIDTH: Final = 48
"""Characters of a full bar."""

_BLOCKS: Final = " ▁▂▃▄▅▆▇█"


def command(
    output: Output,
    name: Text = argument(
        "[RUN]", "the run's directory, its pool, one of its checkpoints, or its name", None
    ),
    pool: Text = POOL,
    html: Text = option("--html FILE", "also write an HTML page"),
    png: Text = option("--png FILE", "also write a plot"),
) -> None:
    """Show where the time of a run went, and which steps each restart lost.

    Reads the journal beside the pool. The run may be active, killed or finished. The HTML page is
    self-contained; the plot needs matplotlib.
    """
    seen = training_of(name, pool, output)
    made = document(seen)
    if html is not None:
        with in_place(html, force=True) as temporary:
            Path(temporary).write_bytes(report_page.page(seen, made).encode())
    if png is not None:
        with in_place(png, force=True) as temporary:
            report_charts.draw(seen, temporary)
    _show(seen, output)
    output.document(made)
    for path in filter(None, (html, png)):
        output.note(f"written: {path}")


def document(seen: JournaledRun) -> dict[str, Json]:
    """Return the JSON document of the report."""
    its = seen.account
    return {
        "run": seen.name,
        "title": seen.title,
        "journals": [each.path for each in seen.journals],
        "running": seen.is_running,
        "begun": words.moment(its.begun_ns),
        "goodput": its.goodput,
        "goodput_while_running": its.goodput_up,
        "overhead": its.overhead,
        "seconds": {"wall": its.wall_s, **dict(parts(its))},
        "steps": {
            "kept": its.steps,
            "lost": its.lost_steps,
            "not_saved_yet": its.pending_steps,
            "seconds_each": its.step_s,
        },
        "saves": {
            **fields(its, "committed", "failed", "blocked_s", "copy_s"),
            **fields(seen, "written_bytes", "shared_bytes"),
        },
        "restarts": [
            {
                "at": words.moment(each.time_ns),
                "went_on_from_step": each.resumed_step,
                "exact": each.is_exact,
                **fields(each, "lost_steps", "lost_s", "killed", "down_s"),
            }
            for each in its.restarts
        ],
        "versions": [
            {
                "time_s": each.time_s,
                "steps_done": each.at,
                **fields(each.line, "step", "blocked_s", "copy_s", "commit_s", "total_s", "cost_s"),
                "written_bytes": each.line.copied_bytes,
                "shared_bytes": each.line.shared_bytes,
            }
            for each in its.saves
        ],
        "intervals": [
            {
                "time_s": each.time_s,
                "steps_done": each.at,
                **fields(each.line, "interval", "reason", "overhead", "max_overhead"),
                **fields(each.line, "step_s", "cost_s", "save_s", "mtbf_s"),
            }
            for each in its.choices
        ],
        "earlier_trainings": its.earlier,
        "damaged_lines": sum(each.damaged for each in seen.journals),
    }


def _show(seen: JournaledRun, output: Output) -> None:
    its = seen.account
    output.line(f"{seen.title}: begun {words.moment(its.begun_ns)}; {state_text(seen)}")
    output.line()
    for name, text in summary(seen):
        output.line(f"{name:8} {text}")
    output.line()
    rows: list[Row] = []
    for name, took in parts(its):
        share = took / its.wall_s if its.wall_s else 0.0
        rows.append((WHERE[name], "█" * round(WIDTH * share), f"{share:.1%}", words.seconds(took)))
    output.table(("WHERE THE TIME WENT", "", ">SHARE", ">TIME"), rows)
    steps = [[value for _, value in points[:-1]] for points in intervals(its)]
    _show_course("steps between saves", steps, output)
    blocked = [[each.line.blocked_s for each in saves] for saves in by_session(its.saves)]
    _show_course("blocked by a save", blocked, output, is_seconds=True)
    if its.choices:
        newest = its.choices[-1].line
        output.line(f"  now {newest.interval}: {WHY.get(newest.reason, newest.reason)}")
    if its.restarts:
        output.line()
        output.table((">RESTART", "AT", "RESUMED FROM", ">LOST", "", ">DOWN"), restart_rows(its))


def _show_course(
    title: str, sessions: list[list[float]], output: Output, *, is_seconds: bool = False
) -> None:
    values = [value for session in sessions for value in session]
    if values:
        text = words.seconds if is_seconds else "{:.0f}".format
        output.line()
        output.line(f"{title}: {text(min(values))} to {text(max(values))}")
        output.line(f"  {sparks(sessions)}")


def sparks(sessions: Sequence[Sequence[float]]) -> str:
    """Return values as heights, with a gap between sessions; of many, the highest of each few."""
    total = sum(map(len, sessions))
    if len(sessions) > WIDTH // 4:
        sessions = [[value for session in sessions for value in session]]
    few = []
    for each in sessions:
        count = min(len(each), max(1, round(WIDTH * len(each) / max(WIDTH, total))))
        bounds = [len(each) * n // count for n in range(count + 1)]
        few.append([max(each[a:b]) for a, b in itertools.pairwise(bounds)])
    top = max(value for each in few for value in each) or 1.0
    return " ".join(
        "".join(_BLOCKS[max(1, round(8 * value / top))] for value in each) for each in few
    )
