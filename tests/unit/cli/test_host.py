from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from portus.cli import gc
from portus.client.paths.pooled import PoolCheckpointer
from portus.index.directory import on_disk
from tests.hosts import serving, url
from tests.unit.cli.scene import portus, portus_json, state
from tests.unit.client.stuck import until


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A storage host with three versions of one model."""
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "host") as server:
        with PoolCheckpointer(url(server), model="run", keep=None) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(state(step), step)
        yield url(server)


def test_ls_lists_what_a_host_holds(address: str) -> None:
    (pool,) = portus_json("ls", address)["pools"]
    assert pool["path"] == address
    (model,) = pool["models"]
    assert [version["step"] for version in model["versions"]] == [1, 2, 3]


def test_the_variable_may_name_a_host(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTUS_POOL", address)
    assert "run" in portus("ls").out


def test_show_shows_a_version_of_a_host(address: str) -> None:
    assert "model.weight" in portus("show", "run@2", "--pool", address).out


def test_verify_reads_every_byte_and_finds_damage(address: str, tmp_path: Path) -> None:
    verdict = portus_json("verify", "--pool", address)
    assert verdict["healthy"]
    assert verdict["pools"][0]["size"] > 4000
    pool = tmp_path / "host" / "default.portus"
    data = bytearray(pool.read_bytes())
    place = data.index(torch.arange(1000, dtype=torch.float32).add(3).numpy().tobytes())
    data[place + 100] ^= 1
    pool.write_bytes(data)
    assert not portus_json("verify", "run", "--pool", address, code=1)["healthy"]


def test_an_address_alone_is_all_that_the_host_has_or_is_told_apart_from_a_model(
    address: str,
) -> None:
    assert portus_json("verify", address)["pools"][0]["versions"] == 3
    for command in (["show", address], ["rm", address], ["export", address, "out.pt"]):
        refused = portus(*command)
        assert refused.code == 2
        assert f"name a model, and pass --pool {address}" in refused.err


def test_export_writes_a_file_here(address: str, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    assert portus("export", "run@2", str(out), "--pool", address).code == 0
    loaded = torch.load(out, weights_only=False)
    assert torch.equal(loaded["model"]["weight"], state(2)["model"]["weight"])


def test_rm_lets_go_of_a_version_on_a_host(address: str) -> None:
    refused = portus("rm", "run@2", "--pool", address)
    assert (refused.code, "the host cannot tell" in refused.err) == (2, True)
    assert portus("rm", "run@2", "--force", "--pool", address).code == 0
    (pool,) = portus_json("ls", address)["pools"]
    assert [version["step"] for version in pool["models"][0]["versions"]] == [1, 3]


def steps(address: str) -> list[int]:
    (pool,) = portus_json("ls", address)["pools"]
    return [version["step"] for model in pool["models"] for version in model["versions"]]


@pytest.fixture
def referenced(address: str, tmp_path: Path) -> Path:
    """The directory of a trainer with two more versions, both with reference files."""
    root = tmp_path / "trainer"
    with PoolCheckpointer(address, model="more", keep=None, links=str(root / ".portus")) as saver:
        for step in (4, 5):
            saver.save(state(step), step, reference=root / f"{step}.ckpt")
    return root


def test_gc_lets_go_of_what_was_deleted_on_the_machine_of_the_trainer(
    address: str, referenced: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "YOUNG_S", 0)
    monkeypatch.chdir(referenced)
    assert portus_json("gc", address)["pools"][0]["retired"] == []
    (referenced / "4.ckpt").unlink()
    (would,) = portus_json("gc", address, "--dry-run")["pools"][0]["retired"]
    assert would["step"] == 4
    assert sorted(steps(address)) == [1, 2, 3, 4, 5]
    (retired,) = portus_json("gc", address)["pools"][0]["retired"]
    assert (retired["model"], retired["step"]) == ("more", 4)
    assert sorted(steps(address)) == [1, 2, 3, 5]
    assert torch.load(referenced / "5.ckpt", weights_only=False)["epoch"] == 5


def test_a_dry_run_of_gc_tells_about_how_much_a_host_would_give_back(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gc, "YOUNG_S", 0)
    size = 1 << 20
    with PoolCheckpointer(address, model="big", keep=None) as trainer:
        for step in (1, 2):
            held = torch.full((size // 4,), float(step))
            trainer.save({"x": held}, step, reference=tmp_path / f"{step}.ckpt").wait()
    (tmp_path / "1.ckpt").unlink()
    until = time.monotonic() + 30
    while True:  # when its last trainer ends, the host gives back by itself what nothing reaches
        (would,) = portus_json("gc", address, "--dry-run")["pools"]
        if would["freed"] < 2 * size or time.monotonic() > until:
            break
        time.sleep(0.01)
    (did,) = portus_json("gc", address)["pools"]
    assert [each["step"] for each in would["retired"]] == [1]
    assert abs(would["freed"] - did["freed"]) < 100_000 < size <= did["freed"]
    assert "nothing to do" in portus("gc", address, "--dry-run").out


def test_gc_of_a_host_spares_a_reference_file_that_may_be_about_to_get_its_name(
    address: str, referenced: Path
) -> None:
    (referenced / "4.ckpt").unlink()
    links = str(referenced / ".portus")
    assert portus_json("gc", address, "--links", links)["pools"][0]["retired"] == []
    assert sorted(steps(address)) == [1, 2, 3, 4, 5]


def test_gc_of_a_host_says_on_which_machine_to_ask(address: str) -> None:
    said = portus("gc", address)
    assert said.code == 2
    assert "--links" in said.err
    missing = portus("gc", address, "--links", "nowhere")
    assert missing.code == 2
    assert "nowhere" in missing.err


def test_a_host_that_does_not_answer_is_named(tmp_path: Path) -> None:
    said = portus("ls", "portus+unix:///nowhere.sock")
    assert said.code == 75
    assert "portus serve" in said.err + said.out


SIZE = 1 << 20


def save(saver: PoolCheckpointer, *steps: int) -> None:
    for step in steps:
        saver.save({"x": torch.full((SIZE // 4,), float(step))}, step).wait()


def test_rm_and_gc_have_a_host_give_space_back_while_others_save(
    address: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "host" / "default.portus")
    with PoolCheckpointer(address, model="mine", keep=None) as saver:
        save(saver, 1, 2, 3, 4)
        saver.wait()
        before, (listed,) = on_disk(path), portus_json("ls", address)["pools"]
        assert listed["on_disk"] == before
        assert 4 * SIZE < listed["kept"] < listed["size"] - listed["free"] + 1
        assert portus("rm", "mine@1", "--force", "--pool", address).code == 0
        assert portus("rm", "mine@2", "--force", "--pool", address).code == 0
        assert on_disk(path) <= before - 2 * SIZE
        save(saver, 5, 6, 7)
        saver.wait()
        taken = on_disk(path)
        (collected,) = portus_json("gc", address, "--missing")["pools"]
        assert collected["freed"] == taken - on_disk(path) > 0
        save(saver, 8)
        loaded = saver.load(4)
        assert isinstance(loaded, dict)
        assert torch.equal(loaded["x"], torch.full((SIZE // 4,), 4.0))
    assert portus_json("verify", address)["healthy"]


def test_a_host_gives_space_back_when_the_last_trainer_ends(address: str, tmp_path: Path) -> None:
    path = str(tmp_path / "host" / "default.portus")
    with PoolCheckpointer(address, model="second", keep=1) as second:
        with PoolCheckpointer(address, model="first", keep=1) as first:
            save(first, 1, 2, 3)
        save(second, 1, 2, 3)
        second.wait()
        assert on_disk(path) > 4 * SIZE
    until(lambda: on_disk(path) < 3 * SIZE)
    assert portus_json("verify", address)["healthy"]
