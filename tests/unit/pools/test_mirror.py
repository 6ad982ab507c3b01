"""The mirror of a training whose checkpoints are in a pool: it has real files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import portus
from portus.reach.training.training_files import TrainingFiles
from tests.unit.pools.scene import Scene, stored


def state(step: int) -> dict[str, object]:
    return {"weight": torch.full((64, 32), float(step)), "step": step}


@contextmanager
def mirrored(scene: Scene) -> Iterator[TrainingFiles]:
    """The training ``net``, which has begun, after what its mirror has was fetched."""
    settings = portus.Settings(
        on_error="raise", journal=False, mirror=f"file://{scene.root}/mirror", mirror_wait=60
    )
    files = TrainingFiles(settings, pool=scene.place)
    where = "net", str(scene.root / ".portus"), str(scene.checkpoints)
    try:
        files.fetch(*where)
        files.begin(*where)
        yield files
    finally:
        files.close()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_the_mirror_has_the_files_that_pointers_lead_to(scene: Scene) -> None:
    with mirrored(scene) as files:
        for step in range(3):
            files.save(state(step), scene.path(f"{step}.pt"), step).wait()
        expected = {f"{step}.pt": stored(scene.path(f"{step}.pt")) for step in (1, 2)}
        files.remove(scene.path("0.pt"))
    copies = {path.name: path for path in (scene.root / "mirror").rglob("*.pt")}
    assert {name: path.read_bytes() for name, path in copies.items()} == expected
    assert torch.load(copies["2.pt"])["step"] == 2


def test_a_machine_that_lost_the_pool_and_the_pointers_gets_the_files(scene: Scene) -> None:
    with mirrored(scene) as files:
        for step in range(2):
            files.save(state(step), scene.path(f"{step}.pt"), step).wait()
    shutil.rmtree(scene.checkpoints)
    shutil.rmtree(scene.root / ".portus")
    Path(scene.place.path).unlink()
    with mirrored(scene) as files:
        for step in range(2):
            assert not portus.is_reference(scene.path(f"{step}.pt"))
            assert torch.load(scene.path(f"{step}.pt"))["step"] == step
        files.save(state(2), scene.path("2.pt"), 2).wait()  # and goes on in a new pool
        files.remove(scene.path("0.pt"))
        assert portus.is_reference(scene.path("2.pt"))
    copies = {path.name for path in (scene.root / "mirror").rglob("*.pt")}
    assert copies == {"1.pt", "2.pt"}
