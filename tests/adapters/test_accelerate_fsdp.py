"""FSDP2 states of two processes under Accelerate's own ``save_state`` and ``load_state``.

Accelerate takes FSDP for GPUs only, so ``fsdp_script`` tells it that a model it sharded over CPUs
is one; what is not Accelerate's own here is its ``prepare``.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import portus
from portus.engine.loading.checkpoint_file import verify_file
from portus.reach.protocol.address import Address, Scheme
from tests.adapters import forked
from tests.hosts import serving, url

SCRIPT = Path(__file__).with_name("fsdp_script.py")
pytestmark = pytest.mark.timeout(240)


def run(root: Path, *arguments: object, flag: bool = True, **more: Any) -> str:
    """The script in ``root``, on two processes; what it said."""
    if "--kill-after" in arguments:
        more["ends"] = "killed"
    return forked.script(SCRIPT, root, "--root", root, *arguments, processes=2, flag=flag, **more)


def losses(root: Path, rank: int) -> list[str]:
    return (root / f"losses-{rank}.txt").read_text().splitlines()


def names_in(checkpoint: Path) -> list[str]:
    """All that is in it, the number of a save left out."""
    names = [str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*")]
    return sorted(re.sub(r"_\d+\.distcp", "_N.distcp", name) for name in names)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What happens without Portus."""
    root = tmp_path_factory.mktemp("stock")
    forked.script(SCRIPT, root, "--root", root, processes=2)
    assert (root / "checkpoints/checkpoint_0/pytorch_model_fsdp_0/.metadata").exists()
    assert not (root / ".portus").exists()
    return root


@pytest.mark.long
def test_killed_in_a_save_and_resumed_is_as_if_it_had_not_been(stock: Path, tmp_path: Path) -> None:
    run(tmp_path, "--kill-after", 4, "--limit", 2)
    run(tmp_path, "--limit", 2)
    for rank in (0, 1):
        assert set(losses(tmp_path, rank)) == set(losses(stock, rank))
    found = sorted(os.listdir(tmp_path / "checkpoints"))
    assert found == ["checkpoint_4", "checkpoint_5"], "total_limit"
    newest = tmp_path / "checkpoints/checkpoint_5"
    assert names_in(newest) == names_in(stock / "checkpoints/checkpoint_5")
    for path in newest.rglob("*"):
        if path.is_file():
            verify_file(path)
    assert not list(tmp_path.rglob("?*.portus")), "no pool"


@pytest.mark.long
def test_a_damaged_shard_is_an_error_by_name_and_the_one_before_is_loaded_otherwise(
    stock: Path, tmp_path: Path
) -> None:
    run(tmp_path, "--kill-after", 4, "--settle")
    *_, before, newest = sorted((tmp_path / "checkpoints").iterdir())
    [shard] = (newest / "pytorch_model_fsdp_0").glob("__1_*.distcp")
    data = bytearray(shard.read_bytes())
    data[(data.index(b"data/0") // 64 + 1) * 64] ^= 1
    shard.write_bytes(data)
    said = run(tmp_path, "--load", newest, ends="failed")
    assert "CorruptionError" in said
    said = run(tmp_path)
    assert f"FALLING BACK to {before}" in said
    for rank in (0, 1):
        assert set(losses(tmp_path, rank)) == set(losses(stock, rank))


@pytest.mark.long
def test_with_the_pool_on_a_storage_host_a_killed_run_is_resumed_the_same(
    stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, socket = tmp_path / "run", Address(Scheme.UNIX, path=f"{tmp_path}/socket")
    with serving(tmp_path / "pools", address=socket) as server:
        run(root, "--kill-after", 4, "--limit", 2, variables={"PORTUS_POOL": url(server)})
        run(root, "--limit", 2, variables={"PORTUS_POOL": url(server)})
        for rank in (0, 1):
            assert set(losses(root, rank)) == set(losses(stock, rank))
        assert sorted(os.listdir(root / "checkpoints")) == ["checkpoint_4", "checkpoint_5"]
        newest = root / "checkpoints/checkpoint_5"
        monkeypatch.setenv("PORTUS_POOL", url(server))  # a pointer alone leads to no host
        assert names_in(newest) == names_in(stock / "checkpoints/checkpoint_5")
        shards = list(newest.rglob("*.distcp"))
        assert len(shards) == 4, "of the model and of the optimizer"
        assert all(portus.is_reference(path) for path in shards)
        for path in (each for each in newest.rglob("*") if each.is_file()):
            verify_file(path)
    assert not list(root.rglob("?*.portus")), "no pool on this machine"


@pytest.mark.long
def test_full_states_of_fsdp_are_the_files_that_stock_accelerate_writes(tmp_path: Path) -> None:
    kind = ("--kind", "FULL_STATE_DICT")
    forked.script(SCRIPT, tmp_path / "stock", "--root", tmp_path / "stock", *kind, processes=2)
    run(tmp_path / "on", *kind, "--kill-after", 3)
    run(tmp_path / "on", *kind)
    for rank in (0, 1):
        assert set(losses(tmp_path / "on", rank)) == set(losses(tmp_path / "stock", rank))
    names = [
        sorted(path.name for path in (tmp_path / which / "checkpoints/checkpoint_5").iterdir())
        for which in ("on", "stock")
    ]
    assert names[0] == names[1]
    assert not list((tmp_path / "on").rglob("?*.portus")), "no pool"


@pytest.mark.long
def test_a_lost_machine_comes_back_from_the_mirror(stock: Path, tmp_path: Path) -> None:
    root, mirror = tmp_path / "run", f"file://{tmp_path}/bucket"
    run(root, "--limit", 2, variables={"PORTUS_MIRROR": mirror})
    newest = root / "checkpoints/checkpoint_5"
    before = names_in(newest)
    shutil.rmtree(root)
    run(root, "--limit", 2, "--load", newest, variables={"PORTUS_MIRROR": mirror})
    for rank in (0, 1):
        assert losses(root, rank) == losses(stock, rank)[-1:], "all steps were done"
    assert names_in(newest) == before
