"""Which calls are made to fail, and what a run may never do all the same: the one oracle."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from tests.faults import calls
from tests.faults.calls import ERRORS, Call, Fault, Where
from tests.faults.runs import Report
from tests.nursery import Nursery, nursery

HANG_S = 60.0
"""A run takes half a second; the longest wait that it may make, for a busy pool, takes ten."""


def trainings() -> Nursery:
    """Where trainings run in which calls fail."""
    return nursery("tests.faults.runs", PORTUS_ACCELERATE="1", **calls.environment())


def report_of(kind: str, root: str, fault: Fault | None) -> Report:
    """Run one training; ``AssertionError`` if it hangs, or dies."""
    with trainings().start("run", kind, root, fault.plain() if fault else None) as child:
        return Report(**json.loads(child.line(HANG_S)))


def faults(counted: Report, source: random.Random) -> Iterator[Fault]:
    """For ever, in an order by chance: any call that was counted, with any errno that it may have,
    once or from then on; and all calls at a place, or all that change something, from one on."""
    kinds = [(Call(call), Where(where), count) for call, where, count in counted.counts]
    places = {where: [k for k in kinds if k[1] == where] for where in {k[1] for k in kinds}}
    while True:  # ends with whoever asks
        for call, where, count in source.sample(kinds, len(kinds)):
            number = source.randrange(count)
            yield Fault(call, where, number, source.choice(ERRORS[call]), source.random() < 0.5)
        for where, kinds_there in places.items():
            number = source.randrange(sum(count for _, _, count in kinds_there))
            yield Fault(Call.ANY, where, number, source.choice(ERRORS[Call.OPEN][:-1]), True)
            number = source.randrange(number + 1) // 4
            yield Fault(Call.ANY_CHANGE, where, number, source.choice(ERRORS[Call.WRITE]), True)


def complaints(report: Report) -> list[str]:
    """What this run did that no run may do."""
    found = []
    if report.stopped_by == "error":
        found.append(f"stopped by what is no PortusError: {report.stopped}")
    if report.stopped_by == "portus" and report.told_in_time:
        found.append(f"stopped after step {report.told_in_time} was committed: {report.stopped}")
    found += [f"step {step}: {e}" for step, e in report.failed.items() if "NOT OURS" in e]
    found += [f"thread {name} did not end" for name in report.left if not report.stopped]
    for path, what in report.found.items():
        found += [f"{path}: {each}" for each in _wrong(report, path, what)]
    loaded = [step for step in report.found.values() if isinstance(step, int)]
    if report.told and max(report.told) > max(loaded, default=-1):
        found.append(f"step {max(report.told)} was told committed; only {loaded} load")
    return found


def _wrong(report: Report, path: str, what: int | str) -> Iterator[str]:
    own = report.names.get(path)
    if isinstance(what, str):
        if "NOT OURS" in what:
            yield what
        elif own in report.told:
            yield f"told committed, and does not load: {what}"
    elif own is not None and own != what:
        said = any(path in message and "INSTEAD" in message for message in report.logged)
        if own in report.told or not said:
            yield f"loads step {what}"
