"""Files that load without Portus have the tables of their checkpoint, or they are not made."""

from __future__ import annotations

import copy
import dataclasses
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import portus
from portus.cli.output import USAGE
from portus.client.leaving import weights_file
from portus.client.loading.view import of_token
from portus.dcp import GroupWriter
from portus.embedding import fill
from portus.embedding.store import MARKS
from portus.errors import CorruptionError, MediumError, PortusError, UsageError
from portus.index.directory import open_reader
from tests.crash.embedded import Training, same
from tests.unit.cli.scene import portus as run

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

BATCHES = 12
SAVED = 3
"""The batch of the checkpoint; the log is folded in after it."""

COMMAND = "import sys; from portus.cli.main import main; sys.argv[0] = 'portus'; sys.exit(main())"


class Saved:
    """A training with tables that saved a checkpoint, and went on; it ended."""

    def __init__(self, home: Path) -> None:
        self.tables = home / "tables.portus"
        self.pool = home / ".portus" / "run.portus"
        self.file = home / "ckpt" / "saved.ckpt"
        training = Training()
        with (
            portus.PoolCheckpointer(self.pool, keep=None) as saves,
            training.protected(str(self.tables)) as tables,
        ):
            for number in range(1, BATCHES + 1):
                with tables.batch():
                    training.step(number)
                if number == SAVED:
                    saves.save(training.state(), number, reference=self.file).wait()
            self.whole: Any = fill(saves.load())

    @property
    def files(self) -> list[str]:
        return sorted(each.name for each in self.file.parent.iterdir())

    def remove_marks(self) -> None:
        with portus.open(self.tables) as view:
            assert [each.model for each in view.versions()].count(MARKS) == 1
        assert run("rm", f"embedding marks@{SAVED}", "--force", "--pool", self.tables).code == 0


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own, which knows nothing of ``portus.embedding``."""
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    portus.register_reference_loader()
    return Saved(tmp_path)


def flat(state: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model's state, as safetensors call them."""
    return {f"model.{name}": each for name, each in state["model"].items()}


# --- materialize --------------------------------------------------------------------------------


def test_a_materialised_file_has_the_tables_of_its_batch(saved: Saved) -> None:
    assert portus.materialize(saved.file.parent) == [str(saved.file)]
    saved.tables.unlink()
    found = torch.load(saved.file, weights_only=True)
    assert same(found, saved.whole)
    fresh: Any = Training().model.state_dict()
    assert found["model"]._metadata.keys() == fresh._metadata.keys()


def test_a_training_goes_on_from_a_materialised_file_at_its_batch(saved: Saved) -> None:
    portus.materialize(saved.file)
    found = torch.load(saved.file, weights_only=True)
    again = Training()
    with again.protected(str(saved.tables)) as tables:
        again.model.load_state_dict(found["model"])
        for optimizer, each in zip(again.optimizers, found["optimizers"], strict=True):
            optimizer.load_state_dict(each)
        again.scheduler.load_state_dict(found["scheduler"])
        assert tables.batches == SAVED
        again.step(SAVED + 1)
    again = Training()
    with again.protected(str(saved.tables)) as tables:
        assert again.load(tables) == SAVED + 1
        rows = again.model.bags.weight.detach().clone()
    assert not torch.equal(rows, found["model"]["bags.weight"])
    other = Training()
    with other.protected(str(saved.tables.with_name("other.portus"))) as tables:
        other.step(1)
    with other.protected(str(saved.tables.with_name("other.portus"))):
        other.model.load_state_dict(found["model"])  # of another training
        with pytest.raises(UsageError, match="call `load` before the first update"):
            other.step(2)


def test_the_command_materialises_tables_in_a_pool_that_was_moved(saved: Saved) -> None:
    moved = saved.tables.with_name("moved.portus")
    saved.tables.rename(moved)
    refused = run("materialize", saved.file)
    assert refused.code != 0
    assert f"a protected table, of batch {SAVED}, in the pool {saved.tables}" in refused.err
    assert "--tables-pool" in refused.err
    assert portus.is_reference(saved.file)
    said = command("materialize", saved.file, "--tables-pool", moved)
    assert said.returncode == 0, said
    assert same(torch.load(saved.file, weights_only=True), saved.whole)


def test_a_file_is_made_of_tables_that_are_in_use(saved: Saved, tmp_path: Path) -> None:
    training = Training()
    with training.protected(str(saved.tables)) as tables:
        training.load(tables)
        training.step(20)
        [path] = portus.materialize(saved.file, to=tmp_path / "copy.pt")
    assert same(torch.load(path, weights_only=True), saved.whole)
    assert portus.is_reference(saved.file)


def damaged(saved: Saved) -> None:
    """Every table's bytes, and not the records: they are at the end of what is in the file."""
    with portus.open(saved.tables) as view:
        reader, entry = next(
            (file.reader, entry) for file, entry in view.entries() if entry.info.model == MARKS
        )
        extents = [
            extent
            for index in range(len(reader.record(entry).storages))
            for extent in reader.record(entry).storage_extents(index)
        ]
    with saved.tables.open("r+b") as file:
        for extent in extents:
            file.seek(extent.offset)
            byte = file.read(1)
            file.seek(extent.offset)
            file.write(bytes([byte[0] ^ 1]))


def a_pipe(saved: Saved) -> None:
    saved.tables.unlink()
    os.mkfifo(saved.tables)


def a_host(saved: Saved) -> None:
    """What a stranger may write in a checkpoint."""
    state = torch.load(saved.file, weights_only=False)
    state["model"]["bags.weight"] = dataclasses.replace(
        state["model"]["bags.weight"], pool="portus://127.0.0.1:9"
    )
    saved.tables = Path("portus://127.0.0.1:9")
    with portus.PoolCheckpointer(saved.pool, keep=None) as saves:
        saves.save(state, SAVED, reference=saved.file).wait()


BROKEN: dict[str, tuple[Callable[[Saved], object], type[PortusError], str]] = {
    "the mark was deleted": (Saved.remove_marks, UsageError, "a version with the token"),
    "the pool is gone": (lambda saved: saved.tables.unlink(), PortusError, "tables_pool="),
    "another file is there": (
        lambda saved: saved.tables.write_bytes(b"x" * 9000),
        PortusError,
        "in the pool",
    ),
    "a pipe is there": (a_pipe, UsageError, "expected"),
    "a host is named": (a_host, UsageError, "expected the pool file or the DAX device"),
    "the table is damaged": (damaged, CorruptionError, "step 3"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_table_that_is_not_there_is_named_and_no_file_is_made(saved: Saved, name: str) -> None:
    break_it, kind, said = BROKEN[name]
    break_it(saved)
    with pytest.raises(kind, match=said) as raised:
        portus.materialize(saved.file)
    where = str(saved.tables).replace("portus:/", "portus://")
    assert where in str(raised.value) or name == "the table is damaged"
    assert "weight" in str(raised.value)
    assert saved.files == ["saved.ckpt"]
    assert portus.is_reference(saved.file)
    for out in ("out.safetensors", "out.pt", "out"):
        place = saved.file.with_name(out)
        assert run("export", "default", place, "--pool", saved.pool).code != 0
        assert saved.files == ["saved.ckpt"]
    [left] = portus.materialize_in_turn([saved.file], within_s=60)
    assert left.path == str(saved.file)
    assert portus.is_reference(saved.file)
    if not isinstance(raised.value, MediumError):
        assert str(raised.value) == left.reason


def test_at_the_end_of_a_run_its_files_have_their_tables(saved: Saved) -> None:
    assert portus.materialize_in_turn([saved.file.parent], within_s=60) == []
    assert same(torch.load(saved.file, weights_only=True), saved.whole)


def test_weights_become_a_safetensors_file_with_the_tables(saved: Saved, tmp_path: Path) -> None:
    reader = open_reader(str(saved.pool))
    [entry] = reader.catalogue().entries()
    target = io.BytesIO()
    weights_file.write(
        reader, of_token(reader.catalogue(), entry.info.token), target, "model", near=str(tmp_path)
    )
    reader.close()
    assert same(load(target.getvalue()), dict(saved.whole["model"]))


def test_a_sharded_checkpoint_is_materialised_with_its_tables(
    host_pool: str, tmp_path: Path
) -> None:
    training, place = Training(), tmp_path / "shards"
    writer = GroupWriter(host_pool, "shards")
    with training.protected(str(tmp_path / "tables.portus")):
        training.step(1)
        expected: Any = copy.deepcopy(fill({"model": training.model.state_dict()}))
        writer.save_directory({"model": training.model.state_dict()}, place, step=1)
        training.step(2)
    writer.close()
    said = run("export", "shards", tmp_path / "out.safetensors", "--pool", host_pool)
    assert said.code == USAGE
    assert "protected tables" in said.err
    portus.materialize(place)
    dcp_to_torch_save(place, tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert same(dict(found["model"]), dict(expected["model"]))


# --- export -------------------------------------------------------------------------------------


def test_an_export_has_the_tables_of_its_batch(saved: Saved, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for suffix in (".pt", ".safetensors", ""):
        said = command("export", "default", f"{out}{suffix}", "--pool", saved.pool)
        assert said.returncode == 0, said
        assert "table" not in said.stderr
    assert same(torch.load(f"{out}.pt", weights_only=True), saved.whole)
    found: dict[str, torch.Tensor] = load_file(f"{out}.safetensors")
    weights = flat(saved.whole)
    assert {name: each for name, each in found.items() if name in weights}.keys() == weights.keys()
    assert all(torch.equal(found[name], each) for name, each in weights.items())
    kept = saved.whole["optimizers"][0]["state"][0]["exp_avg"]
    assert torch.equal(found["optimizers.0.state.0.exp_avg"], kept)
    files: dict[str, torch.Tensor] = load_file(out / "model.safetensors")
    assert same(files, dict(saved.whole["model"]))


def test_tables_are_exported_by_their_names_from_a_pool_that_was_moved(
    saved: Saved, tmp_path: Path
) -> None:
    moved = saved.tables.with_name("moved.portus")
    saved.tables.rename(moved)
    chosen = ("--names", "model.*s.weight", "--tables-pool", moved, "--pool", saved.pool)
    for out in (tmp_path / "out.pt", tmp_path / "out.safetensors"):
        assert run("export", "default", out, *chosen).code == 0
    expected = {f"{name}.weight" for name in ("bags", "items", "users")}
    model = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    found: dict[str, torch.Tensor] = load_file(tmp_path / "out.safetensors")
    assert model.keys() == expected
    assert found.keys() == {f"model.{name}" for name in expected}
    for name in expected:
        assert torch.equal(model[name], saved.whole["model"][name])
        assert torch.equal(found[f"model.{name}"], saved.whole["model"][name])
    rest = ("--names", "model.top.*", "--pool", saved.pool)
    assert run("export", "default", tmp_path / "top.pt", *rest).code == 0
    assert run("export", "default", tmp_path / "top.safetensors", *rest).code == 0


def test_a_state_is_filled_from_where_the_pool_is_now(saved: Saved, tmp_path: Path) -> None:
    with portus.open(saved.pool) as view:
        state = view.load()
    moved = tmp_path / "moved.portus"
    saved.tables.rename(moved)
    with pytest.raises(PortusError):
        fill(state)
    assert same(fill(state, pool=moved), saved.whole)
