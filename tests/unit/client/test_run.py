"""Where a run saves, what it is called there, and what it does where that is taken."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from pathlib import Path

import pytest
import torch

import portus


def run_of(checkpoints: Path, *roots: Path, pool: Path | None = None) -> portus.Run:
    return portus.Run.beside(
        str(checkpoints),
        roots=map(str, roots),
        otherwise=str(checkpoints.parent),
        pool=None if pool is None else portus.Place.named(pool),
    )


def test_it_is_in_the_first_root_on_the_file_system_of_the_checkpoints(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a" / "ckpt", Path("/proc"), tmp_path, tmp_path / "a")
    assert (run.place.path, run.name) == (str(tmp_path / ".portus"), "a/ckpt")
    assert run.links == run.place.path
    assert run_of(tmp_path / "a" / "ckpt").place.path == str(tmp_path / "a" / ".portus")


def test_a_root_through_a_symbolic_link_is_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    names = {
        run_of(tmp_path / ckpt / "a" / "ckpt", tmp_path / root).name
        for ckpt in ("real", "link")
        for root in ("real", "link")
    }
    assert names == {"a/ckpt"}


def test_wherever_the_pool_is_links_are_beside_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path / "a" / "ckpt", tmp_path, pool=tmp_path / "pools")
    assert (run.place.path, run.links) == (str(tmp_path / "pools"), str(tmp_path / ".portus"))
    monkeypatch.setenv("PORTUS_POOL", str(tmp_path / "pools"))
    other = run_of(tmp_path / "b" / "a" / "ckpt", tmp_path / "b")
    assert other.place == run.place
    assert other.name != run.name, "two projects of one layout in one pool directory"
    assert other.name == run_of(tmp_path / "b" / "a" / "ckpt", tmp_path / "b").name


def test_where_another_run_has_the_file_the_next_one_is_taken(tmp_path: Path) -> None:
    """The lock itself, between processes: ``adapters/test_lightning_plugin.py``."""

    def save(each: portus.PoolCheckpointer) -> None:
        if each.model in ("ckpt", "ckpt~2"):
            raise portus.BusyError(errno.EAGAIN, "another writer has it")
        each.save({"x": 1}, 7)

    run = run_of(tmp_path / "ckpt", tmp_path)
    with contextlib.closing(run):
        run.use(save)
        assert run.name == "ckpt~3"
    pools = tmp_path / ".portus"
    assert [each.name for each in pools.glob("*.portus")] == ["ckpt~3.portus"]
    with portus.open(pools / "ckpt~3.portus") as pool:
        assert [each.step for each in pool.versions()] == [7]


def test_a_run_that_was_named_or_has_one_file_takes_no_other(tmp_path: Path) -> None:
    def busy(each: portus.PoolCheckpointer) -> None:
        raise portus.BusyError(errno.EAGAIN, each.path)

    named = portus.Run(portus.Place.named(tmp_path / "pools"), "net")
    one_file = run_of(tmp_path / "ckpt", tmp_path, pool=tmp_path / "one.portus")
    for run in (named, one_file):
        with contextlib.closing(run), pytest.raises(portus.BusyError):
            run.use(busy)
        assert "~" not in run.name


def test_it_opens_when_it_is_used_and_again_after_it_was_closed(tmp_path: Path) -> None:
    run = run_of(tmp_path / "ckpt", tmp_path)
    assert not os.listdir(tmp_path)
    for step in (1, 2):
        path = tmp_path / f"{step}"
        run.use(lambda each, s=step, p=path: each.save({"x": s}, s, reference=p))  # type: ignore[misc]
        run.close()
        run.close()
    assert [portus.load_reference(tmp_path / name) for name in "12"] == [{"x": 1}, {"x": 2}]


def test_a_part_has_a_name_of_its_own_and_the_settings_of_the_run(tmp_path: Path) -> None:
    settings = portus.Settings(on_error="raise", fence_timeout=5)
    run = portus.Run(portus.Place.named(tmp_path / "pools"), "net", settings)
    with run.part("net/rank-0", run.place) as part:
        own = dataclasses.replace(settings, mirror="none")  # the writer of all parts has the mirror
        assert (part.model, part.settings) == ("net/rank-0", own)
    assert run.checkpointer is None


def test_settings_that_make_no_sense_are_refused_wherever_they_are_said(tmp_path: Path) -> None:
    with pytest.raises(
        portus.UsageError, match="guard: expected 'auto', 'exact' or 'probe', found 'never'"
    ):
        portus.Settings(guard="never")  # type: ignore[arg-type]
    with pytest.raises(portus.UsageError, match="max_bytes"):
        portus.PoolCheckpointer(tmp_path, max_bytes=0)
    with pytest.raises(TypeError, match="max_byte"):
        portus.PoolCheckpointer(tmp_path, max_byte=1)  # type: ignore[call-arg]
    assert not os.listdir(tmp_path)


def test_what_is_expected_of_a_training_is_what_a_checkpoint_has(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    net[0].bias.requires_grad_(False)
    optimizer = torch.optim.Adam([each for each in net.parameters() if each.requires_grad])
    expected = portus.expected_bytes([net], [optimizer])
    net(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    with portus.PoolCheckpointer(tmp_path / "pools", "net") as checkpointer:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        handle = checkpointer.save(state, 1)
        handle.wait()
        counts = 4 * len(optimizer.state)  # Adam counts the steps of each by itself
        assert handle.stats.state_bytes == expected + counts
