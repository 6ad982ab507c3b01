"""``portus report --html``: one page for a browser, which is self-contained.

Lines are SVG that stretches to the page. All text is HTML, to stay readable on a narrow page. There
is no script, no font, and no link to other files, as the policy of the page states.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import Final

from portus.cli import words
from portus.cli.output import Json
from portus.cli.report_charts import Chart, Line, course_chart, saves_chart, steps_chart
from portus.cli.training import WHERE, JournaledRun, parts, restart_rows, state_text, summary
from portus.companions.cadence.bound import WHY
from portus.companions.journal.account import Account

ROWS_MAX: Final = 50
"""Rows of a table, the newest; the data at the end of the page has all of them."""

_WIDTH: Final = 1000.0
_HEIGHT: Final = 300.0

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #626a73; --line: #d5dae0;
  --paper: #ffffff; --card: #f5f7f9; --kept: #1f8a5b; --lost: #c8372d; --saves: #2f6fd0;
  --down: #8a6fc0; --other: #b3bac2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebee; --soft: #9aa4ae; --line: #363d45;
  --paper: #14181c; --card: #1d2328; --kept: #46b881; --lost: #ee6a5f; --saves: #6ea2f2;
  --down: #b39ae6; --other: #5c6670; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 0 0 .5rem; }
p { margin: .25rem 0; } .soft, th, .axis { color: var(--soft); }
.goodput { font-size: 3.2rem; line-height: 1.1; font-weight: 650; margin: 1rem 0 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 1rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
section { background: var(--card); border-radius: .6rem; padding: 1rem; margin: 1rem 0;
  min-width: 0; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr));
  gap: 0 1rem; }
.bar { display: flex; height: 2rem; border-radius: .35rem; overflow: hidden; gap: 1px; }
.key { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin-top: .6rem; font-size: .9rem; }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: .2em;
  margin-right: .4em; }
.plot { display: grid; grid-template-columns: max-content 1fr; gap: .2rem .5rem; }
.plot svg { width: 100%; height: 14rem; display: block; border-left: 1px solid var(--line);
  border-bottom: 1px solid var(--line); overflow: visible; }
.axis { font-size: .8rem; font-variant-numeric: tabular-nums; display: flex;
  justify-content: space-between; }
.up { flex-direction: column; text-align: right; }
svg * { vector-effect: non-scaling-stroke; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; font-weight: 400; }
.number { text-align: right; }
"""


def page(seen: JournaledRun, made: dict[str, Json]) -> str:
    """Return the whole page. made: the JSON document, which is put at its end."""
    its = seen.account
    title = html.escape(f"{seen.title}: goodput {its.goodput:.1%}")
    pairs = [(html.escape(name), html.escape(text)) for name, text in summary(seen)]
    facts = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in pairs)
    body = [
        f"<h1>{html.escape(seen.title)}</h1>",
        f'<p class="soft">begun {words.moment(its.begun_ns)}; {html.escape(state_text(seen))}</p>',
        f'<p class="goodput" id="goodput">{its.goodput:.1%}</p>',
        '<p class="soft">goodput: the share of wall time spent on steps that are kept, as long as '
        "these take without saves</p>",
        f"<dl>{facts}</dl>",
        _section("Where the time went", _where(its)),
        _chart(course_chart(its), its),
        f'<div class="pair">{_chart(saves_chart(its), its)}{_chart(steps_chart(its), its)}</div>',
    ]
    if its.restarts:
        heads = ("", "at", "resumed from", "lost", "", "nothing ran for")
        body.append(_section("Restarts", _table(heads, restart_rows(its))))
    if its.choices:
        body.append(_section("Why the interval is what it is", _reasons(its)))
    # A name with "</script>" in it would end the data.
    data = json.dumps(made).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body><main>"
        + "\n".join(body)
        + f'\n</main><script type="application/json" id="report">{data}</script></body></html>\n'
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{content}</section>"


def _where(its: Account) -> str:
    whole = its.wall_s or 1.0
    bars = "".join(
        f'<div style="flex:{value / whole:.6f} 0 0;background:var(--{name})"></div>'
        for name, value in parts(its)
    )
    return f'<div class="bar">{bars}</div>' + _key(
        (name, f"{WHERE[name]}: {value / whole:.1%}, {words.seconds(value)}")
        for name, value in parts(its)
    )


def _chart(chart: Chart, its: Account) -> str:
    """Return a section: lines in a frame, with the ends and the middle of both axes in words."""
    note = f'<p class="soft">{html.escape(chart.note)}</p>' if chart.note else ""
    if not chart.lines:
        return _section(chart.title, note)
    end = max(its.wall_s, 1e-9)
    top = max([*(value for line in chart.lines for _, value in line.points), 1e-9])
    marks = "".join(_polyline(line, end, top) for line in chart.lines)
    up = "".join(f"<span>{html.escape(chart.text(top * share))}</span>" for share in (1, 0.5, 0))
    along = "".join(
        f"<span>{html.escape(words.seconds(end * n / 2) if n else '0')}</span>" for n in range(3)
    )
    return _section(
        chart.title,
        f'<div class="plot"><div class="axis up">{up}</div>'
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" preserveAspectRatio="none">{marks}</svg>'
        f'<div></div><div class="axis">{along}</div></div>'
        f"{_key(chart.key.items())}{note}",
    )


def _polyline(line: Line, end: float, top: float) -> str:
    points = line.points if len(line.points) > 1 else [*line.points, *line.points]
    placed = " ".join(  # one point alone is not drawn, and two of it are a dot
        f"{_WIDTH * x / end:.1f},{_HEIGHT * (1 - y / top):.1f}"
        for x, y in points
        if math.isfinite(x) and math.isfinite(y)
    )
    return (
        f'<polyline points="{placed}" fill="none" stroke="var(--{line.color})" '
        f'stroke-width="{line.width}" stroke-linejoin="round" stroke-linecap="round"/>'
    )


def _reasons(its: Account) -> str:
    rows = [
        (
            words.seconds(each.time_s),
            str(each.at),
            str(line.interval),
            WHY.get(line.reason, line.reason),
            "" if line.step_s is None else words.seconds(line.step_s),
            "" if line.cost_s is None else words.seconds(max(0.0, line.cost_s)),
            f"{line.overhead:.2%} of {line.max_overhead:.2%}",
        )
        for each in its.choices[-ROWS_MAX:]
        for line in [each.line]
    ]
    heads = ("after", "at step", "interval", "because of", "a step", "a save costs", "overhead")
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(each)}</th>" for each in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _key(entries: Iterable[tuple[str, str]]) -> str:
    spans = (
        f'<span><i style="background:var(--{color})"></i>{html.escape(text)}</span>'
        for color, text in entries
    )
    return f'<div class="key">{"".join(spans)}</div>'
