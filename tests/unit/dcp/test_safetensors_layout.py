"""Directories of safetensors files, as torch's ``HuggingFaceStorageWriter`` writes them."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

import portus.dcp
from portus.dcp import PortusStorageReader, PortusStorageWriter
from portus.engine.loading.checkpoint_file import has_digests, verify_file
from portus.errors import CorruptionError, NoCheckpointError, PortusError, UsageError

pytest.importorskip("torch.distributed.checkpoint.hf_storage", reason="torch 2.9 has this layout")

from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from tests.unit.dcp.written_over import written_over
from tests.warm import Warm

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]


@pytest.fixture(autouse=True)
def in_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(root: Path, *tasks: str) -> None:
    """Jobs one after another, in processes of their own."""
    with (
        tempfile.NamedTemporaryFile() as errors,
        Warm("tests.unit.dcp.jobs").start("run", str(root), tasks, {}, errors.name) as child,
    ):
        child.rest()
        assert child.wait() == 0, errors.read().decode(errors="replace")


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "weight": torch.rand(40, 30),
        "view": torch.rand(9, 5)[2:6],
        "half": torch.rand(7).to(torch.bfloat16),
        "numbers": torch.arange(5),
        "flags": torch.rand(9) > 0.5,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(1.5),
    }


def empty() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(each) for name, each in tensors().items()}


def save(place: str = "step_1") -> None:
    writer = PortusStorageWriter(layout="safetensors")
    dcp.save(tensors(), checkpoint_id=place, storage_writer=writer)
    writer.close()


def load(place: str, reader: Any) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = empty()
    dcp.load(found, checkpoint_id=place, storage_reader=reader)
    return found


def is_saved(found: dict[str, torch.Tensor]) -> bool:
    expected = tensors()
    return found.keys() == expected.keys() and all(
        torch.equal(each, expected[name]) for name, each in found.items()
    )


SHARD = "shard-00001-model-00001-of-00001.safetensors"


def test_a_directory_has_the_files_of_stock_and_what_makes_it_complete() -> None:
    save("ours")
    stock = HuggingFaceStorageWriter("stock", save_distributed=True)
    dcp.save(tensors(), checkpoint_id="stock", storage_writer=stock)
    assert sorted(os.listdir("stock")) == [SHARD]
    assert sorted(os.listdir("ours")) == [".metadata", SHARD]
    with safe_open(f"ours/{SHARD}", "pt") as ours, safe_open(f"stock/{SHARD}", "pt") as theirs:
        assert list(ours.keys()) == list(theirs.keys())
        metadata = {k: v for k, v in ours.metadata().items() if not k.startswith("portus.")}
        assert metadata == theirs.metadata()
        for name in ours.keys():  # noqa: SIM118
            assert torch.equal(ours.get_tensor(name), theirs.get_tensor(name))


@pytest.mark.parametrize("writer", ["stock", "ours"])
@pytest.mark.parametrize("reader", ["stock", "ours", "call"])
def test_each_reads_what_the_other_wrote(writer: str, reader: str) -> None:
    if writer == "ours":
        save()
    else:
        stock = HuggingFaceStorageWriter("step_1", save_distributed=True)
        dcp.save(tensors(), checkpoint_id="step_1", storage_writer=stock)
    if reader == "call":
        found: dict[str, Any] = empty()
        portus.dcp.load(found, "step_1")
    else:
        source = HuggingFaceStorageReader("step_1") if reader == "stock" else PortusStorageReader()
        found = load("step_1", source)
    assert is_saved(found)


def test_torch_makes_one_file_of_it() -> None:
    # Of what torch 2.13 itself can do: of scalars it leaves zeros, and integers it refuses.
    weights = {k: v for k, v in tensors().items() if v.is_floating_point() and v.ndim}
    writer = PortusStorageWriter(layout="safetensors")
    dcp.save(weights, checkpoint_id="step_1", storage_writer=writer)
    writer.close()
    Path("whole").mkdir()
    names = dict.fromkeys(weights, 1)
    consolidate_safetensors_files("step_1", "whole", fqn_to_index_mapping=names)
    with safe_open("whole/model-00001-of-00001.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(weights)
        assert all(torch.equal(file.get_tensor(name), weights[name]) for name in weights)


@pytest.mark.parametrize("ranks", [2, 3])
def test_saved_at_some_ranks_it_is_bit_equal_at_others(tmp_path: Path, ranks: int) -> None:
    loads = (f"{count}:{by}:{step}" for count, by, step in [(1, "stock", 1), (2, "ours", 2)])
    run(tmp_path, f"shards_save:{ranks}:late", *(f"shards_load:{each}" for each in loads))


@pytest.mark.long
@pytest.mark.parametrize("how", ["late", "dcp", "stock"])
def test_saved_at_four_ranks_it_is_bit_equal_at_any_number(tmp_path: Path, how: str) -> None:
    loads = (f"{count}:{by}:3" for count in (1, 2, 3, 8) for by in ("stock", "ours"))
    run(tmp_path, f"shards_save:4:{how}", *(f"shards_load:{each}" for each in loads))


def test_what_makes_no_checkpoint_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run(tmp_path, "shards_refused:2")


@pytest.mark.long
def test_no_flipped_byte_is_handed_out_and_a_look_at_the_file_finds_it() -> None:
    save()
    file = Path("step_1", SHARD)
    whole = file.read_bytes()
    assert has_digests(file)
    assert verify_file(file) == len(whole)
    for at in (*range(0, 1500, 7), *range(4096, len(whole), 97), len(whole) - 1):
        with written_over(file, at, bytes([whole[at] ^ 1 << at % 8])):
            with pytest.raises((CorruptionError, UsageError)):
                verify_file(file)
            with pytest.raises(PortusError):
                portus.dcp.load(dict(empty()), "step_1")


def test_what_is_missing_cut_off_or_of_another_save_is_named() -> None:
    save("step_1")
    save("step_2")
    shutil.copytree("step_2", "mixed")
    shutil.copy(f"step_1/{SHARD}", f"mixed/{SHARD}")
    with pytest.raises(CorruptionError, match="copied from another checkpoint"):
        portus.dcp.load(dict(empty()), "mixed")
    shutil.copytree("step_2", "missing")
    Path("missing", SHARD).unlink()
    with pytest.raises(CorruptionError, match=rf"{SHARD}: the file of a rank is missing"):
        portus.dcp.load(dict(empty()), "missing")
    shutil.copytree("step_2", "short")
    os.truncate(f"short/{SHARD}", 5000)
    with pytest.raises(CorruptionError, match=SHARD):
        portus.dcp.load(dict(empty()), "short")
    shutil.copytree("step_2", "step_3")
    Path("step_3", ".metadata").unlink()
    with pytest.raises(NoCheckpointError, match=r"was cut off.*step_2"):
        portus.dcp.load(dict(empty()), "step_3")


def test_the_newest_that_is_whole_is_loaded() -> None:
    save("run/step_1")
    save("run/step_2")
    os.truncate(f"run/step_2/{SHARD}", 5000)
    found: dict[str, Any] = empty()
    assert portus.dcp.load_newest(found, "run") == os.path.realpath("run/step_1")
    assert is_saved(found)


def test_a_storage_host_has_no_such_layout() -> None:
    with pytest.raises(UsageError, match="layout: expected torch, for a storage host"):
        PortusStorageWriter("portus://127.0.0.1:1", layout="safetensors")
    with pytest.raises(UsageError, match="layout: expected torch or safetensors, found 'hf'"):
        PortusStorageWriter(layout="hf")  # type: ignore[arg-type]
