from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import portus as face
from portus.reach.index.directory import on_disk
from portus.reach.pools import resolve
from portus.reach.pools.checkpointer import PoolCheckpointer
from tests.hosts import serving, url
from tests.moments import until
from tests.unit.cli.scene import pointing, portus, portus_json, state


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A storage host with three versions of one model."""
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "host") as server:
        with PoolCheckpointer(url(server), "run", keep=None) as checkpointer:
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
    assert portus("rm", "run@2", "--pool", address).code == 0
    assert steps(address) == [1, 3]


def steps(address: str) -> list[int]:
    (pool,) = portus_json("ls", address)["pools"]
    return [version["step"] for model in pool["models"] for version in model["versions"]]


@pytest.fixture
def pointers(address: str, tmp_path: Path) -> list[Path]:
    """Those to two more versions."""
    paths = [tmp_path / "trainer" / f"{step}.ckpt" for step in (4, 5)]
    with pointing(address, "more") as files:
        for step, path in zip((4, 5), paths, strict=True):
            files.save(state(step), str(path), step).wait()
    return paths


def test_rm_removes_the_pointers_to_a_version_on_a_host(address: str, pointers: list[Path]) -> None:
    assert "removed 1 pointer" in portus("rm", "more@4", "--pool", address).out
    assert [path.exists() for path in pointers] == [False, True]
    [removed] = portus_json("rm", pointers[1], "--pool", address)["removed"]
    assert removed["step"] == 5
    assert not pointers[1].exists()
    assert steps(address) == [1, 2, 3]


def test_a_pointer_to_a_host_is_shown_verified_and_exported(
    address: str, pointers: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "ALLOWED", [])
    assert "PORTUS_POOL" in portus("export", pointers[0], "out.pt").err, "strangers choose no host"
    for arguments in (
        ("show", pointers[0]),
        ("verify", pointers[0]),
        ("export", pointers[0], "out.pt"),
        ("export", pointers[0].parent, "out"),
    ):
        said = portus(*arguments, "--pool", address)
        assert said.code == 0, said
    face.save(state(4), "4.ckpt", wait=True)
    assert Path("out.pt").read_bytes() == Path("4.ckpt").read_bytes()
    assert sorted(path.name for path in Path("out").iterdir()) == ["4.ckpt", "5.ckpt"]


def test_gc_lets_go_of_versions_whose_pointers_were_deleted(
    address: str, pointers: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("gc", address, "--missing", str(pointers[0].parent))
    pointers[0].unlink()
    assert portus_json(*arguments, "--yes")["pools"][0]["retired"] == [], "it is young"
    monkeypatch.setattr("portus.reach.places.pool.YOUNG_S", 0)
    (would,) = portus_json(*arguments, "--dry-run")["pools"][0]["retired"]
    assert would["step"] == 4
    assert portus(*arguments).code == 2
    assert sorted(steps(address)) == [1, 2, 3, 4, 5]
    (retired,) = portus_json(*arguments, "--yes")["pools"][0]["retired"]
    assert (retired["model"], retired["step"]) == ("more", 4)
    assert sorted(steps(address)) == [1, 2, 3, 5]
    assert face.load(pointers[1])["epoch"] == 5


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
    with PoolCheckpointer(address, "mine", keep=None) as saver:
        save(saver, 1, 2, 3, 4)
        saver.wait()
        before, (listed,) = on_disk(path), portus_json("ls", address)["pools"]
        assert listed["on_disk"] == before
        assert 4 * SIZE < listed["kept"] < listed["size"] - listed["free"] + 1
        assert portus("rm", "mine@1", "--pool", address).code == 0
        assert portus("rm", "mine@2", "--pool", address).code == 0
        assert on_disk(path) <= before - 2 * SIZE
        save(saver, 5, 6, 7)
        saver.wait()
        taken = on_disk(path)
        (collected,) = portus_json("gc", address)["pools"]
        assert collected["freed"] == taken - on_disk(path) >= 0
        save(saver, 8)
        loaded = saver.load(4)
        assert isinstance(loaded, dict)
        assert torch.equal(loaded["x"], torch.full((SIZE // 4,), 4.0))
    assert portus_json("verify", address)["healthy"]


def test_a_host_gives_space_back_when_the_last_trainer_ends(address: str, tmp_path: Path) -> None:
    path = str(tmp_path / "host" / "default.portus")
    with PoolCheckpointer(address, "second", keep=1) as second:
        with PoolCheckpointer(address, "first", keep=1) as first:
            save(first, 1, 2, 3)
        save(second, 1, 2, 3)
        second.wait()
        assert on_disk(path) > 4 * SIZE
    until(lambda: on_disk(path) < 3 * SIZE)
    assert portus_json("verify", address)["healthy"]
