"""What a run is called, and where its journal is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import portus


def run_of(checkpoints: Path, *roots: Path, pool: Path | None = None, **more: str) -> portus.Run:
    return portus.Run.beside(
        str(checkpoints),
        roots=map(str, roots),
        otherwise=str(checkpoints.parent),
        pool=None if pool is None else portus.Place.parse(pool),
        **more,
    )


def test_it_is_in_the_first_root_on_the_file_system_of_the_checkpoints(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a" / "ckpt", Path("/proc"), tmp_path, tmp_path / "a")
    assert (run.links, run.name) == (str(tmp_path / ".portus"), "a/ckpt")
    assert run_of(tmp_path / "a" / "ckpt").links == str(tmp_path / "a" / ".portus")
    assert os.listdir(tmp_path) == [], "nothing is made"


def test_a_root_through_a_symbolic_link_is_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    names = {
        run_of(tmp_path / ckpt / "a" / "ckpt", tmp_path / root).name
        for ckpt in ("real", "link")
        for root in ("real", "link")
    }
    assert names == {"a/ckpt"}


def test_what_is_in_a_pool_has_a_name_that_no_other_project_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = tmp_path / "run.portus"
    run = run_of(tmp_path / "a" / "ckpt", tmp_path, pool=pool)
    assert run.links == str(tmp_path / ".portus"), "wherever the pool is"
    assert run.name.startswith("a/ckpt-")
    monkeypatch.setenv("PORTUS_POOL", str(pool))
    other = run_of(tmp_path / "b" / "a" / "ckpt", tmp_path / "b")
    assert other.name.startswith("a/ckpt-")
    assert other.name != run.name, "two projects of one layout in one pool"
    assert other.name == run_of(tmp_path / "b" / "a" / "ckpt", tmp_path / "b").name


def test_a_name_that_a_user_gave_is_taken_as_it_is(tmp_path: Path) -> None:
    run = run_of(tmp_path / "ckpt", tmp_path, pool=tmp_path / "run.portus", name="net")
    assert run == portus.Run("net", str(tmp_path / ".portus"))


def test_a_long_name_is_short_and_still_its_own(tmp_path: Path) -> None:
    names = [
        run_of(tmp_path / ("x" * 90) / ("y" * 90) / each / "ckpt", tmp_path).name for each in "ab"
    ]
    assert len(set(names)) == 2
    assert all(len(name) < 140 for name in names)
