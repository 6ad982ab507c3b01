"""What every adapter must hold, about the checkpoints that it reported as saved.

A training of ``trainings`` saves through its adapter, to each kind of place. Then something happens
to the run: it is restarted, started in another working directory, moved, copied or killed.
Afterwards each reported checkpoint that still exists must load its own step, training must resume
where it was, and a copy and its original must not disturb each other. The trainings are real, and
run in processes of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from portus import Place
from portus.errors import PortusError
from portus.reach.protocol.address import Address, Scheme
from tests.adapters import trainings
from tests.device import stand_in
from tests.hosts import serving, url
from tests.nursery import Say, nursery

PLACES = ("files", "host", "device")
"""Where checkpoints are saved: as files in the directory of the run, which is the default; on a
storage host; on a DAX device (a file that stands in for one: ``tests.device``)."""

EVENTS = ("restarted", "other cwd", "moved", "copied", "restored", "killed")
"""What happens to the run between two trainings. ``copied``: the original and its copy both resume.
``restored``: only a copy is left, in another directory. ``killed``: during a save."""

FIRST = 4
"""Steps of the first training; the next one makes as many."""

_DEVICE_SIZE = 64 << 20

_IN_FLIGHT = 2
"""Saves that may be unfinished when the newest one is requested: one is in flight, one queued."""

TRAININGS = [
    each
    for each in vars(trainings).values()
    if isinstance(each, type) and isinstance(vars(each).get("train"), staticmethod)
]


def cases() -> Iterator[Any]:
    """Yield each training with each place and event. In short runs one event for each kind of
    place, and no two trainings have the same."""
    for number, training in enumerate(TRAININGS):
        places = getattr(training, "places", PLACES)
        for place, event in itertools.product(places, EVENTS):
            reason = getattr(training, "skipped", {}).get(f"{event} on {place}")
            is_short = EVENTS.index(event) == (3 * PLACES.index(place) - number) % len(EVENTS)
            marks = [pytest.mark.skip(reason=reason)] if reason else []
            marks += [] if is_short else [pytest.mark.long]
            name = f"{training.__name__}-{place}-{event}".replace(" ", "_")
            yield pytest.param(training.__name__, place, event, id=name, marks=marks)


@pytest.mark.parametrize(("training", "place", "event"), list(cases()))
def test_each_told_checkpoint_loads_its_step_and_training_goes_on(
    training: str, place: str, event: str, tmp_path: Path
) -> None:
    with _place(place, tmp_path) as pool:
        _Scene(training, tmp_path, pool, pool if place == "device" else None).play(event)


def test_no_two_trainings_of_the_same_places_have_the_same_short_cases() -> None:
    assert 4 <= len(TRAININGS) <= len(EVENTS)


@dataclass(frozen=True)
class _Scene:
    """The processes of one test."""

    training: str
    root: Path
    pool: str | None
    device: str | None

    def play(self, event: str) -> None:
        for name in ("here", "there"):
            (self.root / name).mkdir()
        run = self.root / "here" / "run"
        told = self._train(run, FIRST, kill_at=FIRST if event == "killed" else 0)
        assert list(told) == list(range(1, FIRST + 1))
        if event == "killed":
            self._check({step: told[step] for step in list(told)[:-_IN_FLIGHT]})
            found = self._train(run, 2 * FIRST)
            assert min(found) > 1, "it began anew, though checkpoints had been committed"
            self._check({**told, **found}, missing_max=_IN_FLIGHT)
            return
        runs = {run: told}
        if event == "moved":
            away = self.root / "there" / "run"
            run.rename(away)
            runs = {away: _below(told, run, away)}
        elif event in ("copied", "restored"):
            copy = self.root / "there" / "run"
            shutil.copytree(run, copy, symlinks=True)
            runs[copy] = _below(told, run, copy)
            if event == "restored":
                shutil.rmtree(run)
                del runs[run]
        for where, before in runs.items():
            found = self._train(where, 2 * FIRST, cwd="there" if event == "other cwd" else "")
            assert list(found) == list(range(FIRST + 1, 2 * FIRST + 1)), "it did not go on"
            before.update(found)
        for before in runs.values():  # after all have resumed
            self._check(before)

    def _train(self, run: Path, until: int, *, kill_at: int = 0, cwd: str = "") -> dict[int, str]:
        """Train, and return the reported paths by step. cwd: the working directory, if it is not
        the one above the run."""
        where = self.root / cwd if cwd else run.parent
        lines = self._child(train, where, str(run), self.pool, until, kill_at)
        return {int(step): path for step, path in (line.split(" ", 1) for line in lines)}

    def _check(self, told: dict[int, str], missing_max: int = 0) -> None:
        """Require that each reported checkpoint loads its own step. missing_max: how many may be
        gone, because their save was cut off."""
        there = {step: path for step, path in told.items() if os.path.exists(path)}
        assert len(told) - len(there) <= missing_max, f"gone: {told.keys() - there.keys()}"
        lines = self._child(load, self.root, self.pool, *there.values())
        found = dict(line.split("\t", 1) for line in lines)
        wrong = {path: found[path] for step, path in there.items() if found[path] != str(step)}
        assert not wrong, f"these do not load their own step: {wrong}"

    def _child(self, act: Any, cwd: Path, *arguments: Any) -> list[str]:
        """Return what a child said that runs a function of this module in the directory ``cwd``."""
        is_killed = act is train and arguments[-1] != 0
        with nursery(trainings.__name__).start(
            f"{__name__}:run_in", str(self.root), str(cwd), self.device,
            act.__name__, self.training, *arguments,
        ) as child:  # fmt: skip
            code, lines = child.wait(), child.rest()
        assert code == (-signal.SIGKILL if is_killed else 0), f"{act} ended with {code}: {lines}"
        return lines


def _below(told: dict[int, str], old: Path, new: Path) -> dict[int, str]:
    return {step: str(new / Path(path).relative_to(old)) for step, path in told.items()}


@contextlib.contextmanager
def _place(kind: str, root: Path) -> Iterator[str | None]:
    if kind == "files":
        yield None
    elif kind == "device":
        (root / "dax").touch()
        os.truncate(root / "dax", _DEVICE_SIZE)
        yield str(root / "dax")
    else:
        # The path of a socket has 107 bytes at most.
        with tempfile.TemporaryDirectory() as short:
            address = Address(Scheme.UNIX, path=os.path.join(short, "host"))
            with serving("memory:256M", address=address) as server:
                yield url(server)


# What runs in a child of the nursery.


def run_in(
    say: Say, root: str, cwd: str, device: str | None, act: str, training: str, *arguments: Any
) -> None:
    """Call a function below. device: a file that stands in for a device."""
    # The journals of pools on devices are there, and must not be the user's own.
    os.environ["XDG_STATE_HOME"] = os.path.join(root, "state")
    if device is not None:
        stand_in(device, f"{device}.sys", pytest.MonkeyPatch())
    os.chdir(cwd)
    globals()[act](say, getattr(trainings, training), *arguments)


def train(say: Say, training: Any, run: str, pool: str | None, until: int, kill_at: int) -> None:
    training.train(trainings.Order(run, pool, until, kill_at, say))


def load(say: Say, training: Any, pool: str | None, *paths: str) -> None:
    if pool is not None and Place.parse(pool).is_shared:
        os.environ["PORTUS_POOL"] = pool  # loading a pointer connects only to a host named here
    for path in paths:
        try:
            found = str(training.load(path))
        except (PortusError, AssertionError, OSError, RuntimeError) as error:
            found = f"{type(error).__name__}: {error}".replace("\n", " ")
        say(f"{path}\t{found}")
