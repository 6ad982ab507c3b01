"""Saves of a training that do not go as planned: Ctrl-C in the call, a full disk."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from portus.engine.directory.folder import FOLDER
from portus.engine.files.queue import Queue
from portus.engine.job.settings import Settings
from portus.engine.paths.process import load
from portus.engine.pipeline.run import Save
from portus.engine.state.contents import JoinedStorages
from portus.errors import AbandonedError
from portus.reach.index.place import Place
from portus.reach.pools.image_draft import lengths_of
from portus.reach.training.training_files import TrainingFiles
from tests.moments import at
from tests.unit.conftest import SMALL_BYTES, Mount
from tests.unit.paths.programs import SLOW

MIB = 1 << 20


def press() -> None:
    raise KeyboardInterrupt


def weights(size: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.ones(size, dtype=torch.uint8)}


@contextlib.contextmanager
def training(**settings: Any) -> Iterator[tuple[TrainingFiles, threading.Event]]:
    """Files, and a gate that opens before they close, whatever comes out of the test."""
    gate = threading.Event()
    with contextlib.closing(TrainingFiles(Settings(journal=False, **settings))) as files:
        try:
            yield files, gate
        finally:
            gate.set()


def test_a_link_waits_for_a_save_that_goes_on_behind_ctrl_c(tmp_path: Path) -> None:
    directory, last = str(tmp_path / "step-1"), str(tmp_path / "last")

    with training() as (files, gate):

        def ready() -> None:
            gate.wait()

        with pytest.raises(KeyboardInterrupt), at("return", Queue.put, press):
            files.save_directory(directory, {"a.pt": weights(9)}, 1, ready=ready)
        files.link(last, directory)
        assert not os.path.lexists(last), "the save is in flight"
        gate.set()
        files.wait()
        assert os.path.samefile(last, directory)
        assert os.listdir(last) == ["a.pt"]


@pytest.mark.parametrize(
    ("moment", "pooled"),
    [
        (JoinedStorages.describer, False),
        (Save.__init__, False),
        (lengths_of, True),
        (Save.__init__, True),
    ],
)
def test_ctrl_c_leaves_no_draft(tmp_path: Path, moment: Callable[..., Any], pooled: bool) -> None:
    pool = Place.parse(tmp_path / "run.portus") if pooled else None
    with contextlib.closing(TrainingFiles(Settings(journal=False), pool=pool)) as files:
        path = str(tmp_path / "a.pt")
        with pytest.raises(KeyboardInterrupt), at("call", moment, press):
            files.save(weights(9), path, 1)
        hidden = tmp_path / FOLDER
        assert not hidden.exists() or not [each.name for each in hidden.glob("*.draft.*")]
        assert files.save(weights(9), path, 2).wait().step == 2


@pytest.mark.parametrize("kind", ["checkpoint", "text"])
def test_room_is_made_on_a_full_disk(mount: Mount, kind: str) -> None:
    """The first of two checkpoints is to go behind a third one, which fails."""
    small = mount("tmpfs")
    with training(on_error="warn") as (files, gate):

        def forbid() -> None:
            gate.wait()
            raise AbandonedError("of another rank")

        for step in (1, 2):
            files.save(weights(5 * MIB), str(small / f"{step}.pt"), step).wait()
        third = files.save_directory(str(small / "3"), {"a.pt": weights(9)}, 3, ready=forbid)
        files.remove(str(small / "1.pt"))
        gate.set()
        third.join()
        size, path = SMALL_BYTES - 9 * MIB, str(small / "latest")
        if kind == "text":
            files.save_text(path, "x" * size, lambda: None).wait()
        else:
            files.save(weights(size), path, 4).wait()
        assert not (small / "1.pt").exists()
        assert (small / "2.pt").exists()


HELD = """
import gc, os, portus
files = portus.TrainingFiles(portus.Settings())
files.begin("run", os.path.abspath(".portus"), os.getcwd())
files.save({"step": 1}, os.path.abspath("1.ckpt"), 1)
cycle = [files]
cycle.append(cycle)
del files
"""


@pytest.mark.parametrize("end", ["", "del cycle", "del cycle; gc.collect()"])
def test_files_that_nobody_closes_are_closed_at_the_exit_and_say_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.chdir(tmp_path)
    # A process as users start it: what is left of the modules then is the point.
    ran = subprocess.run(
        [sys.executable, "-c", SLOW + HELD + end], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert load("1.ckpt") == {"step": 1}
    assert sorted(os.listdir()) == [".portus", "1.ckpt"]
    (journal,) = Path(".portus").rglob("*.lines")
    assert '"closed":true' in journal.read_text().splitlines()[-1]
    assert not list(Path(".portus").rglob("*.portus"))
