"""Runs tests in a process of its own, on a copy of the tree, and tells what they execute.

Each run is a fork of this process, which has imported what is slow to import, but neither ours nor
the tests.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

import coverage
import pytest

RUN_S_MAX: Final = 900.0
"""For a run of all tests of a package, which tells what they execute."""

Covering = dict[str, dict[int, list[str]]]
"""By module, as its path below the tree, and line: the tests that execute it."""


class Chosen:
    """A plugin: runs ``names`` alone, in that order."""

    def __init__(self, names: Collection[str]) -> None:
        self._order: Final = {name: number for number, name in enumerate(names)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [each for each in items if each.nodeid in self._order]
        items.sort(key=lambda item: self._order[item.nodeid])


class Timed:
    """A plugin: notes seconds by test, and tells coverage which test runs."""

    def __init__(self) -> None:
        self.seconds: Final[dict[str, float]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        measured = coverage.Coverage.current()
        if measured is not None:
            measured.switch_context(item.nodeid)
        began = time.monotonic()
        result = yield
        self.seconds[item.nodeid] = time.monotonic() - began
        return result


def covered(tree: Path, package: Path, tests: Collection[str]) -> tuple[Covering, dict[str, float]]:
    """Run ``tests`` in ``tree``: which execute which lines of ``package``, and their seconds.

    Raises ``RuntimeError`` if one of them fails, or they take too long.
    """
    told = tree / "covered.json"

    def run() -> int:
        measured = coverage.Coverage(data_file=None, include=[f"{package}/*"], config_file=False)
        timed = Timed()
        measured.start()
        code = int(pytest.main([*_OPTIONS, *tests], plugins=[timed]))
        measured.stop()
        data = measured.get_data()
        lines = {
            str(Path(each).relative_to(tree)): data.contexts_by_lineno(each)
            for each in data.measured_files()
        }
        told.write_text(json.dumps([lines, timed.seconds]))
        return code

    code = forked(tree, run, RUN_S_MAX)
    if code:
        said = (tree / "out").read_text(errors="replace")
        raise RuntimeError(f"without a mutant tests of {package.name} fail ({code}):\n{said}")
    lines, seconds = json.loads(told.read_text())
    return {
        module: {int(line): [name for name in names if name] for line, names in there.items()}
        for module, there in lines.items()
    }, seconds


def survives(tree: Path, names: Collection[str], timeout: float) -> bool:
    """Whether all tests of these names pass in ``tree``, in that order, in ``timeout`` seconds."""
    files = sorted({name.partition("::")[0] for name in names})

    def run() -> int:
        return int(pytest.main([*_OPTIONS, "-x", *files], plugins=[Chosen(names)]))

    return forked(tree, run, timeout) == 0


_OPTIONS: Final = (
    *("-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=short"),
    # Of what was imported before: its assertions are not ours.
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)


def forked(tree: Path, run: Callable[[], int], timeout: float) -> int:
    """The exit code of ``run``, called in ``tree`` by a process of its own, with what it starts
    killed in the end; -1 if it took longer than ``timeout`` seconds. What it prints is in
    ``tree/out``."""
    child = os.fork()
    if child == 0:
        _become(tree, run)
    until = time.monotonic() + timeout
    status = None
    while status is None and time.monotonic() < until:
        done, found = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(found)
        else:
            time.sleep(0.02)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of them have ended
    if status is None:
        os.waitpid(child, 0)
        return -1
    return status


def _become(tree: Path, run: Callable[[], int]) -> None:
    """Go on as a process that works in ``tree``. Does not return."""
    code = 70
    try:
        os.setsid()
        out = os.open(tree / "out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(tree)
        for name in [each for each in sys.modules if each.split(".")[0] == "tests"]:
            del sys.modules[name]
        sys.path[:0] = [str(tree / "core"), str(tree)]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
        sys.dont_write_bytecode = True
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
