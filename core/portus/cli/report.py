"""``portus report [RUN]``: where the time of a training went, and how much each restart lost."""

from __future__ import annotations

import contextlib
import html
import io
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import msgspec

from portus.cli import words
from portus.cli.in_place import in_place
from portus.cli.options import POOL, Text, argument, option
from portus.cli.output import Json, Output, Row, fields
from portus.cli.report_charts import by_session, figure, intervals
from portus.cli.training import WHERE, JournaledRun, parts, training_of
from portus.companions.cadence.bound import WHY
from portus.companions.journal.account import Account

WIDTH: Final = 48
"""Characters of a full bar."""

RESTARTS_MAX: Final = 20
"""Restarts to show in the text; the JSON document has all of them."""

REASONS_MAX: Final = 50
"""Decisions to show in a page, the newest; the data at its end has all of them."""

_BLOCKS: Final = " ▁▂▃▄▅▆▇█"

_PAGE: Final = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>:root {{ color-scheme: light dark; }} body {{ max-width: 72rem; margin: 1rem auto; }}
pre {{ overflow-x: auto; }} svg {{ width: 100%; height: auto; background: #fff; }}</style></head>
<body>{picture}
<pre>{text}</pre>
<script type="application/json" id="report">{data}</script></body></html>
"""


def command(
    output: Output,
    name: Text = argument(
        "[RUN]", "the run's directory, its pool, one of its checkpoints, or its name", None
    ),
    pool: Text = POOL,
    page: Text = option("--html FILE", "also write an HTML page"),
    png: Text = option("--png FILE", "also write a plot"),
) -> None:
    """Show where the time of a run went, and which steps each restart lost.

    Reads the journal beside the pool. The run may be active, killed or finished. The HTML page is
    self-contained. Page and plot need matplotlib.
    """
    seen = training_of(name, pool, output)
    made = document(seen)
    if page is not None:
        with in_place(page, force=True) as temporary:
            Path(temporary).write_bytes(_page(seen, made).encode())
    if png is not None:
        with in_place(png, force=True) as temporary:
            figure(seen).savefig(temporary, dpi=90, format="png", metadata={"Software": None})
    _show(seen, output)
    output.document(made)
    for path in filter(None, (page, png)):
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
        "saves": fields(
            its, "committed", "failed", "blocked_s", "copy_s", "copied_bytes", "shared_bytes"
        ),
        "restarts": [
            {"moment": words.moment(each.time_ns), **asdict(each)} for each in its.restarts
        ],
        "versions": [
            {"time_s": each.time_s, "steps_done": each.at, **msgspec.structs.asdict(each.line)}
            for each in its.saves
        ],
        "intervals": [
            {
                "time_s": each.time_s,
                "steps_done": each.at,
                "overhead": each.line.decision.overhead,
                **msgspec.to_builtins(each.line.decision),
            }
            for each in its.choices
        ],
        "earlier_trainings": its.earlier,
        "damaged_lines": sum(each.damaged for each in seen.journals),
    }


def _page(seen: JournaledRun, made: dict[str, Json]) -> str:
    """Return the page: the text, the picture, and the JSON document."""
    text, picture, its = io.StringIO(), io.StringIO(), seen.account
    figure(seen).savefig(picture, format="svg", metadata={"Date": None})
    with contextlib.redirect_stdout(text):
        output = Output(as_json=False)
        _show(seen, output)
        if its.choices:
            output.line()
            heads = (">INTERVAL", "AFTER", ">AT STEP", "BECAUSE OF", ">A STEP", ">A SAVE", ">ADDED")
            output.table(heads, _reason_rows(its))
    return _PAGE.format(
        title=html.escape(f"{seen.title}: goodput {its.goodput:.1%}"),
        text=html.escape(text.getvalue()),
        picture=picture.getvalue()[picture.getvalue().index("<svg") :],
        # A name with "</script>" in it would end the data.
        data=json.dumps(made).replace("<", "\\u003c"),
    )


def _show(seen: JournaledRun, output: Output) -> None:
    its = seen.account
    output.line(f"{seen.title}: begun {words.moment(its.begun_ns)}; {_state_text(seen)}")
    output.line()
    for name, text in _summary(seen):
        output.line(f"{name:8} {text}")
    output.line()
    rows: list[Row] = []
    for name, took in parts(its):
        share = took / its.wall_s if its.wall_s else 0.0
        rows.append((WHERE[name], "█" * round(WIDTH * share), f"{share:.1%}", words.seconds(took)))
    output.table(("WHERE THE TIME WENT", "", ">SHARE", ">TIME"), rows)
    steps = [[value for _, value in points[:-1]] for points in intervals(its)]
    _show_course("steps between saves", steps, output)
    lines = [[each.line for each in saves] for saves in by_session(its.saves)]
    blocked = [[each.blocked_s / each.saves for each in saves] for saves in lines]
    _show_course("blocked by a save", blocked, output, is_seconds=True)
    if its.choices:
        newest = its.choices[-1].line.decision
        output.line(f"  now {newest.steps}: {WHY[newest.reason]}")
    if its.restarts:
        output.line()
        heads = (">RESTART", "AT", "RESUMED FROM", ">LOST", "", ">DOWN")
        output.table(heads, _restart_rows(its))


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


def _state_text(seen: JournaledRun) -> str:
    """Return whether a run is active, and when it was last active."""
    its = seen.account
    last = its.sessions[-1]
    time_ns = last.begun.time_ns + round(last.elapsed_s * 1e9)
    if seen.is_running:
        return f"runs; its last step ended {words.age(time_ns)}"
    how = "ended normally" if last.is_closed else "was killed"
    return f"{how} {words.age(time_ns)}, at step {its.steps}"


def _summary(seen: JournaledRun) -> list[tuple[str, str]]:
    """Return the names and texts of the lines above a report."""
    its = seen.account
    blocked, median = words.seconds(its.blocked_s), words.seconds(its.median_blocked_s)
    restarts = words.count(len(its.restarts), "restart")
    lines = [
        ("run", seen.name),
        ("goodput", f"{its.goodput:.1%} of {words.seconds(its.wall_s)}; {its.goodput_up:.1%} of "
                    "the time in which it ran"),
        ("steps", f"{its.steps} kept, {its.lost_steps} lost at {restarts}; {its.pending_steps} "
                  "after the newest version"),
        ("saves", f"{its.committed} committed, {its.failed} failed; they added "
                  f"{its.overhead:.2%} to the time of steps"),
        ("blocked", f"{blocked} in all, {median} a save (median); copied in "
                    f"{words.seconds(its.copy_s)}"),
        ("bytes", f"{words.size(its.copied_bytes)} written, {words.size(its.shared_bytes)} "
                  "found in versions before"),
    ]  # fmt: skip
    if its.earlier:
        earlier = words.count(its.earlier, "earlier training")
        lines.append(("before", f"{earlier}, not counted here"))
    damaged = sum(each.damaged for each in seen.journals)
    if damaged:
        lines.append(("damaged", f"{words.count(damaged, 'line')} of the journal, skipped"))
    return lines


def _restart_rows(its: Account) -> list[Row]:
    """Return the newest restarts for people."""
    rows: list[Row] = []
    for number, each in list(enumerate(its.restarts, 1))[-RESTARTS_MAX:]:
        origin = "the start" if each.resumed_step is None else f"step {each.resumed_step}"
        steps = f"{'' if each.is_exact else 'at least '}{words.count(each.lost_steps, 'step')}"
        lost = words.seconds(each.lost_s) if each.lost_steps else ""
        moment, down = words.moment(each.time_ns), words.seconds(each.down_s)
        rows.append((str(number), moment, origin, steps, lost, down))
    return rows


def _reason_rows(its: Account) -> list[Row]:
    """Return the newest decisions on the interval."""
    rows: list[Row] = []
    for each in its.choices[-REASONS_MAX:]:
        decision, after = each.line.decision, words.seconds(each.time_s)
        costs, why = decision.costs, WHY[decision.reason]
        step = None if costs is None else words.seconds(costs.step_s)
        cost = None if costs is None else words.seconds(max(0.0, costs.cost_s))
        added = f"{decision.overhead:.2%} of {decision.rule.max_overhead:.2%}"
        rows.append((decision.steps, after, each.at, why, step, cost, added))
    return rows
