"""Groups of sharded jobs on the command line: shown rank by rank, and exported as a whole."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from portus.cli import consolidate
from portus.cli.boxes import Target, runs, write_box
from portus.client.leaving import safetensors as files
from portus.client.pool_checkpointer import PoolCheckpointer
from portus.client.shards.cuts import ItemLocation, encode
from portus.errors import CorruptionError, MediumError
from portus.index.directory import Writers
from portus.index.groups import new_id, part_model, part_token
from tests.moments import at
from tests.unit.cli.scene import portus, portus_json

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

Box = tuple[tuple[int, ...], tuple[int, ...]]


def save_group(
    place: Path, step: int, cuts: dict[str, tuple[torch.Tensor, list[Box]]], count: int
) -> None:
    """What the ranks of a job save, in this process: box i of each tensor is with rank i."""
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    entries: dict[str, Any] = {}
    placed: dict[MetadataIndex, ItemLocation] = {}
    for name, (whole, boxes) in cuts.items():
        for rank, (offsets, sizes) in enumerate(boxes):
            key = f"i{len(parts[rank])}"
            window = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            parts[rank][key] = whole[window].clone()
            placed[MetadataIndex(name, torch.Size(offsets))] = ItemLocation(rank, key)
        chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]
        properties = TensorProperties(dtype=whole.dtype)
        entries[name] = TensorStorageMetadata(properties, whole.shape, chunks)
    group = new_id()
    for rank, items in enumerate(parts):
        content: dict[str, Any] = {"format": 1, "items": items}
        if rank == 0:
            content["metadata"] = encode(Metadata(entries, {}, placed), placed)
        part = part_model("run", rank, count)
        with PoolCheckpointer(place, part, keep=None, on_error="raise") as trainer:
            trainer.save(content, step, token=part_token(group, rank)).wait()


def rows(length: int, width: int, count: int) -> list[Box]:
    each = length // count
    return [((each * rank, 0), (each, width)) for rank in range(count)]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Steps 1 and 2 of a job of 4 ranks: cut by rows, by columns, in a grid, and not at all."""
    grid: list[Box] = [((r, c), (4, 6)) for r in (0, 4) for c in (0, 6)]
    for step in (1, 2):
        cuts: dict[str, tuple[torch.Tensor, list[Box]]] = {
            "model.rows": (torch.arange(96.0).reshape(8, 12) + step, rows(8, 12, 4)),
            "model.columns": (
                torch.arange(96).reshape(8, 12) + step,
                [((0, 3 * rank), (8, 3)) for rank in range(4)],
            ),
            "model.grid": (torch.arange(96).reshape(8, 12).bfloat16() + step, grid),
            "model.whole": (torch.tensor([1.5, step]), [((0,), (2,))]),
            "model.scalar": (torch.tensor(float(step)), [((), ())]),
            "optimizer.moment": (torch.rand(8, 12), rows(8, 12, 4)),
        }
        save_group(tmp_path / "pools", step, cuts, 4)
    return tmp_path / "pools"


def assert_weights(found: dict[str, torch.Tensor], step: int) -> None:
    grid = torch.arange(96).reshape(8, 12)
    assert torch.equal(found["rows"], grid.float() + step)
    assert torch.equal(found["columns"], grid + step)
    assert torch.equal(found["grid"], grid.bfloat16() + step)
    assert torch.equal(found["whole"], torch.tensor([1.5, step]))
    assert torch.equal(found["scalar"], torch.tensor(float(step)))
    assert len(found) == 5


def test_a_group_is_exported_as_a_whole_in_the_layout_of_hugging_face(
    place: Path, tmp_path: Path
) -> None:
    said = portus("export", "run", tmp_path / "hf", "--pool", place)
    assert said.code == 0, said.err
    assert "run@2 of 4 ranks, 5 tensors" in said.out
    assert "optimizer.moment" in said.err
    assert os.listdir(tmp_path / "hf") == ["model.safetensors"]
    assert_weights(safetensors.load_file(tmp_path / "hf/model.safetensors"), 2)
    portus("export", "run@1", tmp_path / "one.safetensors", "--pool", place, "--names", "model.*")
    found = safetensors.load_file(tmp_path / "one.safetensors")
    assert_weights({name.removeprefix("model."): value for name, value in found.items()}, 1)


def test_a_limit_makes_several_files_and_an_index(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    assert portus("export", "run@2", out, "--pool", place, "--shard-size", "400B").code == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == 96 * (4 + 8 + 2) + 8 + 4
    loaded = {name: safetensors.load_file(out / name) for name in files}
    whole = {name: loaded[file][name] for name, file in index["weight_map"].items()}
    assert_weights(whole, 2)
    assert portus("export", "run@1", out, "--pool", place).code == 2, "it is there already"
    assert portus("export", "run@1", out, "--pool", place, "--force").code == 0
    assert os.listdir(out) == ["model.safetensors"]
    (out / "mine.txt").write_text("x")
    said = portus("export", "run@1", out, "--pool", place, "--force")
    assert said.code == 2
    assert "holds more than an export" in said.err


def test_an_export_is_there_once_it_would_survive_a_loss_of_power(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, fsync = tmp_path / "hf", os.fsync
    synced: list[tuple[str, bool]] = []

    def watched(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        synced.append((name, out.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    assert portus("export", "run", out, "--pool", place, "--shard-size", "800B").code == 0
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    names = [*files, "model.safetensors.index.json", f".hf.{os.getpid()}.portus"]
    assert synced == [*((name, False) for name in names), (tmp_path.name, True)]
    assert portus("export", "run@1", out, "--pool", place, "--force").code == 0
    assert sorted(os.listdir(tmp_path)) == ["hf", "pools"]


def test_a_file_may_have_the_bytes_of_the_limit_and_no_more() -> None:
    specs = {f"t{n}": consolidate.whole_spec(f"t{n}", "float32", (4,), n) for n in range(5)}
    placed = files.place(specs)
    assert [each.size for each in placed] == [16] * 5
    assert list(map(len, consolidate.split(placed, 32))) == [2, 2, 1]
    assert list(map(len, consolidate.split(placed, 31))) == [1] * 5
    assert list(map(len, consolidate.split(placed, 8))) == [1] * 5


def test_an_export_takes_the_place_of_nothing_but_an_export(place: Path, tmp_path: Path) -> None:
    empty, other, link = (tmp_path / name for name in ("empty", "other", "link"))
    empty.mkdir()
    assert portus("export", "run@1", empty, "--pool", place).code == 0
    other.mkdir()
    (other / "adapter.safetensors").write_bytes(b"mine")
    link.symlink_to(empty)
    for out in (other, link):
        said = portus("export", "run@2", out, "--pool", place, "--force")
        assert said.code == 2
        assert "holds more than an export" in said.err
    assert (other / "adapter.safetensors").read_bytes() == b"mine"
    assert link.is_symlink()
    assert_weights(safetensors.load_file(empty / "model.safetensors"), 1)


def test_an_export_that_cannot_be_put_in_place_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename = tmp_path / "hf", os.rename
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"older")

    def fails(source: str, target: str) -> None:
        if source.endswith(".portus") and target == str(out):
            raise OSError(errno.EIO, "no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(MediumError), consolidate.directory_in_place(str(out), force=True) as made:
        Path(made, "model.safetensors").write_bytes(b"newer")
    assert (out / "model.safetensors").read_bytes() == b"older"
    assert os.listdir(tmp_path) == ["hf"]


def test_transformers_loads_what_was_exported_from_shards(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=4, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    cuts: dict[str, tuple[torch.Tensor, list[Box]]] = {}
    for name, value in model.state_dict().items():
        half = value.shape[0] // 2
        rest = (0,) * (value.dim() - 1)
        inner = tuple(value.shape[1:])
        boxes = [((half * rank, *rest), (half, *inner)) for rank in range(2)]
        cuts[f"pytorch_model_fsdp_0.model.{name}"] = (value, boxes)
    save_group(tmp_path / "pools", 1, cuts, 2)
    out = tmp_path / "hf"
    said = portus("export", "run", out, "--pool", tmp_path / "pools", "--shard-size", "3KB")
    assert said.code == 0, said.err
    config.save_pretrained(out)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(out)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_a_group_is_shown_rank_by_rank(place: Path) -> None:
    said = portus("show", "run@2", "--pool", place)
    assert "4 of 4, complete" in said.out
    assert "rank-3-of-4.portus" in said.out
    document = portus_json("show", "run@2", "--pool", place)["groups"][0]
    assert [each["rank"] for each in document["ranks"]] == [0, 1, 2, 3]
    by_name = {each["name"]: each for each in document["tensors"]}
    assert by_name["model.columns"]["shape"] == [8, 12]
    assert by_name["model.columns"]["ranks"] == [0, 1, 2, 3]
    assert by_name["model.whole"]["ranks"] == [0]
    (place / "run%2Frank-2-of-4.portus").unlink()
    said = portus("show", "run@2", "--pool", place)
    assert "3 of 4, incomplete: not 2" in said.out
    assert "not there" in said.out
    assert "incomplete" in portus("show", "run", "--pool", place).out


def test_an_incomplete_or_damaged_group_leaves_nothing_behind(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    path = place / "run%2Frank-3-of-4.portus"
    whole = path.read_bytes()
    shard = (torch.arange(96.0).reshape(8, 12)[6:] + 2).numpy().tobytes()
    data = bytearray(whole)
    data[data.index(shard) + 5] ^= 1
    path.write_bytes(data)
    said = portus("export", "run@2", out, "--pool", place)
    assert said.code != 0
    assert "rank 3: rows" in said.err
    assert "was not exported" in said.err
    path.unlink()
    said = portus("export", "run@2", out, "--pool", place)
    assert said.code == 2
    assert "ranks [3] are missing" in said.err
    assert sorted(os.listdir(tmp_path)) == ["pools"]


def test_pieces_that_do_not_make_up_their_tensor_are_refused(tmp_path: Path) -> None:
    save_group(tmp_path / "pools", 1, {"model.t": (torch.rand(8, 4), rows(8, 4, 4)[:3])}, 4)
    said = portus("export", "run", tmp_path / "hf", "--pool", tmp_path / "pools")
    assert said.code == 1
    assert "t: its pieces do not make up the tensor, 8 elements are missing" in said.err
    assert not (tmp_path / "hf").exists()


BOUNDED = """
import sys
from portus.cli.main import main
sys.argv = ["portus", "export", "run", sys.argv[2], "--pool", sys.argv[1]]
try:
    main()
finally:
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print("peak", line.split()[1])
"""


@pytest.mark.long
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    peaks = []  # KiB
    for number, length in enumerate((64, 4096)):
        place, out = tmp_path / f"pools-{number}", tmp_path / f"out-{number}"
        whole = torch.rand(length, 8192)
        save_group(place, 1, {"model.weight": (whole, rows(length, 8192, 2))}, 2)
        done = subprocess.run(
            [sys.executable, "-c", BOUNDED, str(place), str(out)],
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        )
        peaks.append(int(done.stdout.split("peak")[1]))
    size = whole.nbytes >> 10
    assert size == 128 << 10
    assert peaks[1] - peaks[0] < 32 << 10, f"{peaks} KiB at their peaks, for {size} KiB"


def boxes_of(shape: tuple[int, ...]) -> Iterator[Box]:
    ranges = [
        [(low, high - low) for low in range(n) for high in range(low + 1, n + 1)] for n in shape
    ]
    for chosen in itertools.product(*ranges):
        yield tuple(low for low, _ in chosen), tuple(size for _, size in chosen)


def test_rows_side_by_side_are_one_run() -> None:
    assert list(runs((8, 12, 5), (2, 0, 0), (3, 12, 5))) == [(120, 180)]
    assert list(runs((3, 12), (0, 4), (3, 2))) == [(4, 2), (16, 2), (28, 2)]


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 3)])
def test_every_box_goes_where_numpy_puts_it(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tried = 0
    for offsets, sizes in boxes_of(shape):
        window = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        expected = np.zeros(shape, np.int16)
        data = np.arange(1, int(np.prod(sizes)) + 1, dtype=np.int16).reshape(sizes)
        expected[window] = data
        raw = data.tobytes()
        for cut in (2, 3, 1000):  # pieces that end anywhere
            with open(tmp_path / "whole", "w+b") as file:
                os.truncate(file.fileno(), expected.nbytes)
                pieces = (memoryview(raw[at : at + cut]) for at in range(0, len(raw), cut))
                list(write_box(Target(file.fileno(), 0, shape, 2), offsets, sizes, pieces))
                assert file.read() == expected.tobytes(), (offsets, sizes)
        count = sum(size for _, size in runs(shape, offsets, sizes))
        assert count == int(np.prod(sizes))
        tried += 1
    assert tried >= (1 if not shape else 15)


@pytest.mark.parametrize(
    ("offsets", "sizes", "count"),
    [((1,), (4,), 8), ((-1,), (2,), 4), ((0, 0), (1, 1), 2), ((0,), (2,), 6), ((0,), (2,), 2)],
)
def test_a_box_that_does_not_fit_is_refused(
    tmp_path: Path, offsets: tuple[int, ...], sizes: tuple[int, ...], count: int
) -> None:
    with open(tmp_path / "whole", "w+b") as file:
        written = write_box(
            Target(file.fileno(), 0, (4,), 2), offsets, sizes, [memoryview(bytes(count))]
        )
        with pytest.raises(CorruptionError):
            list(written)


def test_a_group_stays_whole_if_the_part_that_goes_last_is_pinned_meanwhile(place: Path) -> None:
    def pin() -> None:
        assert portus("pin", "run/rank-0-of-4@1", "--pool", place).code == 0

    with at("call", Writers.open, pin):
        said = portus("rm", "run@1", "--pool", place)
    assert (said.code, "is pinned" in said.err) == (2, True)
    assert "4 of 4, complete" in portus("show", "run@1", "--pool", place).out
    assert portus("rm", "run@1", "--pool", place, "--force").code == 2
    portus("unpin", "run@1", "--pool", place)
    assert portus("rm", "run@1", "--pool", place).code == 0
    assert portus("show", "run@1", "--pool", place).code == 2
