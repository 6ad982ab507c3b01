"""The time account of a training: goodput, and the loss of each restart.

Goodput is the share of wall time that produced kept steps: the number of kept steps, times the
duration of a step without saves, over the time from the first session's start to the last sign of
life, including the time in which nothing ran. Source: Google's ML Goodput ("Introducing ML
Productivity Goodput", 2024): productive step time over elapsed time, where steps that a restart
repeats, saves, and the time until a job runs again are not productive.

Steps are counted through restarts. A session continues from the place of the version that it
loaded: the place that an earlier session had reached when it saved that. A restart loses the steps
from there to the last one that ran before. A session that loaded nothing starts anew: if the one
before was killed, or committed nothing, that restart lost all; if it was closed, another training
begins, and a report is about the newest one.

If no version gives the place (one that became a real file, say), the step numbers of saves do, if
they count the optimizer's steps: a session whose first save is called n, after m steps, continued
from n - m.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from portus.companions.journal.lines import (
    Failed,
    IntervalDecided,
    Line,
    Saved,
    SessionBegun,
    SessionEnded,
    cost_of,
)

Placed = TypeVar("Placed", Saved, IntervalDecided)


@dataclass(frozen=True, slots=True)
class PlacedLine(Generic[Placed]):
    """A line with its place in the training. ``time_s``: since the training began."""

    time_s: float
    at: int
    line: Placed


@dataclass(slots=True)
class Session:
    """The lines of one session, and its place in the training: from ``begin_s``, at the step
    ``base``, with ``base_s`` of work done, to ``end_s``, at the step ``end``. ``ended`` is None if
    its end is unknown: then the session reached at least the step of its lines."""

    begun: SessionBegun
    saved: list[Saved] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    decided: list[IntervalDecided] = field(default_factory=list)
    ended: SessionEnded | None = None
    base: int = 0
    base_s: float = 0.0
    begin_s: float = 0.0

    @property
    def end(self) -> int:
        """Return the step at its end."""
        return self.base + self.steps

    @property
    def end_s(self) -> float:
        """Return the time of its end."""
        return self.begin_s + self.elapsed_s

    @property
    def steps(self) -> int:
        """Return the number of steps done, as far as is known."""
        return max((each.steps for each in self._lines()), default=0)

    @property
    def last_s(self) -> float:
        """Return the time of the last sign of life."""
        return max([self.begun.at_s, *(each.at_s for each in self._lines())])

    def _lines(self) -> Iterator[Saved | Failed | IntervalDecided | SessionEnded]:
        yield from self.saved
        yield from self.failed
        yield from self.decided
        if self.ended is not None:
            yield self.ended

    @property
    def elapsed_s(self) -> float:
        """Return the seconds from the session's start to its last sign of life."""
        return self.last_s - self.begun.at_s

    @property
    def is_closed(self) -> bool:
        """Return True if the session closed the run; else it was killed, or still runs."""
        return self.ended is not None and self.ended.closed

    def work_s(self, steps: int | None = None) -> float:
        """Return the work of the training that was done after so many of its steps; None: all."""
        return self.base_s + self._own_work_s(self.steps if steps is None else steps)

    def _own_work_s(self, steps: int) -> float:
        """Return the time of its first ``steps`` without saves: known at its saves and at its end,
        in proportion between them."""
        points = {0: 0.0, **{each.steps: each.work_s for each in self.saved}}
        if self.ended is not None:
            points[self.ended.steps] = self.ended.work_s
        before = max(point for point in points if point <= steps)
        after = min((point for point in points if point > steps), default=None)
        if after is None:  # its end is unknown
            step_s = points[before] / before if before else 0.0
            return points[before] + (steps - before) * step_s
        share = (steps - before) / (after - before)
        return points[before] + share * max(0.0, points[after] - points[before])

    def steps_at(self, token: str) -> int | None:
        """Return the number of steps done at the request of this version, or None."""
        for save in self.saved:
            if save.token == token:
                return save.steps
        return self.ended.asked.get(token) if self.ended else None

    def place(self, line: Placed) -> PlacedLine[Placed]:
        """Return a line of this session with its place."""
        time_s = self.begin_s + line.at_s - self.begun.at_s
        return PlacedLine(time_s, self.base + line.steps, line)


def sessions(lines: Iterable[Line]) -> list[Session]:
    """Return the sessions of ``lines``, in the order in which they began."""
    found: dict[str, Session] = {}
    rest: list[Line] = []
    for line in lines:
        if isinstance(line, SessionBegun):
            found.setdefault(line.session, Session(line))
        else:
            rest.append(line)
    saves: dict[str, dict[int, Saved]] = {}
    for line in rest:
        session = found.get(line.session)
        if session is None:
            continue  # its first line is damaged
        if isinstance(line, Saved):
            saves.setdefault(line.session, {})[line.number] = line
        elif isinstance(line, Failed):
            session.failed.append(line)
        elif isinstance(line, IntervalDecided):
            session.decided.append(line)
        elif isinstance(line, SessionEnded) and (
            session.ended is None or line.steps >= session.ended.steps
        ):
            session.ended = line
    for name, numbered in saves.items():
        found[name].saved = sorted(numbered.values(), key=lambda each: (each.steps, each.number))
    return sorted(found.values(), key=lambda each: each.begun.time_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A session that continues a training. ``time_ns``: its start. ``down_s``: the time without a
    process before. ``resumed_step``: the training's number of the version's step; None: it started
    anew. ``at``: its place, in steps of this training. ``lost_steps``, ``lost_s``: the work beyond
    that place before; at least so much, if not ``is_exact``. ``killed``: the session before was."""

    time_ns: int
    down_s: float
    resumed_step: int | None
    at: int
    lost_steps: int
    lost_s: float
    is_exact: bool
    killed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The time account of one training. Seconds of wall time; sizes in bytes.

    ``wall_s`` is ``kept_s`` (the kept steps, without the cost of saves), ``lost_s`` (steps that
    restarts discarded), ``saves_s`` (the cost of saves), ``down_s`` (nothing ran), and ``other_s``:
    all else, such as starts, validations and waits for data. ``steps``: kept. ``pending_steps``:
    those of them that a kill now would lose. ``earlier``: the number of older trainings.
    """

    begun_ns: int
    wall_s: float
    kept_s: float
    lost_s: float
    saves_s: float
    down_s: float
    other_s: float
    steps: int
    pending_steps: int
    lost_steps: int
    sessions: tuple[Session, ...]
    restarts: tuple[Restart, ...]
    saves: tuple[PlacedLine[Saved], ...]
    choices: tuple[PlacedLine[IntervalDecided], ...]
    committed: int
    failed: int
    blocked_s: float
    copy_s: float
    copied_bytes: int
    shared_bytes: int
    earlier: int

    @property
    def goodput(self) -> float:
        """Return the goodput, see the module; 0 to 1."""
        return min(1.0, self.kept_s / self.wall_s) if self.wall_s else 0.0

    @property
    def goodput_up(self) -> float:
        """Return the goodput within the time in which a session ran."""
        up_s = self.wall_s - self.down_s
        return min(1.0, self.kept_s / up_s) if up_s else 0.0

    @property
    def overhead(self) -> float:
        """Return the time that saves added to steps, as a share of it."""
        worked_s = self.kept_s + self.lost_s
        return self.saves_s / worked_s if worked_s else 0.0

    @property
    def step_s(self) -> float:
        """Return the mean time of a step without saves; 0 if unknown."""
        return self.kept_s / self.steps if self.steps else 0.0

    @property
    def median_blocked_s(self) -> float:
        """Return the median of the seconds that one save blocked; 0 without any save."""
        blocked_s = [each.line.blocked_s / each.line.saves for each in self.saves]
        return statistics.median(blocked_s or [0.0])


def account(lines: Iterable[Line]) -> Account | None:
    """Return the account of the newest training of a journal; None if none began."""
    spans: list[Session] = []
    restarts: list[Restart] = []
    earlier = 0
    for each in sessions(lines):
        before = spans[-1] if spans else None
        origin = _origin(each, spans)
        if before is None or (origin is None and before.is_closed and before.saved):
            earlier += len(spans[:1])
            spans, restarts = [each], []
            continue
        down_s = _gap(before, each)
        base, base_s = origin or (0, 0.0)
        lost = max(0, before.end - base)
        restarts.append(
            Restart(
                time_ns=each.begun.time_ns,
                down_s=down_s,
                resumed_step=None if origin is None else _resumed_step(each),
                at=base,
                lost_steps=lost,
                lost_s=max(0.0, before.work_s() - base_s) if lost else 0.0,
                is_exact=before.ended is not None,
                killed=not before.is_closed,
            )
        )
        each.base, each.base_s, each.begin_s = base, base_s, before.end_s + down_s
        spans.append(each)
    return _account(spans, restarts, earlier) if spans else None


def _account(spans: Sequence[Session], restarts: Sequence[Restart], earlier: int) -> Account:
    last = spans[-1]
    wall_s = last.end_s
    saved = [line for each in spans for line in each.saved]
    saves = [each.place(line) for each in spans for line in each.saved]
    # Times are measured, and some are medians: none may take another's time.
    down_s = sum(each.down_s for each in restarts)
    up_s = max(0.0, wall_s - down_s)
    kept_s = min(last.work_s(), up_s)
    lost_s = min(sum(each.lost_s for each in restarts), up_s - kept_s)
    # The cost of a save is a difference of times: one session's may be measured below 0.
    cost_s = sum(max(0.0, sum(map(cost_of, each.saved))) for each in spans)
    saves_s = min(cost_s, up_s - kept_s - lost_s)
    committed = [save.at for save in saves if save.at <= last.end]
    return Account(
        begun_ns=spans[0].begun.time_ns,
        wall_s=wall_s,
        kept_s=kept_s,
        lost_s=lost_s,
        saves_s=saves_s,
        down_s=down_s,
        other_s=max(0.0, wall_s - kept_s - lost_s - saves_s - down_s),
        steps=last.end,
        pending_steps=last.end - max([last.base, *committed]),
        lost_steps=sum(each.lost_steps for each in restarts),
        sessions=tuple(spans),
        restarts=tuple(restarts),
        saves=tuple(saves),
        choices=tuple(each.place(line) for each in spans for line in each.decided),
        committed=sum(each.saves for each in saved),
        failed=sum(line.saves for each in spans for line in each.failed),
        blocked_s=sum(each.blocked_s for each in saved),
        copy_s=sum(each.copy_s for each in saved),
        copied_bytes=sum(each.copied_bytes for each in saved),
        shared_bytes=sum(each.shared_bytes for each in saved),
        earlier=earlier,
    )


def _origin(session: Session, spans: Sequence[Session]) -> tuple[int, float] | None:
    """Return the place that a session continued from, and the work done by then; None: anew."""
    begun = session.begun
    if begun.resumed is not None:
        for before in reversed(spans):
            steps = before.steps_at(begun.resumed)
            if steps is not None:
                return before.base + steps, before.work_s(steps)
    step = _resumed_step(session)
    return None if step is None else _number_of(step, spans)


def _number_of(step: int, spans: Sequence[Session]) -> tuple[int, float] | None:
    """Return the place that a training calls ``step``, if its numbers count optimizer steps."""
    for before in reversed(spans):
        for save in reversed(before.saved):
            if save.step == step:
                return before.base + save.steps, before.work_s(save.steps)
    for before in reversed(spans):
        for save in reversed(before.saved):
            steps = save.steps + step - save.step
            if before.base + save.steps == save.step and 0 <= steps <= before.steps:
                return before.base + steps, before.work_s(steps)
    return None


def _resumed_step(session: Session) -> int | None:
    """Return the step that a session continued from, as the training calls it; None if unknown."""
    if session.begun.resumed_step is not None or not session.saved:
        return session.begun.resumed_step
    first = session.saved[0]
    return first.step - first.steps if first.step > first.steps else None


def _gap(before: Session, after: Session) -> float:
    """Return the seconds in which neither ran: by the clock since boot, if not rebooted since."""
    one, other = before.begun, after.begun
    if one.boot and one.boot == other.boot:
        return max(0.0, other.at_s - before.last_s)
    end_ns = one.time_ns + round(before.elapsed_s * 1e9)
    return max(0.0, (other.time_ns - end_ns) / 1e9)
