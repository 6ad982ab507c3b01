"""Journals of replayed trainings: for tests, and for the picture of docs/report.md.

python -m tests.bench.journal [--write]      prints a report, or renews the picture of the page
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Final

from portus.companions.cadence.bound import Decision, Rule
from portus.companions.journal.lines import (
    Head,
    IntervalDecided,
    Line,
    Saved,
    SessionBegun,
    SessionEnded,
    encode,
)
from tests.bench.cadence import (
    BOUND,
    DOCS,
    HOUR,
    PROFILE,
    Job,
    Load,
    Outcome,
    Span,
    drawn,
    replay,
    ways,
)
from tests.unit.cli.scene import portus

OFTEN: Final = Load(tuple((h * HOUR, (h + 1) * HOUR) for h in range(2, 200, 3)), 1.5, 3.0)
"""Something else uses the machine for one hour in three."""

SIZE: Final = 3 << 30
"""Bytes of a version."""

EPOCH_S: Final = 1_760_000_000
"""A wall clock to begin at, so that the same replay gives the same bytes."""


def token(number: int) -> str:
    return f"{number:032x}"


def written(outcome: Outcome, job: Job | None = None) -> list[Line]:
    """What the job of a replay has in its journal; ``job``: for its decisions, if wanted."""
    lines: list[Line] = []
    session, saves, base, newest = "", 0, 0, 0
    steps = work_s = 0.0
    begun_anew = True
    for number, span in enumerate(outcome.spans):
        if begun_anew:
            session, steps, work_s = f"s{number}", 0.0, 0.0
            base = newest
            lines.append(_begun(session, span, saves, newest))
        elif span.committed_s is not None:
            saves, newest = saves + 1, base + round(steps)
            lines.append(
                Saved(
                    session=session, number=saves, step=newest, steps=round(steps),
                    at_s=span.committed_s, token=token(saves),
                    work_s=work_s, cost_s=span.cost_s,
                    blocked_s=PROFILE.host_copy_s / 2, copy_s=PROFILE.host_copy_s,
                    total_s=span.committed_s - span.begin_s, copied_bytes=SIZE,
                )
            )  # fmt: skip
        if job is not None:
            lines.append(_decided(session, outcome, number, job, round(steps)))
        steps, work_s = steps + span.steps, work_s + span.steps * span.step_s
        begun_anew = span.failed
        if span.failed or number == len(outcome.spans) - 1:
            lines.append(
                SessionEnded(
                    session=session, closed=not span.failed, steps=int(steps), at_s=span.end_s,
                    work_s=work_s,
                )
            )  # fmt: skip
    return lines


def _begun(session: str, span: Span, saves: int, step: int) -> SessionBegun:
    return SessionBegun(
        session=session, at_s=span.begin_s, time_ns=int((EPOCH_S + span.begin_s) * 1e9), boot="b",
        process=1, resumed=token(saves) if saves else None,
        resumed_step=step if saves else None,
    )  # fmt: skip


def _decided(session: str, outcome: Outcome, number: int, job: Job, steps: int) -> IntervalDecided:
    moment, interval = outcome.intervals[number]
    rule = Rule(max_overhead=BOUND)
    decision = Decision(steps=interval, reason="bound", rule=rule, costs=job.costs(moment))
    return IntervalDecided(session=session, steps=steps, at_s=moment, decision=decision)


def example(directory: Path) -> Path:
    """A directory with the journal of ten hours of a job that fails now and then, on a machine that
    something else uses too."""
    job = Job(load=OFTEN)
    outcome = replay(job, ways(job, HOUR)["Portus"], drawn(2 * HOUR, 10 * HOUR, 3), 10 * HOUR)
    inside = directory / ".portus" / "run.journal"
    inside.mkdir(parents=True)
    lines = [Head(format=1, model="run"), *written(outcome, job)]
    (inside / "run.lines").write_bytes(b"".join(map(encode, lines)))
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew the picture")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = example(Path(name))
        picture = ["--png", str(DOCS / "report.png")] if arguments.write else []
        print(portus("report", place, *picture).out)


if __name__ == "__main__":
    main()
