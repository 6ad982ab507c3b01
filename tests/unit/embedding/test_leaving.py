"""Checkpoints of a training with protected tables: what of them is in a file, and how the tables
get there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import portus
from portus.companions.embedding.store import MARKS
from portus.embedding import fill
from portus.engine.job.settings import Settings
from portus.errors import CorruptionError, PortusError, UsageError
from portus.reach.index.place import Place
from portus.reach.training.training_files import TrainingFiles
from tests.crash.embedded import Training, same
from tests.unit.cli.scene import portus as run

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

BATCHES = 12
SAVED = 3
"""The batch of the checkpoint; the log is folded in after it."""


class Saved:
    """A training with tables that saved a checkpoint, and went on; it ended."""

    def __init__(self, home: Path, pool: Place | None) -> None:
        """pool: where the checkpoint is that its path leads to; None: it is a file."""
        self.tables = home / "tables.portus"
        self.pool = pool
        self.file = home / "ckpt" / "saved.ckpt"
        training = Training()
        with self.files() as files, training.protected(str(self.tables)) as tables:
            for number in range(1, BATCHES + 1):
                with tables.batch():
                    training.step(number)
                if number == SAVED:
                    files.save(training.state(), str(self.file), number).wait()
            self.whole: Any = fill(self.loaded())

    def files(self) -> contextlib.closing[TrainingFiles]:
        """What saves checkpoints of the training."""
        settings = Settings(journal=False, on_error="raise")
        files = TrainingFiles(settings, pool=self.pool)
        files.begin("net", str(self.file.parent / ".portus"), str(self.file.parent))
        return contextlib.closing(files)

    def loaded(self) -> Any:
        return portus.load(self.file, weights_only=False)

    def remove_marks(self) -> None:
        with portus.open(self.tables) as view:
            assert [each.model for each in view.versions()].count(MARKS) == 1
        assert run("rm", f"embedding marks@{SAVED}", "--force", "--pool", self.tables).code == 0


@pytest.fixture(params=["in a directory", "in a pool"])
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> Saved:
    portus.register_reference_loader()
    is_pooled = request.param == "in a pool"
    return Saved(tmp_path, Place.parse(tmp_path / "run.portus") if is_pooled else None)


def test_a_checkpoint_file_with_the_tables_filled_in_loads_without_them(saved: Saved) -> None:
    with saved.files() as files:
        files.fill_tables(str(saved.file))
    assert portus.is_reference(saved.file) == (saved.pool is not None)
    saved.tables.unlink()
    found: Any = saved.loaded()
    assert same(found, saved.whole)
    fresh: Any = Training().model.state_dict()
    assert found["model"]._metadata.keys() == fresh._metadata.keys()
    out = saved.file.with_name("out.ckpt")
    assert run("export", saved.file, out).code == 0
    assert same(torch.load(out, weights_only=True), saved.whole)


@pytest.mark.long(every_case=True)
def test_tables_are_filled_in_while_they_are_in_use(saved: Saved) -> None:
    training = Training()
    with training.protected(str(saved.tables)) as tables, saved.files() as files:
        training.load(tables)
        training.step(20)
        files.fill_tables(str(saved.file))
    assert same(saved.loaded(), saved.whole)


def test_a_checkpoint_without_tables_is_left_as_it_is(saved: Saved) -> None:
    path = saved.file.with_name("plain.ckpt")
    with saved.files() as files:
        files.save({"x": torch.ones(3)}, str(path), 7).wait()
        before = path.read_bytes()
        files.fill_tables(str(path))
    assert path.read_bytes() == before


@pytest.mark.long(every_case=True)
def test_a_training_goes_on_from_a_filled_state_at_its_batch(saved: Saved) -> None:
    found = saved.whole
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


def damaged(saved: Saved) -> None:
    """Every table's bytes, and not the records: they are at the end of what is in the file."""
    with portus.open(saved.tables) as view:
        reader, entry = next(
            (pool, entry) for pool, entry in view.entries() if entry.info.model == MARKS
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
    state = saved.loaded()
    state["model"]["bags.weight"] = dataclasses.replace(
        state["model"]["bags.weight"], pool="portus://127.0.0.1:9"
    )
    saved.tables = Path("portus://127.0.0.1:9")
    with saved.files() as files:
        files.save(state, str(saved.file), SAVED).wait()


BROKEN: dict[str, tuple[Callable[[Saved], object], type[PortusError], str]] = {
    "the mark was deleted": (Saved.remove_marks, PortusError, "a version with the token"),
    "the pool is gone": (lambda saved: saved.tables.unlink(), PortusError, "tables.portus"),
    "another file is there": (
        lambda saved: saved.tables.write_bytes(b"x" * 9000),
        PortusError,
        "tables.portus",
    ),
    "a pipe is there": (a_pipe, UsageError, "expected"),
    "a host is named": (a_host, UsageError, "expected the pool file or the DAX device"),
    "the table is damaged": (damaged, CorruptionError, "step 3"),
}


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("name", BROKEN)
def test_where_a_table_is_not_there_that_is_told_and_the_file_stays(
    saved: Saved, name: str
) -> None:
    break_it, kind, said = BROKEN[name]
    break_it(saved)
    before = saved.file.read_bytes()
    with saved.files() as files, pytest.raises(kind, match=said):
        files.fill_tables(str(saved.file))
    assert saved.file.read_bytes() == before
    assert [each.name for each in saved.file.parent.iterdir() if each.suffix] == ["saved.ckpt"]


def test_what_is_exported_as_it_was_saved_leads_to_the_tables(saved: Saved) -> None:
    out = saved.file.with_name("out.ckpt")
    if saved.pool is None:
        out.write_bytes(saved.file.read_bytes())
    else:
        assert run("export", saved.file, out).code == 0
    assert same(fill(torch.load(out, weights_only=False)), saved.whole)


def test_a_state_is_filled_from_where_the_pool_is_now(saved: Saved, tmp_path: Path) -> None:
    state = saved.loaded()
    moved = tmp_path / "moved.portus"
    saved.tables.rename(moved)
    with pytest.raises(PortusError):
        fill(state)
    assert same(fill(state, pool=moved), saved.whole)
