"""One warm process of torch and Portus for all tests that need processes of their own: what is
imported there is imported once, and a fork costs milliseconds.

How a program of a user starts and ends is tried on processes that start as users start them; here
they end in the same way, but begin with everything imported.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from tests.nursery import Child, Say, nursery


class Warm:
    """Runs the functions of a module in forks of the warm process; like a nursery of its own."""

    def __init__(self, module: str) -> None:
        self._module = module

    def start(self, function: str, *arguments: object) -> Child:
        """Start a child that runs ``function(say, *arguments)``."""
        return nursery(__name__).start(f"{self._module}:{function}", *arguments)


def in_process(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the modules of this process, and return what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("out", "errors")]
        command = [program, *arguments]
        with nursery(__name__).start(
            "execute", command, os.getcwd(), os.environ | variables, list(map(str, said))
        ) as child:
            code = child.wait()
        out, errors = (each.read_text(errors="replace") for each in said)
    return subprocess.CompletedProcess(command, code, out, errors)


# In the warm process.


def warm_up() -> None:
    """What such programs import, and what torch and numpy import at a first step. No thread."""
    for module in ("portus.dcp", "portus.embedding", "tests.unit.dcp.sharded"):
        importlib.import_module(module)
    importlib.import_module("tests.crash.saver").warm_up()


def execute(
    _: Say,
    command: Sequence[str],
    directory: str,
    environment: Mapping[str, str],
    said: Sequence[str],
) -> NoReturn:
    """Run the first word of ``command`` as ``python -c`` does."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    for number, path in enumerate(said, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of each fork
    text, *arguments = command
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    try:
        exec(compile(text, "<string>", "exec"), main.__dict__)
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    sys.exit()
