"""Reference files that lead to a part of a state: a checkpoint that is a directory of files."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import portus
from portus.client.keeper import Keeper, keeper_of
from portus.index.directory import WRITERS
from portus.media.local import LocalFiles

State = dict[str, Any]


def state(step: int) -> State:
    return {
        "weights.bin": {"w": torch.full((1000,), float(step)), "empty": {}},
        "moments.bin": {"state": {}, "step": step},
        "number": step,
    }


def save(to: portus.Checkpointer, home: Path, step: int) -> portus.SaveHandle:
    parts = state(step)
    return to.save(parts, step, reference={str(home / name): name for name in parts})


def read(home: Path) -> list[Any]:
    weights = torch.load(home / "weights.bin")
    return [
        weights["w"][7].item(),
        torch.load(home / "moments.bin")["step"],
        torch.load(home / "number"),
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    portus.register_reference_loader()
    return tmp_path


def test_each_file_leads_to_its_part_alone(run: Path) -> None:
    with portus.Checkpointer(run / ".portus", "run") as trainer:
        save(trainer, run / "one", 1)
        assert torch.load(run / "one" / "moments.bin") == {"state": {}, "step": 1}
        assert torch.load(run / "one" / "weights.bin").keys() == {"w", "empty"}
        trainer.wait()
        assert trainer.steps() == [1]
    assert read(run / "one") == [1, 1, 1]


def test_a_save_into_the_same_directory_replaces_all_and_lets_go_of_the_old(run: Path) -> None:
    with portus.Checkpointer(run / ".portus", "run", keep=1) as trainer:
        for step in (1, 2, 3):
            save(trainer, run / "last", step).wait()
        trainer.wait()
        assert read(run / "last") == [3, 3, 3]
        assert trainer.steps() == [3]


def test_a_version_stays_until_the_last_of_its_files_is_gone(run: Path) -> None:
    with portus.Checkpointer(run / ".portus", "run", keep=1) as trainer:
        save(trainer, run / "one", 1)
        for name in ("weights.bin", "moments.bin"):
            trainer.remove(run / "one" / name)
        save(trainer, run / "two", 2)
        trainer.wait()
        assert trainer.steps() == [1, 2]
        trainer.remove(run / "one" / "number")
        trainer.wait()
        assert trainer.steps() == [2]


def test_a_key_that_the_state_has_not_is_refused(run: Path) -> None:
    with (
        portus.Checkpointer(run / ".portus", "run") as trainer,
        pytest.raises(portus.UsageError, match=r"x\.bin is to lead to 'other'"),
    ):
        trainer.save({"a": 1}, 1, reference={str(run / "x.bin"): "other"})
    assert not (run / "x.bin").exists()


def test_a_directory_goes_only_once_what_replaces_it_is_committed(run: Path) -> None:
    with portus.Checkpointer(run / ".portus", "run", keep=1, max_bytes=8 << 20) as trainer:
        save(trainer, run / "one", 1)
        (run / "one" / "notes.txt").write_text("the user's")
        huge = trainer.save({"w": torch.zeros(32 << 20)}, 2)
        trainer.remove(run / "one", after=huge)
        trainer.wait()
        assert not huge.committed
        assert read(run / "one") == [1, 1, 1]
        trainer.remove(run / "one", after=save(trainer, run / "two", 3))
        trainer.wait()
        assert not (run / "one").exists()
        assert trainer.steps() == [3]


def test_a_directory_removed_behind_our_back_gives_its_space_back(run: Path) -> None:
    big = {"w.bin": torch.rand(1 << 20)}
    with portus.Checkpointer(run / ".portus", "run", keep=1) as trainer:
        for step in range(12):
            home = run / f"step_{step}"
            big["w.bin"].add_(1)
            trainer.save(big, step, reference={str(home / "w.bin"): "w.bin"}).wait()
            if step:
                shutil.rmtree(run / f"step_{step - 1}")
        trainer.wait()
        size = os.path.getsize(trainer.path)
    assert size < 6 * big["w.bin"].nbytes


def test_materialised_files_hold_their_parts(run: Path) -> None:
    with portus.Checkpointer(run / ".portus", "run") as trainer:
        save(trainer, run / "one", 1)
        trainer.wait()
    assert len(portus.materialize(run / "one")) == 3
    assert not any(portus.is_reference(path) for path in (run / "one").iterdir())
    assert read(run / "one") == [1, 1, 1]


def cut_off_while_replacing(run: Path) -> None:
    """Step 2 was committed; of the three files in ``last`` one leads to it."""
    with portus.Checkpointer(run / ".portus", "run", keep=2) as trainer:
        save(trainer, run / "last", 1).wait()
        trainer.save(state(2), 2).wait()
        writer, _ = trainer._open_or_create()
        keeper_of(trainer.path, writer).replace(
            str(run / "last" / "number"), trainer.versions()[-1], "number"
        )
    assert read(run / "last") == [1, 1, 2]


def test_files_of_two_versions_in_one_directory_are_mended(run: Path) -> None:
    cut_off_while_replacing(run)
    assert portus.mend(run / ".portus") == []
    assert read(run / "last") == [2, 2, 2]


def test_files_that_were_never_committed_are_removed_only_when_asked(run: Path) -> None:
    with portus.Checkpointer(run / ".portus", "run") as trainer:
        save(trainer, run / "one", 1).wait()
        _, keeper = trainer._open_or_create()
        keeper.place(str(run / "two.bin"), bytes(16), 2, "run", "number")
        portus.mend(run / ".portus", uncommitted=True)
        assert (run / "two.bin").exists(), "it is open: the save may be under way"
    portus.mend(run / ".portus")
    assert (run / "two.bin").exists()
    assert portus.mend(run / ".portus", uncommitted=True) == [str(run / "two.bin")]
    assert not (run / "two.bin").exists()
    assert read(run / "one") == [1, 1, 1]


def test_a_part_that_was_never_committed_is_never_taken_from_another_step(run: Path) -> None:
    with portus.Checkpointer(run / ".portus", "run") as trainer:
        save(trainer, run / "one", 1).wait()
        _, keeper = trainer._open_or_create()
        keeper.place(str(run / "two.bin"), bytes(16), 2, "run", "number")
        with pytest.raises(portus.UsageError, match="never committed"):
            torch.load(run / "two.bin")


def test_mending_what_is_not_there_does_nothing(run: Path) -> None:
    assert portus.mend(run / "nothing", uncommitted=True) == []


class Slow(LocalFiles):
    """Between the link of a reference file and its name something else happens."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def link(self, source: str, target: str) -> None:
        if not target.endswith(".new"):
            self.reached.set()
            self.go_on.wait(10)
        super().link(source, target)


def test_a_file_that_is_being_placed_is_not_taken_for_a_deleted_one(run: Path) -> None:
    with portus.Checkpointer(run / ".portus", "run") as trainer:
        save(trainer, run / "one", 1).wait()
        files, writer = Slow(), WRITERS.open(trainer.path)
        keeper = Keeper(trainer.path, writer, files)
        place = (str(run / "coming"), bytes(15) + b"x", 2, "run")
        placing = threading.Thread(target=keeper.place, args=place)
        looking = threading.Thread(target=keeper.deleted)
        placing.start()
        assert files.reached.wait(10)
        looking.start()
        looking.join(0.2)  # all the time it needs, if nothing holds it up
        files.go_on.set()
        placing.join()
        looking.join()
        assert portus.is_reference(run / "coming")
        WRITERS.close(writer)
