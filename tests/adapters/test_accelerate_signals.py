"""A signal handler has Accelerate save while Portus is saving: its files are there when it returns,
and what was asked for before leaves them alone (V5, V8)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import portus
import portus_accelerate
from portus.engine.directory.publisher import Publisher
from portus.engine.fence.snapshot import CopyPlanner
from tests.adapters.launching import run_program
from tests.adapters.test_accelerate_states import FILES, Scene, closed, same
from tests.moments import at

__all__ = ["closed"]

MOMENTS = [CopyPlanner.plan, Publisher.begin]


def interrupted(scene: Scene, moment: Any, directory: Path, inner: Path) -> list[torch.Tensor]:
    """``save_state`` to ``directory``, and within it a signal whose handler saves to ``inner``."""
    scene.step()
    facts = scene.facts()

    def handle(*_: object) -> None:
        assert portus.is_nested()
        scene.accelerator.save_state(str(inner))
        assert sorted(os.listdir(inner)) == FILES, "there when it returns"

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with at("call", moment, lambda: signal.raise_signal(signal.SIGUSR1)):
            scene.accelerator.save_state(str(directory))
    finally:
        signal.signal(signal.SIGUSR1, before)
    return facts


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__qualname__)
def test_a_save_within_a_save_is_whole_and_so_is_the_other(tmp_path: Path, moment: Any) -> None:
    scene = Scene(tmp_path)
    outer, inner = tmp_path / "step_1", tmp_path / "signal"
    facts = interrupted(scene, moment, outer, inner)
    assert sorted(os.listdir(inner)) == FILES
    for directory in (inner, outer):
        scene.step()
        scene.accelerator.load_state(str(directory))
        assert same(scene.facts(), facts)
    scene.accelerator.end_training()
    again = Scene(tmp_path)
    again.accelerator.load_state(str(inner))
    assert same(again.facts(), facts)


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__qualname__)
@pytest.mark.parametrize("there", [True, False], ids=["there", "new"])
def test_a_save_within_a_save_to_the_same_directory_is_what_stays(
    tmp_path: Path, moment: Any, there: bool
) -> None:
    scene = Scene(tmp_path)
    latest = tmp_path / "latest"
    if there:
        scene.accelerator.save_state(str(latest))
    facts = interrupted(scene, moment, latest, latest)
    scene.wait()
    assert sorted(os.listdir(latest)) == FILES
    again = Scene(tmp_path)  # as after a kill: nothing was closed
    again.accelerator.load_state(str(latest))
    assert same(again.facts(), facts)
    scene.step()
    facts = scene.facts()
    scene.accelerator.save_state(str(latest))
    scene.accelerator.load_state(str(latest))
    assert same(scene.facts(), facts)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from portus.engine.fence.snapshot import CopyPlanner
from tests.adapters.test_accelerate_states import Scene
from tests.adapters.launching import run_program
from tests.moments import at

root = Path(sys.argv[1])
torch.set_num_threads(1)
scene = Scene(root)
scene.step()

def handle(*_):
    scene.accelerator.save_state(str(root / "latest"))
    os.kill(os.getpid(), signal.SIGKILL)

signal.signal(signal.SIGUSR1, handle)
with at("call", CopyPlanner.plan, lambda: signal.raise_signal(signal.SIGUSR1)):
    scene.accelerator.save_state(str(root / "latest"))
"""


@pytest.mark.long
def test_a_run_that_is_killed_within_the_save_finds_what_its_handler_saved(tmp_path: Path) -> None:
    run_program(KILLED, str(tmp_path), code=-signal.SIGKILL)
    scene = Scene(tmp_path)
    scene.accelerator.load_state(str(tmp_path / "latest"))
    assert scene.counter.count == 1


def test_a_loop_that_is_told_to_go_saves(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    found = []
    for step in range(3):
        scene.step()
        if step == 1:
            signal.raise_signal(signal.SIGTERM)
        found.append(portus_accelerate.should_leave(scene.accelerator))
    assert found == [False, True, True]
    facts = scene.facts()
    scene.accelerator.save_state(str(tmp_path / "last"))
    scene.accelerator.end_training()
    assert signal.getsignal(signal.SIGTERM) is before
    assert sorted(os.listdir(tmp_path / "last")) == FILES
    again = Scene(tmp_path)
    again.accelerator.load_state(str(tmp_path / "last"))
    assert same(again.facts(), facts)
