"""The training that a report is about, and the facts that the report shows."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from portus.cli.output import Output, age_text, count_text, moment_text, said, size_text
from portus.cli.pools import find_pool, nearest
from portus.client.files.home import host_journals
from portus.errors import PortusError, UsageError
from portus.index.directory import JOURNAL_SUFFIX, journal_directory
from portus.index.journals import FoundJournal, journals_in, names_in, read
from portus.index.place import DEFAULT_DIRECTORY, SUFFIX, Place, PlaceKind
from portus.journal.account import Account, CommittedSave, IntervalDecision, account
from portus.journal.lines import Saved
from portus.media.dax import is_device
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
    """A run and what its journals say."""

    name: str
    journals: tuple[FoundJournal, ...]
    account: Account

    @property
    def title(self) -> str:
        """What a user calls it: the directory of its checkpoints, with the project's, where the
        name was made of that; else its name."""
        within = os.path.dirname(os.path.dirname(os.path.abspath(self.journals[0].path)))
        root = os.path.dirname(within)
        if os.path.basename(within) != DEFAULT_DIRECTORY:
            return self.name
        if not os.path.isdir(os.path.join(root, self.name)):
            return self.name
        below = f"/{self.name}".removesuffix("/checkpoints")
        return f"{os.path.basename(root)}{below}" or self.name

    @property
    def is_running(self) -> bool:
        """True if its newest session runs now, on this machine."""
        newest = self.account.sessions[-1].begun.session
        return any(newest in each.running for each in self.journals)


def training_of(run: str | None, pool: str | None, output: Output) -> JournaledRun:
    """The training that ``run`` means; None: the only one there is. What cannot be read beside it
    is said. Raises ``UsageError`` if there is none, or several, and what reading raises."""
    aim = _aimed(run, pool)
    found, failed = runs_in(aim.directories)
    chosen = _chosen(aim, found)
    if failed and not chosen:
        raise failed[0]
    for damage in failed:
        output.note(f"portus: skipped: {said(damage)}")
    if not found:
        raise UsageError(
            f"{aim.where}: there is no journal yet. One begins with the first step of a training "
            "that saves here, unless it sets journal=False"
        )
    if not chosen:
        raise UsageError(
            f"{aim.where}: there is no journal of a run {aim.name!r}; there are {sorted(found)}"
        )
    if len(chosen) > 1:
        raise UsageError(
            f"{aim.where}: expected one run, found {sorted(chosen)}. Name one: portus report "
            f"{shlex.quote(min(chosen))} --pool {shlex.quote(aim.where)}"
        )
    [name] = chosen
    return _accounted(name, found[name], aim.where)


def runs_in(
    directories: Iterable[str],
) -> tuple[dict[str, list[FoundJournal]], list[PortusError]]:
    """The journals of each run in these directories of journals, and why others cannot be read."""
    found: dict[str, list[FoundJournal]] = {}
    failed: list[PortusError] = []
    for directory in directories:
        for path in journals_in(directory):
            try:
                each = read(path)
            except PortusError as error:
                failed.append(error)
            else:
                found.setdefault(each.model, []).append(each)
    return found, failed


@dataclass(frozen=True, slots=True)
class _Aim:
    """What RUN means. ``directories``: of journals; ``where``: what to call their place; ``name``:
    the run that is meant there; ``path``: what its checkpoints are at; None each if not known."""

    directories: list[str]
    where: str
    name: str | None = None
    path: str | None = None


def _chosen(aim: _Aim, found: dict[str, list[FoundJournal]]) -> set[str]:
    """The runs that are meant: by name, else by their files, else all."""
    if aim.name in found:
        return {aim.name}
    if aim.path is None:
        return set(found) if aim.name is None else set()
    path = os.path.realpath(aim.path)
    files = {name: _files(journals) for name, journals in found.items()}
    exact = {name for name, paths in files.items() if path in paths}
    if exact:
        return exact
    inside = {name for name, paths in files.items() if any(_is_below(each, path) for each in paths)}
    if inside:
        return inside
    beside = {
        name
        for name, paths in files.items()
        if any(_is_below(path, os.path.dirname(each)) for each in paths)
    }
    return beside or set(found)


def _files(journals: Iterable[FoundJournal]) -> set[str]:
    """Where the checkpoints of a run were put, without symbolic links."""
    return {
        os.path.realpath(os.path.join(os.path.dirname(each.path), line.file))
        for each in journals
        for line in each.lines
        if isinstance(line, Saved) and line.file
    }


def files_of(journals: Iterable[FoundJournal]) -> list[str]:
    """The checkpoints of a run that are where they were put."""
    return sorted(path for path in _files(journals) if os.path.exists(path))


def _is_below(path: str, directory: str) -> bool:
    return os.path.commonpath([path, directory]) == directory


def _accounted(name: str, journals: Sequence[FoundJournal], where: str) -> JournaledRun:
    made = account([line for each in journals for line in each.lines])
    if made is None:
        raise UsageError(f"{where}: the journal of {name!r} has no session that can be read")
    return JournaledRun(name, tuple(journals), made)


def _aimed(run: str | None, pool: str | None) -> _Aim:
    """A name, a checkpoint, a directory, or a place of pools; what is there counts before a name,
    unless a pool is named."""
    if run is not None and is_address(run):
        return _Aim(directories_of(Place.named(run)), run)
    if run is None:
        place = find_pool(pool)
        return _Aim(directories_of(place), place.path)
    path = os.path.abspath(os.path.expanduser(run))
    if not os.path.exists(path):
        if os.path.isabs(os.path.expanduser(run)):
            raise UsageError(f"{path}: there is no run here: nothing has this name")
        place = find_pool(pool)
        return _Aim(directories_of(place), place.path, name=run)
    inside = _in_directory(path) if pool is None and os.path.isdir(path) else []
    if inside or (pool is None and os.path.isdir(path) and Place.by_variable() is None):
        return _Aim(inside, path, path=path)
    if pool is None and _is_pool(path):
        return _Aim(directories_of(Place.named(path)), path)
    place = find_pool(pool, near=path)
    return _Aim(directories_of(place), place.path, name=run, path=path)


def _is_pool(path: str) -> bool:
    """True for a pool, and not for a checkpoint, at ``path``."""
    if os.path.isdir(path):
        return False
    if path.endswith(SUFFIX) or is_device(path):
        return True
    return names_in(journal_directory(path)) != []


def _in_directory(path: str) -> list[str]:
    """Return the directories of journals at ``path``, which is one itself, a pool directory, or the
    directory of a run; else those in the nearest ``.portus`` above."""
    if path.endswith(JOURNAL_SUFFIX):
        return [path]
    own = _inside(path) or _inside(os.path.join(path, DEFAULT_DIRECTORY))
    above = nearest(path)
    return own or ([] if above is None else _inside(above))


def directories_of(place: Place) -> list[str]:
    """Return the directories of the journals of a place."""
    if place.is_host:
        links = nearest(os.getcwd())
        return [each for host in place.hosts for each in host_journals(host, links)]
    if place.kind is PlaceKind.DIRECTORY:
        return _inside(place.path)
    return [journal_directory(place.path)]


def _inside(directory: str) -> list[str]:
    names = [name for name in names_in(directory) if name.endswith(JOURNAL_SUFFIX)]
    return [os.path.join(directory, name) for name in names]


def parts(its: Account) -> list[tuple[str, float]]:
    """The parts of the time, in seconds, in the order of ``WHERE``."""
    values = (its.kept_s, its.lost_s, its.saves_s, its.down_s, its.other_s)
    return list(zip(WHERE, values, strict=True))


def written_bytes(seen: JournaledRun) -> int:
    """What its saves stored."""
    return _of_all(seen, lambda each: each.copied_bytes)


def shared_bytes(seen: JournaledRun) -> int:
    """What its saves found in an older version."""
    return _of_all(seen, lambda each: each.shared_bytes)


def _of_all(seen: JournaledRun, size: Callable[[Account], int]) -> int:
    accounts = [account(each.lines) for each in seen.journals]
    return sum(size(each) for each in accounts if each is not None)


Points = list[tuple[float, float]]


def saves_of(its: Account) -> list[list[CommittedSave]]:
    """The versions of each session: nothing is drawn from one to the next."""
    return _by_session(its.saves)


def intervals(its: Account) -> list[Points]:
    """Return, for each session, points of (moment, steps to the next save) as decided, or else as
    saves came. A last point repeats the last interval at the session's end, or at its last save."""
    ends = {
        each.begun.session: spell.end_s
        for each, spell in zip(its.sessions, its.spells, strict=True)
    }
    found: list[Points] = []
    for choices in _by_session(its.choices):
        points = [(each.time_s, float(each.line.interval)) for each in choices]
        end_s = max(ends[choices[0].line.session], points[-1][0])
        found.append([*points, (end_s, points[-1][1])])
    if found:
        return found
    for saves in saves_of(its):
        gaps = [
            (before.time_s, float(save.at - before.at))
            for before, save in itertools.pairwise(saves)
        ]
        if gaps:
            found.append([*gaps, (saves[-1].time_s, gaps[-1][1])])
    return found


Placed = TypeVar("Placed", CommittedSave, IntervalDecision)


def _by_session(placed: Iterable[Placed]) -> list[list[Placed]]:
    found: dict[str, list[Placed]] = {}
    for each in placed:
        found.setdefault(each.line.session, []).append(each)
    return list(found.values())


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
        ("run", seen.name),
        ("goodput", f"{its.goodput:.1%} of {seconds_text(its.wall_s)}; {its.goodput_up:.1%} of the "
                    "time in which it ran"),
        ("steps", f"{its.steps} kept, {its.lost_steps} lost at "
                  f"{count_text(len(its.restarts), 'restart')}; {its.pending_steps} "
                  "after the newest version"),
        ("saves", f"{its.committed} committed, {its.failed} failed; they added "
                  f"{its.overhead:.2%} to the time of steps"),
        ("blocked", f"{seconds_text(its.blocked_s)} in all, {seconds_text(its.median_blocked_s)} a "
                    f"save (median); copied in {seconds_text(its.copy_s)}"),
        ("bytes", f"{size_text(copied)} written, {size_text(shared)} found in versions before"),
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
