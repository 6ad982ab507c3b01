"""A run with a pool in its directory, and the command line on it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from docs._site.commands import commands
from portus.cli.app import app
from portus.engine.job.settings import Settings
from portus.reach.index.directory import WRITERS
from portus.reach.index.place import Place
from portus.reach.pools.checkpointer import PoolCheckpointer
from portus.reach.training.training_files import TrainingFiles


@dataclass(frozen=True)
class CommandResult:
    """What a command said. ``out``: on stdout; ``err``: on stderr."""

    code: int
    out: str
    err: str


def portus(*arguments: str | Path) -> CommandResult:
    """Run a command in this process. An error that is none of ours is raised."""
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return CommandResult(result.exit_code, result.stdout, result.stderr)


def portus_json(*arguments: str | Path, code: int = 0) -> Any:
    """The document of a command that exits with ``code``."""
    said = portus(*arguments, "--json")
    assert said.code == code, said
    return json.loads(said.out)


COMMANDS = dict(commands())
"""Every command that does something, as it is called: ``ls``, ``admin show``."""


def names_of(command: str) -> set[str]:
    """The arguments of a command, as its usage names them, and its options."""
    given = COMMANDS[command].params
    return {name for each in given for name in (each.metavar, *each.opts) if name}


def call_of(command: str, value: str = "m") -> list[str]:
    """A call with ``value`` for what the command requires; where no pool is taken, for every
    argument."""
    has_pool = "--pool" in names_of(command)
    given = [each for each in COMMANDS[command].params if each.param_type_name == "argument"]
    return [*command.split(), *(value for each in given if each.required or not has_pool)]


def state(step: int) -> dict[str, Any]:
    """A frozen tensor, ties, views, other layouts, and values of other kinds."""
    grid = torch.arange(120, dtype=torch.float32).reshape(2, 3, 4, 5)
    weight = torch.arange(1000, dtype=torch.float32).reshape(10, 100) + step
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "columns": weight.t(),
            "row": weight[3],
            "last": grid.contiguous(memory_format=torch.channels_last),
            "half": torch.arange(7).bfloat16(),
            "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 3),
            "expanded": torch.tensor([1.5]).expand(3, 4),
            "flag": torch.tensor([True, False, True]),
        },
        "epoch": step,
        "text": "x",
        "lr": [0.1, 0.2],
    }


@contextlib.contextmanager
def pointing(pool: str | Path, name: str) -> Iterator[TrainingFiles]:
    """A training that puts pointers at the paths of its checkpoints."""
    settings = Settings(journal=False, on_error="raise")
    with contextlib.closing(TrainingFiles(settings, pool=Place.parse(pool))) as files:
        files.begin(name, "/nowhere/.portus", "/nowhere/ckpt")
        yield files


@contextlib.contextmanager
def scattered(path: str) -> Iterator[None]:
    """Leave only runs of about 64 KiB free, so that a storage gets several extents."""
    writer = WRITERS.open(path)
    held = []
    while writer.free_bytes() >= 72 << 10:  # less would make it grow
        held.append(writer.reserve(64 << 10))
    for each in held[::2]:
        writer.release(each)
    try:
        yield
    finally:
        for each in held[1::2]:
            writer.release(each)
        WRITERS.close(writer)


class Run:
    """A directory with pools in ``.portus``: in ``net.portus`` the model ``net`` with steps 10 and
    20, in ``other.portus`` the model ``other`` with step 1. A pointer to a version of the model
    ``led`` is made by ``point``, in a pool of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pool = root / ".portus"
        self.net = self.pool / "net.portus"
        self.led = self.pool / "led.portus"
        self.states = {step: state(step) for step in (10, 20)}
        with self.trainer() as run:
            run.save(self.states[10], 10).wait()  # Step 20 shares with it.
            run.save(self.states[20], 20).wait()
        with PoolCheckpointer(self.pool / "other.portus", "other") as other:
            other.save({"x": torch.zeros(3), "n": [1, None, "a"]}, 1).wait()

    def trainer(self, keep: int | None = None) -> PoolCheckpointer:
        return PoolCheckpointer(self.net, "net", keep=keep, on_error="raise")

    def point(self, *steps: int, directory: str = "ckpt") -> list[Path]:
        """Pointers to new versions of the model ``led``."""
        paths = [self.root / directory / f"step-{step:08d}.pt" for step in steps]
        with pointing(self.led, "led") as files:
            for step, path in zip(steps, paths, strict=True):
                files.save(state(step), str(path), step).wait()
        return paths

    def damage(self, step: int, name: str, pool: Path | None = None) -> None:
        """Flip a bit of a tensor of the model, as it is in the pool."""
        tensor = state(step)["model"][name].contiguous()
        path = pool or self.net
        data, wanted = bytearray(path.read_bytes()), bytes(tensor.view(torch.uint8).numpy())
        assert data.count(wanted) == 1
        data[data.index(wanted) + 1] ^= 1
        path.write_bytes(data)
