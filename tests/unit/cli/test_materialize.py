"""``portus materialize``."""

from __future__ import annotations

import os

import torch

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
    assert portus_json("materialize", run.root) == {"materialized": [str(run.last)]}
    assert {name: os.stat(links / name).st_size for name in os.listdir(links)} == before
    assert run.last.stat().st_size > 5000
    assert portus_json("materialize", run.root) == {"materialized": []}


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
