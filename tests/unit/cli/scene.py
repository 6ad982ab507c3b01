"""A run with a pool in its directory, and the command line on it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from portus.cli.app import app
from portus.client.pool_checkpointer import PoolCheckpointer


@dataclass(frozen=True)
class Said:
    """What a command said. ``out``: on stdout; ``err``: on stderr."""

    code: int
    out: str
    err: str


def portus(*arguments: str | Path) -> Said:
    """Run a command in this process. An error that is none of ours is raised."""
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Said(result.exit_code, result.stdout, result.stderr)


def portus_json(*arguments: str | Path, code: int = 0) -> Any:
    """The document of a command that exits with ``code``."""
    said = portus(*arguments, "--json")
    assert said.code == code, said
    return json.loads(said.out)


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


class Run:
    """A directory with a pool in ``.portus``: model ``net`` with steps 10 and 20, ``other`` with
    step -1. Step 20 is held by ``last.ckpt``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pool = root / ".portus"
        self.net = self.pool / "net.portus"
        self.last = root / "last.ckpt"
        self.states = {step: state(step) for step in (10, 20)}
        with self.trainer() as run:
            run.save(self.states[10], 10).wait()  # Step 20 shares with it.
            run.save(self.states[20], 20, reference=self.last)
            run.wait()
        with PoolCheckpointer(self.pool, "other") as run:
            run.save({"x": torch.zeros(3), "n": [1, None, "a"]}, -1).wait()

    def trainer(self) -> PoolCheckpointer:
        return PoolCheckpointer(self.pool, "net", keep=None, on_error="raise")

    def damage(self, step: int, name: str) -> None:
        """Flip a bit of the tensor ``name`` of model net."""
        [version] = portus_json("show", f"net@{step}", "--pool", self.net)["versions"]
        [tensor] = [each for each in version["tensors"] if each["name"] == name]
        with self.trainer() as run:
            writer = run._pool.writer
            assert writer is not None
            [entry] = [e for e in writer.catalogue().entries() if e.info.step == step]
            place = writer.record(entry).storage_extents(tensor["storage"])[0]
        data = bytearray(self.net.read_bytes())
        data[place.offset + 1] ^= 1
        self.net.write_bytes(data)
