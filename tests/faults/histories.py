"""Histories by chance: runs that are killed, fail, rot, are copied, moved and go on; one oracle.

A ``World`` is a directory of runs. Each act changes it as a user, a machine or an accident would.
After each the one question is asked: does every path that was told to be saved, and is still there,
load its own step, or say exactly why not? And is none gone that nobody asked to go?
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import portus
from tests.crash.saver import Training
from tests.faults import calls
from tests.faults.calls import ERRORS, Call, Fault, Where
from tests.nursery import Child, nursery
from tests.same import assert_same

STEPS_MAX = 5
FAILING_STEPS = 8
RUNS_MAX = 3
KILL_S_MAX = 0.05


@dataclass
class Run:
    """What is known of one run's checkpoints: by file name, the step that was told last."""

    told: dict[str, int] = field(default_factory=dict)
    asked: dict[str, set[int]] = field(default_factory=dict)
    """Steps that were asked to be saved there since: each may be there without having been told."""
    going: set[str] = field(default_factory=set)
    """Names that were asked to go."""
    rotten: bool = False

    def copy(self) -> Run:
        asked = {file: set(steps) for file, steps in self.asked.items()}
        return Run(dict(self.told), asked, set(self.going), self.rotten)


class World:
    """Runs below ``root``, and what happened to them."""

    def __init__(self, root: Path, source: random.Random, mistake: str | None = None) -> None:
        """mistake: the engine that trains is wrong in this way; see ``simulated.MISTAKES``."""
        self._mistake = mistake
        self._root = root
        self._source = source
        self._count = 0
        self.runs: dict[str, Run] = {}
        self.acts: list[str] = []
        self.loaded = self.refused = 0
        self.ended = 0
        """Runs that a call of their own ended, which Portus has no part in."""
        self._told_in_run = False
        self._begin()

    def act(self) -> None:
        """Let something happen, and check what is left."""
        acts: list[tuple[int, Callable[[str], None]]] = [
            (5, self.train), (4, self._train_and_kill), (4, self._train_with_fault),
            (2, self._train_without_space), (4, self._train_on_a_failing_disk), (2, self._copy),
            (1, self._move), (1, self._remove), (1, self._delete), (1, self.duplicate),
            (1, self._rot), (1, self._collect),
        ]  # fmt: skip
        weights, choices = zip(*acts, strict=True)
        (chosen,) = self._source.choices(choices, weights)
        self.happens(lambda: chosen(self._source.choice(sorted(self.runs))))

    def happens(self, act: Callable[[], None]) -> None:
        """Let ``act`` happen, and check what is left: ``AssertionError`` with the whole history
        for what may not be."""
        try:
            act()
            self.check()
        except BaseException as error:
            error.args = ("\n  ".join(["history:", *self.acts, f"{error}"]),)
            raise

    # What happens.

    def _begin(self) -> str:
        self._count += 1
        name = f"run{self._count}"
        (self._root / name).mkdir()
        self.runs[name] = Run()
        return name

    def train(self, name: str, fault: Fault | None = None, steps: int | None = None) -> None:
        """It goes on for some steps, in spite of a call that fails."""
        steps = steps or self._source.randint(1, STEPS_MAX)
        self.acts.append(f"{name} trains {steps} steps" + (f"; {fault}" if fault else ""))
        with self._started(name, steps, fault) as child:
            while (line := child.line()) != "end":
                self._hear(name, line)

    def _train_and_kill(self, name: str) -> None:
        lines, delay_s = self._source.randint(1, 25), self._source.uniform(0, KILL_S_MAX)
        self.acts.append(f"{name} trains and is killed {delay_s:.3f} s after {lines} lines")
        with self._started(name, 100, None) as child:
            heard = [child.line()]
            while len(heard) < lines and heard[-1] != "end":
                heard.append(child.line())
            time.sleep(delay_s)
            heard += child.kill()
        for line in heard:
            self._hear(name, line)

    def _train_with_fault(self, name: str) -> None:
        call = self._source.choice([each for each in Call if each >= 0])
        where = self._source.choice(list(Where))
        number, for_ever = self._source.randrange(60), self._source.random() < 0.5
        self.train(name, Fault(call, where, number, self._source.choice(ERRORS[call]), for_ever))

    def _train_without_space(self, name: str) -> None:
        call = self._source.choice((Call.ALLOCATE, Call.WRITE, Call.ANY_CHANGE))
        where = self._source.choice(list(Where))
        number = self._source.randrange(20)
        self.train(name, Fault(call, where, number, errno.ENOSPC, True))

    def _train_on_a_failing_disk(self, name: str) -> None:
        """Every save fails from some moment on, and each asks for a removal all the same."""
        call = self._source.choice((Call.FDATASYNC, Call.WRITE, Call.ANY_CHANGE))
        number = self._source.randrange(5, 30)
        self.train(name, Fault(call, Where.POOL, number, errno.EIO, True), FAILING_STEPS)

    def _copy(self, name: str) -> None:
        if len(self.runs) == RUNS_MAX:
            return
        self._count += 1
        copy = f"run{self._count}"
        self.acts.append(f"{name} is copied to {copy}")
        shutil.copytree(self._root / name, self._root / copy, symlinks=True)
        self.runs[copy] = self.runs[name].copy()

    def _move(self, name: str) -> None:
        self._count += 1
        moved = f"run{self._count}"
        self.acts.append(f"{name} is renamed {moved}")
        (self._root / name).rename(self._root / moved)
        self.runs[moved] = self.runs.pop(name)

    def _remove(self, name: str) -> None:
        self.acts.append(f"{name} is removed")
        shutil.rmtree(self._root / name)
        del self.runs[name]
        if not self.runs:
            self._begin()

    def _delete(self, name: str) -> None:
        files = self._files(name)
        if files:
            file = self._source.choice(files)
            self.acts.append(f"{name}/{file.name} is deleted")
            file.unlink()
            self.runs[name].told.pop(file.name, None)
            self.runs[name].asked.pop(file.name, None)

    def duplicate(self, name: str) -> None:
        """As ``cp 7.ckpt keep.ckpt``. That keeps nothing: a version goes with the last pointer that
        was put where it is. But what the copy loads is right, or an error."""
        run = self.runs[name]
        files = [each for each in self._files(name) if each.name in run.told]
        if files:
            file = self._source.choice(files)
            kept = file.with_name(f"kept-{self._count}-{file.name}")
            self.acts.append(f"{name}/{file.name} is copied to {kept.name}")
            shutil.copy(file, kept)

    def _rot(self, name: str) -> None:
        pools = sorted((self._root / name / ".portus").glob("*.portus"))
        # A kill can leave an empty one, and a link to a file that is gone, or is another run's.
        pools = [each for each in pools if not each.is_symlink() and each.stat().st_size]
        if pools:
            pool = self._source.choice(pools)
            at = self._source.randrange(pool.stat().st_size)
            self.acts.append(f"{name}: byte {at} of {pool.name} rots")
            with open(pool, "r+b") as file:
                byte = os.pread(file.fileno(), 1, at)[0]
                os.pwrite(file.fileno(), bytes([byte ^ 1 << self._source.randrange(8)]), at)
            self.runs[name].rotten = True

    def _collect(self, name: str) -> None:
        """``portus gc``."""
        from portus.cli.app import app

        pools = self._root / name / ".portus"
        if (pools / "run.portus").exists():
            self.acts.append(f"{name}: portus gc")
            done = app(["gc", str(pools / "run.portus")], standalone_mode=False)
            assert not done or self.runs[name].rotten, f"portus gc ended with {done}"

    # What is known.

    def _started(self, name: str, steps: int, fault: Fault | None) -> Child:
        self._told_in_run = False
        children = nursery("tests.faults.simulated", **calls.environment())
        plain = fault.plain() if fault else None
        return children.start("train", str(self._root / name), steps, plain, self._mistake)

    def _hear(self, name: str, line: str) -> None:
        run = self.runs[name]
        word, _, rest = line.partition(" ")
        if word in ("asks", "saved"):
            file, step = rest.split()
            asked = run.asked.setdefault(file, set())
            if word == "saved":
                self._told_in_run = True
                run.told[file] = int(step)
                asked -= {each for each in asked if each <= int(step)}
            else:
                asked.add(int(step))
                run.going.discard(file)
        elif word == "removes":
            run.going.add(rest)
        elif word == "stopped":
            assert not self._told_in_run, f"{name} was stopped though it had a version: {rest}"
        elif word == "ended":
            self.ended += 1

    def _files(self, name: str) -> list[Path]:
        return sorted((self._root / name / "ckpt").glob("*.ckpt"))

    # The oracle.

    def check(self) -> None:
        """``AssertionError`` for what may not be."""
        for name, run in self.runs.items():
            there = {file.name: file for file in self._files(name)}
            steps = [self._check_file(run, file) for file in there.values()]
            for missing in run.told.keys() - there.keys():
                assert missing in run.going, f"{name}/{missing} is gone; nobody asked for it"
                step = run.told.pop(missing)
                assert run.rotten or max(steps, default=0) > step, (
                    f"{name}/{missing} went before what replaces it: {steps} load"
                )
            newest = max(run.told.values(), default=0)
            assert run.rotten or max(steps, default=0) >= newest, (
                f"{name}: step {newest} was told, and the newest that loads is {steps}"
            )

    def _check_file(self, run: Run, file: Path) -> int:
        """The step that it loads; 0 if it says why not."""
        told, asked = run.told.get(file.name), run.asked.get(file.name, set())
        where = f"{file.parent.parent.name}/{file.name}"
        try:
            state: Any = portus.load(file, weights_only=False)
        except portus.PortusError as error:
            self.refused += 1
            if told is not None and not run.rotten:
                raise AssertionError(f"{where} was told, step {told}") from error
            return 0
        self.loaded += 1
        step = int(state["step"])
        assert_same(state, Training(step).state())
        if told is not None and not run.rotten:
            # A save that was not told may have replaced what was, if it was committed all the same.
            assert step == told or step in asked, f"{where} was told as {told}, and loads {step}"
        return step
