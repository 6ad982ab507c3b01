"""Each call to the file system that a save to a path makes fails, once: that save alone is lost."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from portus.engine.directory.system import Linux
from portus.engine.media import linux
from portus.engine.media.file_calls import write_all
from portus.engine.paths import process
from portus.engine.paths.process import load, save
from portus.engine.writer import image_file, staged_way
from portus.errors import MediumError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only")

STEPS = 5
CALLS = sorted(name for name in vars(Linux) if not name.startswith("_"))
NEVER = {"close", "path_of", "status", "is_unused", "is_whole"}
"""Calls of which the kernel does not fail, or whose failure means no."""

NUMBERS = (errno.EIO, errno.ENOSPC, errno.EACCES)


class Injector:
    """Fails the call ``at``, with ``number``; counts all of them."""

    def __init__(self, at: int = -1, number: int = 0) -> None:
        self.count = 0
        self.hit = ""
        self._at = at
        self._number = number

    def check(self, name: str) -> None:
        self.count += 1
        if self.count == self._at:
            self.hit = name
            raise OSError(self._number, os.strerror(self._number))

    def around(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            self.check(name)
            return function(*arguments, **named)

        return call


class Failing(Linux):
    """The calls of this machine, of which one fails."""

    def __init__(self, injector: Injector) -> None:
        for name in CALLS:
            if name not in NEVER:
                setattr(self, name, self._translated(injector, name))

    def _translated(self, injector: Injector, name: str) -> Callable[..., Any]:
        real = getattr(super(), name)

        def call(*arguments: Any, **named: Any) -> Any:
            try:
                injector.check(name)
            except OSError as error:
                raise MediumError(error.errno, f"{name}: {error.strerror}") from error
            return real(*arguments, **named)

        return call


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "_savers", [])
    monkeypatch.setattr(process, "_writers", [])
    level = logging.getLogger("portus").level
    logging.getLogger("portus").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("portus").setLevel(level)
    process._finish()


def train(monkeypatch: pytest.MonkeyPatch, injector: Injector) -> dict[str, int]:
    """Save a file for each step, keep two, and write over one; which steps were told."""
    told: dict[str, int] = {}
    weight = torch.zeros(40_000)
    with monkeypatch.context() as patched:
        patched.setattr(image_file, "Linux", lambda: Failing(injector))
        patched.setattr(linux, "allocate", injector.around(linux.allocate, "allocate"))
        patched.setattr(staged_way, "write_all", injector.around(write_all, "write"))
        for name in ("fdatasync", "ftruncate"):
            patched.setattr(os, name, injector.around(getattr(os, name), name))
        for step in range(1, STEPS + 1):
            weight.fill_(step)
            for name in (f"step-{step}.pt", "last.pt"):
                try:
                    handle = save({"weight": weight, "step": step}, name)
                    handle.wait()
                except MediumError:
                    continue
                told[name] = step
            with contextlib.suppress(FileNotFoundError):
                if f"step-{step}.pt" in told:
                    os.remove(f"step-{step - 2}.pt")
        process._finish()
    return told


def check_all(told: dict[str, int], hit: str) -> None:
    found = {}
    for name in sorted(os.listdir()):
        if name == ".portus":
            continue
        with zipfile.ZipFile(name) as archive:
            assert archive.testzip() is None, (hit, name)
        state = load(name)
        assert torch.equal(state["weight"], torch.full((40_000,), float(state["step"]))), (
            hit,
            name,
        )
        found[name] = state["step"]
    steps = [step for name, step in told.items() if name != "last.pt"]
    assert len(steps) >= STEPS - 1, (hit, told)
    assert found["last.pt"] >= told["last.pt"] >= STEPS - 1, (hit, found, told)
    assert found[f"step-{max(steps)}.pt"] == max(steps), (hit, found)


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(
    ("number", "stride"),
    [
        (errno.EIO, 7),
        *(
            pytest.param(number, 1 + (number != errno.EIO), marks=pytest.mark.long)
            for number in NUMBERS
        ),
    ],
)
@pytest.mark.timeout(600)
def test_a_call_that_fails_costs_one_save_and_nothing_else(
    number: int, stride: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    counted = Injector()
    told = train(monkeypatch, counted)
    check_all(told, "nothing")
    assert len(told) == STEPS + 1
    for at in range(1 + seed % stride, counted.count + 1, stride):
        run = tmp_path / str(at)
        run.mkdir()
        monkeypatch.chdir(run)
        injector = Injector(at, number)
        told = train(monkeypatch, injector)
        hit = f"call {at}: {injector.hit}: {errno.errorcode[number]}"
        check_all(told, hit)
        save({"step": 99}, "next.pt").wait()
        process._finish()
        assert load("next.pt") == {"step": 99}
        assert not os.path.exists(".portus") or injector.hit in ("unlink", "remove_folder"), (
            hit,
            os.listdir(".portus"),
        )
