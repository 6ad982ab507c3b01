"""Whoever opens a pool that is damaged is told so, and leaves no descriptor open."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import portus
from portus.engine.spec import PAGE
from portus.errors import PortusError
from portus.reach.pools.checkpointer import PoolCheckpointer
from portus.reach.training.training_files import TrainingFiles

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it counts in /proc")

CALLS = 20

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "a part of its first page": lambda data: data[:100],
    "its first page": lambda data: data[:PAGE],
    "its first pages": lambda data: data[: 4 * PAGE],
    "its first half": lambda data: data[: len(data) // 2],
    "without its last page": lambda data: data[:-PAGE],
    "zeros": lambda data: bytes(len(data)),
    "no first page": lambda data: bytes(PAGE) + data[PAGE:],
    "no root slots": lambda data: data[:PAGE] + bytes(16 * PAGE) + data[17 * PAGE :],
}

OPENERS: dict[str, Callable[[Path], object]] = {
    "open": lambda place: portus.open(place / "run.portus").close(),
    "open a directory": lambda place: portus.open(place).close(),
    "check": lambda place: portus.check(place / "run.portus"),
    "save": lambda place: PoolCheckpointer(place / "run.portus").close(),
    "load": lambda place: portus.load(place / "run.ckpt"),
    "torch.load": lambda place: torch.load(place / "run.ckpt"),
    "begin": lambda place: begin(place),
}


def begin(place: Path) -> None:
    files = TrainingFiles(portus.Settings(), pool=portus.Place.parse(place / "run.portus"))
    try:
        files.begin("default", str(place / ".portus"), str(place))
    finally:
        files.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("whole")
    files = TrainingFiles(portus.Settings(), pool=portus.Place.parse(place / "run.portus"))
    files.save({"a": torch.zeros(10)}, str(place / "run.ckpt"), 1).wait()
    files.close()
    return place


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_pool_leaves_no_descriptor_open_whoever_opens_it(
    tmp_path: Path, whole: Path, damage: str
) -> None:
    shutil.copy(whole / "run.ckpt", tmp_path)
    data = DAMAGE[damage]((whole / "run.portus").read_bytes())
    (tmp_path / "run.portus").write_bytes(data)
    leaked = {}
    for name, act in OPENERS.items():
        before = open_descriptors()
        for _ in range(CALLS):
            with contextlib.suppress(PortusError):
                act(tmp_path)
        leaked[name] = open_descriptors() - before
    assert not any(leaked.values()), leaked


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
