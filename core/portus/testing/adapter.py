"""Tests that every adapter must pass, about the checkpoints that it reported as saved.

A training saves through the adapter, to each kind of place. Then something happens to the run: it
is restarted, started in another working directory, moved, copied or killed. Afterwards each
reported checkpoint that still exists must load its own step, training must resume where it was, and
a copy and its original must not disturb each other.

The trainings are real and run in processes of their own. So the adapter provides a module that can
be imported. One process imports it once, and is forked for each training
(``portus.testing.nursery``).

```python
def warm_up() -> None: ...  # may import more, and must start no thread


class Mine:  # a ``Trains``
    @staticmethod
    def train(order: Order) -> None: ...

    @staticmethod
    def load(path: str) -> int: ...
```
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import pytest

from portus.errors import PortusError
from portus.reach.index.place import Place
from portus.reach.protocol.address import Address, Scheme
from portus.testing.device import stand_in
from portus.testing.hosting import serving, url
from portus.testing.nursery import Say, nursery

PLACES: Final = ("files", "host", "device")
"""Where checkpoints are saved: as files in the directory of the run, which is the default; on a
storage host; on a DAX device (a file that stands in for one: ``portus.testing.device``)."""

EVENTS: Final = ("restarted", "other cwd", "moved", "copied", "restored", "killed")
"""What happens to the run between two trainings. ``copied``: the original and its copy both resume.
``restored``: only a copy is left, in another directory. ``killed``: during a save."""

FIRST: Final = 4
"""Steps of the first training; the next one makes as many."""

_DEVICE_SIZE: Final = 64 << 20

_IN_FLIGHT: Final = 2
"""Saves that may be unfinished when the newest one is requested: one is in flight, one queued."""

Case = tuple[str, str]
"""One of ``PLACES`` and one of ``EVENTS``."""


@dataclass(frozen=True, slots=True)
class Order:
    """A training to run, in a process of its own, which ends with it.

    The training resumes from the newest checkpoint that the framework finds in the directory of the
    run, if there is one.

    run: the directory of the run. It may exist, with what an earlier training left, or a copy of
        that.
    pool: the storage host or the device to save to; None: save files, the adapter's default.
    until: the last step.
    kill_at: the step at which ``note_save`` kills the process; 0: none.
    say: reports a line to the test; ``note_save`` uses it.
    """

    run: str
    pool: str | None
    until: int
    kill_at: int
    say: Say

    def note_save(self, step: int, path: str) -> None:
        """Report a save; to be called at each step, right after the save was requested."""
        self.say(f"{step} {path}")
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


class Trains(Protocol):
    """The parts that the module of an adapter provides."""

    @staticmethod
    def train(order: Order) -> None:
        """Run the training of ``order``: save at each step, and remove no checkpoint."""

    @staticmethod
    def load(path: str) -> int:
        """Load the checkpoint at ``path`` with the framework's own code, and return its step.

        Raises what that code raises, and ``AssertionError`` if it is not the state of that step.
        """


class AdapterContract(abc.ABC):
    """Tests of an adapter: each kind of place is combined with each event.

    trains: the location of a ``Trains``, as ``module:name``. The module also has a function
        ``warm_up``.
    places: those of ``PLACES`` to which the adapter can save.
    """

    trains: ClassVar[str]
    places: ClassVar[Sequence[str]] = PLACES

    def marks(self, case: Case) -> Collection[pytest.MarkDecorator]:
        """Return the pytest marks of a case, such as one that keeps it out of short runs."""
        return ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make a test of each place with each event."""
        if "case" in metafunc.fixturenames:
            cases = [
                pytest.param(case, id="-".join(case).replace(" ", "_"), marks=self.marks(case))
                for case in itertools.product(self.places, EVENTS)
            ]
            metafunc.parametrize("case", cases)

    def test_each_told_checkpoint_loads_its_step_and_training_goes_on(
        self, case: Case, tmp_path: Path
    ) -> None:
        place, event = case
        with _place(place, tmp_path) as pool:
            device = pool if place == "device" else None
            _Scene(self.trains, tmp_path, pool, device).play(event)


@dataclass(frozen=True, slots=True)
class _Scene:
    """The processes of one test."""

    _trains: str
    _root: Path
    _pool: str | None
    _device: str | None

    def play(self, event: str) -> None:
        for name in ("here", "there"):
            (self._root / name).mkdir()
        run = self._root / "here" / "run"
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
            away = self._root / "there" / "run"
            run.rename(away)
            runs = {away: _below(told, run, away)}
        elif event in ("copied", "restored"):
            copy = self._root / "there" / "run"
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
        where = str(self._root / cwd if cwd else run.parent)
        lines = self._child("train", where, [str(run), self._pool, until, kill_at], bool(kill_at))
        return {int(step): path for step, path in (line.split(" ", 1) for line in lines)}

    def _check(self, told: dict[int, str], missing_max: int = 0) -> None:
        """Require that each reported checkpoint loads its own step. missing_max: how many may be
        gone, because their save was cut off."""
        there = {step: path for step, path in told.items() if os.path.exists(path)}
        assert len(told) - len(there) <= missing_max, f"gone: {told.keys() - there.keys()}"
        lines = self._child("look", str(self._root), [list(there.values()), self._pool])
        found = dict(line.split("\t", 1) for line in lines)
        wrong = {path: found[path] for step, path in there.items() if found[path] != str(step)}
        assert not wrong, f"these do not load their own step: {wrong}"

    def _child(
        self, act: str, cwd: str, arguments: list[object], is_killed: bool = False
    ) -> list[str]:
        """Return what the child said until it ended."""
        home = str(self._root / "state")
        with nursery(self._trains.partition(":")[0]).start(
            f"{__name__}:act", act, self._trains, cwd, home, self._device, arguments
        ) as child:
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
        with tempfile.TemporaryDirectory() as short, contextlib.ExitStack() as undo:
            # The path of a socket has 107 bytes at most.
            address = Address(Scheme.UNIX, path=os.path.join(short, "host"))
            yield url(undo.enter_context(serving("memory:256M", address=address)))


# What runs in a child of the nursery.


def act(
    say: Say,
    what: str,
    trains: str,
    cwd: str,
    home: str,
    device: str | None,
    arguments: list[Any],
) -> None:
    """Train, or look at checkpoints, in the working directory ``cwd``. home: the directory of the
    user's state. device: a file that stands in for a device."""
    # The journals of pools on devices are there, and must not be the user's own.
    os.environ["XDG_STATE_HOME"] = home
    if device is not None:
        stand_in(device, f"{device}.sys", pytest.MonkeyPatch())
    os.chdir(cwd)
    module, _, name = trains.partition(":")
    adapter: Trains = getattr(importlib.import_module(module), name)
    if what == "train":
        run, pool, until, kill_at = arguments
        adapter.train(Order(run, pool, until, kill_at, say))
        return
    paths, pool = arguments
    if pool is not None and Place.parse(pool).is_shared:
        os.environ["PORTUS_POOL"] = pool  # loading a pointer connects only to a host named here
    for path in paths:
        try:
            found = str(adapter.load(path))
        except (PortusError, AssertionError, OSError, RuntimeError) as error:
            found = f"{type(error).__name__}: {error}".replace("\n", " ")
        say(f"{path}\t{found}")
