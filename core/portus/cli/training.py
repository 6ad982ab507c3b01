"""Which training a report is of, and what there is to say of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from portus.cli.output import Output, age_text, count_text, moment_text, said, size_text
from portus.cli.pools import find_pool, nearest, reference_at
from portus.client.files.home import host_journals
from portus.errors import PortusError, UsageError
from portus.index.directory import JOURNAL_SUFFIX, first_generation, journal_directory
from portus.index.groups import part_of
from portus.index.journals import FoundJournal, journals_in, names_in, read
from portus.index.place import DEFAULT_DIRECTORY, Place, PlaceKind
from portus.journal.account import Account, account
from portus.journal.lines import Line
from portus.protocol.address import is_address

RESTARTS_MAX: Final = 20
"""Rows that are shown to people; all are in the document."""

WHERE: Final = {
    "kept": "steps that are kept",
    "lost": "steps that restarts lost",
    "saves": "added by saves",
    "down": "nothing ran",
    "other": "all else",
}
"""The parts of the time, and what they are called."""

WHY: Final = {
    "bound": "the bound on overhead",
    "turn": "a save takes so long",
    "failures": "the least loss at this mtbf",
    "first": "nothing was measured yet",
}
"""Of the reasons of ``portus.Cadence``."""


@dataclass(frozen=True, slots=True)
class JournaledRun:
    """A run and what its journals say. ``journals``: of all its ranks; the account is of the first
    one's time, with the bytes of all."""

    name: str
    journals: tuple[FoundJournal, ...]
    account: Account

    @property
    def is_running(self) -> bool:
        """True if its newest session runs now, on this machine."""
        newest = self.account.sessions[-1].begun.session
        return any(newest in each.running for each in self.journals)


def training_of(run: str | None, pool: str | None, output: Output) -> JournaledRun:
    """The training that ``run`` means; None: the only one there is. What cannot be read beside it
    is said. Raises ``UsageError`` if there is none, or several, and what reading raises."""
    directories, name, where = _directories(run, pool)
    found: dict[str, list[FoundJournal]] = {}
    failed: list[PortusError] = []
    for directory in directories:
        for path in journals_in(directory):
            try:
                each = read(path)
            except PortusError as error:
                failed.append(error)
            else:
                found.setdefault(_run_of(each.model), []).append(each)
    if failed and not (found if name is None else name in found):
        raise failed[0]
    for damage in failed:
        output.note(f"portus: skipped: {said(damage)}")
    if name is not None:
        if name not in found:
            there = f"; there are {sorted(found)}" if found else ""
            raise UsageError(f"{where}: there is no journal of a run {name!r}{there}")
        found = {name: found[name]}
    if not found:
        raise UsageError(
            f"{where}: there is no journal yet. One begins with the first step of a training "
            "that saves here, unless it sets journal=False"
        )
    if len(found) > 1:
        raise UsageError(
            f"{where}: expected one run, found {sorted(found)}. Name one: portus report "
            f"{min(found)} --pool {where}"
        )
    [(name, journals)] = found.items()
    return _accounted(name, journals, where)


def _accounted(name: str, journals: Sequence[FoundJournal], where: str) -> JournaledRun:
    """Ranks step together: the account is of the first one's, under all numbers of ranks."""
    ranks = [(part[1] if (part := part_of(each.model)) else 0, each) for each in journals]
    least = min(rank for rank, _ in ranks)
    lines: list[Line] = [line for rank, each in ranks if rank == least for line in each.lines]
    made = account(lines)
    if made is None:
        raise UsageError(f"{where}: the journal of {name!r} has no session that can be read")
    return JournaledRun(name, tuple(journals), made)


def _run_of(model: str) -> str:
    part = part_of(model)
    return model if part is None else part[0]


def _directories(run: str | None, pool: str | None) -> tuple[list[str], str | None, str]:
    """Directories of journals, the run that is meant there (None: the only one), and what to call
    the place."""
    if run is not None and is_address(run):
        return _of_place(Place.named(run)), None, run
    if run is None:
        place = find_pool(pool)
        return _of_place(place), None, place.path
    path = os.path.abspath(os.path.expanduser(run))
    if os.path.isdir(path):
        return _in_directory(path), None, path
    if os.path.exists(path):
        reference = reference_at(path)
        if reference is not None:
            place = find_pool(pool, near=path)
            return _of_place(place), _run_of(reference.model), place.path
        return _of_place(Place.named(path)), None, path
    if os.sep in run:
        raise UsageError(f"{path}: there is no run here: nothing has this name")
    place = find_pool(pool)
    return _of_place(place), run, place.path


def _in_directory(path: str) -> list[str]:
    """Of a directory of journals, a pool directory, or the directory of a run."""
    if path.endswith(JOURNAL_SUFFIX):
        return [path]
    own = _inside(path) or _inside(os.path.join(path, DEFAULT_DIRECTORY))
    above = nearest(path)
    return own or ([] if above is None else _inside(above))


def _of_place(place: Place) -> list[str]:
    if place.is_host:
        links = nearest(os.getcwd())
        return [each for host in place.hosts for each in host_journals(host, links)]
    if place.kind is PlaceKind.DIRECTORY:
        return _inside(place.path)
    return [journal_directory(first_generation(place.path))]


def _inside(directory: str) -> list[str]:
    names = [name for name in names_in(directory) if name.endswith(JOURNAL_SUFFIX)]
    return [os.path.join(directory, name) for name in names]


def parts(its: Account) -> list[tuple[str, float]]:
    """The parts of the time, in seconds, in the order of ``WHERE``."""
    values = (its.kept_s, its.lost_s, its.saves_s, its.down_s, its.other_s)
    return list(zip(WHERE, values, strict=True))


def written_bytes(seen: JournaledRun) -> int:
    """What all ranks stored in their pools."""
    return _of_all(seen, lambda each: each.copied_bytes)


def shared_bytes(seen: JournaledRun) -> int:
    """What all ranks found in an older version."""
    return _of_all(seen, lambda each: each.shared_bytes)


def _of_all(seen: JournaledRun, size: Callable[[Account], int]) -> int:
    accounts = [account(each.lines) for each in seen.journals]
    return sum(size(each) for each in accounts if each is not None)


def intervals(its: Account) -> list[tuple[float, int]]:
    """(moment, steps to the next save): as they were decided, or as saves came."""
    if its.choices:
        return [(each.time_s, each.line.interval) for each in its.choices]
    found: list[tuple[float, int]] = []
    for before, save in zip(its.saves, its.saves[1:], strict=False):
        if before.line.session == save.line.session:
            found.append((before.time_s, save.at - before.at))
    return found


def seconds_text(seconds: float) -> str:
    """A duration, for people."""
    if 0 < seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if seconds < 172_800 else f"{seconds / 86_400:.3g} days"


def state_text(seen: JournaledRun) -> str:
    """Whether it runs, and when it was seen last."""
    its = seen.account
    last = its.sessions[-1]
    time_ns = last.begun.time_ns + round(last.elapsed_s * 1e9)
    ended = last.ended
    if seen.is_running:
        return f"runs; its last step ended {age_text(time_ns)}"
    how = "ended by itself" if ended is not None and ended.closed else "was killed"
    return f"{how} {age_text(time_ns)}, at step {its.steps}"


def summary(seen: JournaledRun) -> list[tuple[str, str]]:
    """What there is to say in a line each."""
    its = seen.account
    copied, shared = written_bytes(seen), shared_bytes(seen)
    lines = [
        ("goodput", f"{its.goodput:.1%} of {seconds_text(its.wall_s)}; {its.goodput_up:.1%} of the "
                    "time in which it ran"),
        ("steps", f"{its.steps} kept, {its.lost_steps} lost at "
                  f"{count_text(len(its.restarts), 'restart')}; {its.pending_steps} "
                  "after the newest version"),
        ("saves", f"{its.committed} committed, {its.failed} failed; they added "
                  f"{its.overhead:.2%} to the time of steps"),
        ("blocked", f"{seconds_text(its.blocked_s)} in all, {seconds_text(its.median_blocked_s)} a "
                    f"save (median); copied in {seconds_text(its.copy_s)}"),
        ("bytes", f"{size_text(copied)} written, {size_text(shared)} shared with versions before"),
    ]  # fmt: skip
    if its.earlier:
        lines.append(("before", f"{count_text(its.earlier, 'earlier training')}, not counted here"))
    damaged = sum(each.damaged for each in seen.journals)
    if damaged:
        lines.append(("damaged", f"{count_text(damaged, 'line')} of the journal, skipped"))
    return lines


def restart_rows(its: Account) -> list[tuple[str, ...]]:
    """The newest restarts, for people."""
    rows: list[tuple[str, ...]] = []
    for number, each in list(enumerate(its.restarts, 1))[-RESTARTS_MAX:]:
        origin = "the start" if each.resumed_step is None else f"step {each.resumed_step}"
        least = "" if each.is_exact else "at least "
        rows.append(
            (
                str(number),
                moment_text(each.time_ns),
                origin,
                f"{least}{count_text(each.lost_steps, 'step')}",
                seconds_text(each.lost_s) if each.lost_steps else "",
                seconds_text(each.down_s),
            )
        )
    return rows
