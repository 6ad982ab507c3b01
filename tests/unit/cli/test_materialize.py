"""``portus materialize``."""

from __future__ import annotations

import os

import pytest
import torch

from portus import UsageError, is_reference, materialize
from tests.unit.cli.scene import Run, portus, portus_json


def test_a_reference_file_becomes_a_torch_file(run: Run) -> None:
    said = portus("materialize", run.last)
    assert said.code == 0
    assert "1 file materialised" in said.out
    loaded = torch.load(run.last, weights_only=True)
    assert torch.equal(loaded["model"]["weight"], run.states[20]["model"]["weight"])


def test_all_of_a_directory_are_and_links_in_the_pool_are_not(run: Run) -> None:
    links = run.pool / "net.references"
    before = {name: os.stat(links / name).st_size for name in os.listdir(links)}
    assert portus_json("materialize", run.root) == {"materialized": [str(run.last)], "failed": []}
    assert {name: os.stat(links / name).st_size for name in os.listdir(links)} == before
    assert run.last.stat().st_size > 5000
    assert portus_json("materialize", run.root) == {"materialized": [], "failed": []}


def test_a_file_without_a_version_of_its_own_stays_and_all_others_become_real(run: Run) -> None:
    with run.trainer() as trainer:
        for step, name in ((30, "a.ckpt"), (40, "b.ckpt"), (50, "z.ckpt")):
            trainer.save(run.states[10], step, reference=run.root / name).wait()
    for step in (30, 40):
        assert portus("rm", f"net@{step}", "--force", "--pool", run.pool).code == 0
    assert torch.load(run.root / "a.ckpt")["epoch"] == 20  # with a warning: its step is gone
    said = portus("materialize", run.root)
    assert said.code == 2
    told = said.err.splitlines()
    assert [line.split(":")[1].strip() for line in told] == [
        str(run.root / name) for name in ("a.ckpt", "b.ckpt")
    ]
    assert "no file is made of step 20" in told[0]
    assert "2 files materialised" in said.out
    real = {name for name in ("a", "b", "z", "last") if not is_reference(run.root / f"{name}.ckpt")}
    assert real == {"z", "last"}
    found = portus_json("materialize", run.root, code=2)
    assert found["materialized"] == []
    assert [each["kind"] for each in found["failed"]] == ["UsageError", "UsageError"]
    with pytest.raises(UsageError):
        materialize(run.root)


def test_a_pool_that_is_elsewhere_can_be_named(run: Run) -> None:
    away = run.root / "away"
    away.mkdir()
    os.rename(run.pool, away / "pools")
    said = portus("materialize", run.last)
    assert said.code == 2
    assert "PORTUS_POOL" in said.err
    assert portus("materialize", run.last, "--pool", away / "pools").code == 0


def test_nothing_there_is_an_error(run: Run) -> None:
    said = portus("materialize", "nothing")
    assert said.code == 2
    assert len(said.err.splitlines()) == 1
