"""The training that a report covers."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from portus.cli.output import Output, error_line
from portus.cli.pools import find_pool, nearest
from portus.companions.journal.account import Account, account
from portus.companions.journal.lines import Saved
from portus.errors import PortusError, UsageError
from portus.reach.index.directory import JOURNAL_SUFFIX, journal_directory
from portus.reach.index.journals import FoundJournal, journals_in, names_in, read
from portus.reach.index.place import DEFAULT_DIRECTORY, SUFFIX, Place
from portus.reach.media.dax import is_device
from portus.reach.places.directory import journals_inside
from portus.reach.places.opening import journals_of
from portus.reach.protocol.address import is_address

WHERE: Final = {
    "kept": "steps that are kept",
    "lost": "steps that restarts lost",
    "saves": "added by saves",
    "down": "nothing ran",
    "other": "all else",
}
"""The parts of the time, and their titles."""


@dataclass(frozen=True, slots=True)
class JournaledRun:
    """A run and its journals."""

    name: str
    journals: tuple[FoundJournal, ...]
    account: Account

    @property
    def title(self) -> str:
        """The directory of the run's checkpoints, with the project's, if the run was named after
        it; else the name of the run."""
        within = os.path.dirname(os.path.dirname(os.path.abspath(self.journals[0].path)))
        root = os.path.dirname(within)
        is_path = os.path.isdir(os.path.join(root, self.name))
        if os.path.basename(within) != DEFAULT_DIRECTORY or not is_path:
            return self.name
        below = f"/{self.name}".removesuffix("/checkpoints")
        return f"{os.path.basename(root)}{below}" or self.name

    @property
    def is_running(self) -> bool:
        """True if the newest session of the run is active on this machine."""
        newest = self.account.sessions[-1].begun.session
        return any(newest in each.running for each in self.journals)


def training_of(run: str | None, pool: str | None, output: Output) -> JournaledRun:
    """Return the training that ``run`` names; None: the only one there is. Reports other journals
    that cannot be read. Raises ``UsageError`` if there is none, or several, and what reading
    raises."""
    directories, where = _find_journals(run, pool)
    found, failed = _runs_in(directories)
    chosen = _choose_runs(run, found)
    if failed and not chosen:
        raise failed[0]
    for damage in failed:
        output.note(f"portus: skipped: {error_line(damage)}")
    if not found:
        raise UsageError(
            f"{where}: there is no journal yet. One begins with the first step of a training "
            "that saves here, unless it sets journal=False"
        )
    if not chosen:
        raise UsageError(
            f"{where}: there is no journal of a run {run!r}; there are {sorted(found)}"
        )
    if len(chosen) > 1:
        raise UsageError(
            f"{where}: expected one run, found {sorted(chosen)}. Name one: portus report "
            f"{shlex.quote(min(chosen))} --pool {shlex.quote(where)}"
        )
    [name] = chosen
    journals = found[name]
    made = account([line for each in journals for line in each.lines])
    if made is None:
        raise UsageError(f"{where}: the journal of {name!r} has no session that can be read")
    return JournaledRun(name, tuple(journals), made)


def _runs_in(
    directories: Iterable[str],
) -> tuple[dict[str, list[FoundJournal]], list[PortusError]]:
    """Return the journals of each run in these directories, and the errors of unreadable ones."""
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


def _find_journals(run: str | None, pool: str | None) -> tuple[Sequence[str], str]:
    """Return the directories of journals to search for ``run``, and the name of their place for
    messages.

    ``run`` is a name, a checkpoint, a directory, or a place of pools. An existing file or directory
    counts before a name, unless a pool is named.
    """
    if run is None or is_address(run):
        place = find_pool(pool) if run is None else Place.parse(run)
        return journals_of(place, nearest(os.getcwd())), place.path
    path = os.path.abspath(os.path.expanduser(run))
    if not os.path.exists(path):
        if os.path.isabs(os.path.expanduser(run)):
            raise UsageError(f"{path}: there is no run here: nothing has this name")
        place = find_pool(pool)
    elif pool is None and os.path.isdir(path):
        inside = _in_directory(path)
        if inside or Place.by_variable() is None:
            return inside, path
        place = find_pool(None)
    elif pool is None and (
        path.endswith(SUFFIX) or is_device(path) or names_in(journal_directory(path))
    ):
        place = Place.parse(path)
    else:
        place = find_pool(pool, near=path)
    return journals_of(place, nearest(os.getcwd())), place.path


def _choose_runs(run: str | None, found: dict[str, list[FoundJournal]]) -> Collection[str]:
    """Return the runs that match: by name, else by their files, else all."""
    if run is None or is_address(run):
        return found
    if run in found:
        return [run]
    real = os.path.realpath(os.path.expanduser(run))
    if not os.path.exists(real):
        return ()
    files = {each: _files(journals) for each, journals in found.items()}
    for is_meant in (
        lambda file: file == real,
        lambda file: _is_below(file, real),
        lambda file: _is_below(real, os.path.dirname(file)),
    ):
        meant = {each for each, paths in files.items() if any(map(is_meant, paths))}
        if meant:
            return meant
    return found


def _files(journals: Iterable[FoundJournal]) -> set[str]:
    """Return the paths to which the checkpoints of a run were saved, without symbolic links."""
    return {
        os.path.realpath(os.path.join(os.path.dirname(each.path), line.file))
        for each in journals
        for line in each.lines
        if isinstance(line, Saved) and line.file
    }


def _is_below(path: str, directory: str) -> bool:
    return os.path.commonpath([path, directory]) == directory


def _in_directory(path: str) -> Sequence[str]:
    """Return the directories of journals at ``path``, which is one itself, a pool directory, or the
    directory of a run; else those in the nearest ``.portus`` above."""
    if path.endswith(JOURNAL_SUFFIX):
        return [path]
    own = journals_inside(path) or journals_inside(os.path.join(path, DEFAULT_DIRECTORY))
    above = nearest(path)
    return own or ([] if above is None else journals_inside(above))


def parts(its: Account) -> list[tuple[str, float]]:
    """Return the parts of the time, in seconds, in the order of ``WHERE``."""
    values = (its.kept_s, its.lost_s, its.saves_s, its.down_s, its.other_s)
    return list(zip(WHERE, values, strict=True))
