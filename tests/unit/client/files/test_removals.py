"""No checkpoint file is removed before what replaces it is committed (V5)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import portus
from portus.client.pool_checkpointer import PoolCheckpointer
from portus.errors import AbandonedError, MediumError
from portus.pipeline.handle import SaveHandle
from portus.spec import VersionInfo

MIB = 1 << 20
ROOM = 16 * MIB
"""Of the pools here: two states fit, or nearly three, and no huge one."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def trainer(run: Path) -> PoolCheckpointer:
    return PoolCheckpointer(run / "pool", keep=1, max_bytes=ROOM)


def save(trainer: PoolCheckpointer, path: Path, step: int, size: int = MIB) -> SaveHandle:
    state = {"step": step, "w": torch.full((size // 4,), float(step))}
    return trainer.save(state, step, reference=path)


def fails(trainer: PoolCheckpointer, path: Path, step: int) -> None:
    """Asks for a save that the pool has no room for."""
    with pytest.raises(MediumError):
        save(trainer, path, step, 4 * ROOM).wait()


def step_at(path: Path) -> int:
    """Which step the file leads to, by itself and not as a way out."""
    reference = portus.read_reference(path)
    state = portus.load_reference(path)
    assert isinstance(state, dict)
    assert reference is not None
    assert reference.step == state["step"]
    return int(state["step"])


def test_a_removal_waits_for_the_next_save_that_is_committed(
    trainer: PoolCheckpointer, run: Path
) -> None:
    with trainer:
        save(trainer, run / "1.ckpt", 1).wait()
        for step in (2, 3):
            fails(trainer, run / f"{step}.ckpt", step)
            trainer.remove(run / f"{step - 1}.ckpt")
        trainer.wait()
        assert step_at(run / "1.ckpt") == 1
        save(trainer, run / "4.ckpt", 4).wait()
        trainer.wait()
        assert not (run / "1.ckpt").exists()
        assert trainer.steps() == [4]


def test_the_file_of_a_save_that_failed_goes_at_once(trainer: PoolCheckpointer, run: Path) -> None:
    with trainer:
        first = save(trainer, run / "1.ckpt", 1)
        first.wait()
        trainer.part.surplus = _no  # the next save fails at its commit; its file may be there still
        with pytest.raises(MediumError):
            save(trainer, run / "2.ckpt", 2).wait()
        (run / "last.ckpt").symlink_to("1.ckpt")
        trainer.remove(run / "2.ckpt")
        trainer.remove(run / "last.ckpt")
        trainer.remove(run / "1.ckpt")
        trainer.wait()
        assert not (run / "2.ckpt").exists()
        assert not (run / "last.ckpt").is_symlink()
        assert step_at(run / "1.ckpt") == 1


def _no(infos: object) -> list[int]:
    raise MediumError(5, "no")


def test_what_is_still_to_be_removed_at_the_end_stays_and_is_named(
    trainer: PoolCheckpointer, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run / "stranger.ckpt").write_bytes(b"of torch itself")
    (run / "whole").mkdir()
    (run / "whole" / "notes.txt").write_text("the user's")
    with trainer:
        save(trainer, run / "1.ckpt", 1).wait()
        fails(trainer, run / "2.ckpt", 2)
        for name in ("1.ckpt", "stranger.ckpt", "whole"):
            trainer.remove(run / name)
        with caplog.at_level(logging.WARNING, "portus"):
            trainer.close()
    assert step_at(run / "1.ckpt") == 1
    assert (run / "stranger.ckpt").exists()
    assert (run / "whole" / "notes.txt").exists()
    said = [each for each in caplog.messages if "no later save was committed" in each]
    assert len(said) == 1
    assert all(str(run / name) in said[0] for name in ("1.ckpt", "stranger.ckpt", "whole"))


def test_a_full_pool_gives_the_oldest_while_a_newer_one_remains(
    trainer: PoolCheckpointer, run: Path
) -> None:
    big = 6 * MIB  # three do not fit
    with trainer:
        save(trainer, run / "1.ckpt", 1, big).wait()
        save(trainer, run / "2.ckpt", 2, big).wait()
        with pytest.raises(MediumError, match=r"No space|max_bytes"):
            save(trainer, run / "3.ckpt", 3, big).wait()
        trainer.remove(run / "1.ckpt")
        trainer.wait()
        assert not (run / "1.ckpt").exists()
        assert step_at(run / "2.ckpt") == 2
        trainer.remove(run / "2.ckpt")  # asked for with step 3 alone in mind, and there is none
        trainer.wait()
        assert step_at(run / "2.ckpt") == 2
        save(trainer, run / "4.ckpt", 4, big).wait()
        trainer.wait()
        assert not (run / "2.ckpt").exists()
        assert step_at(run / "4.ckpt") == 4


def test_a_full_pool_never_gives_the_last_one(trainer: PoolCheckpointer, run: Path) -> None:
    big = 6 * MIB
    with trainer:
        save(trainer, run / "of another time.ckpt", 0, big).wait()
        save(trainer, run / "1.ckpt", 1, big).wait()
        for step in range(2, 6):
            with pytest.raises(MediumError):
                save(trainer, run / f"{step}.ckpt", step, big).wait()
            trainer.remove(run / f"{step - 1}.ckpt")
        trainer.wait()
        assert step_at(run / "1.ckpt") == 1


def test_a_file_that_is_saved_to_while_its_removal_waits_is_not_removed(
    trainer: PoolCheckpointer, run: Path
) -> None:
    with trainer:
        save(trainer, run / "all" / "1.ckpt", 1).wait()
        save(trainer, run / "last.ckpt", 1).wait()
        fails(trainer, run / "2.ckpt", 2)
        trainer.remove(run / "last.ckpt")
        trainer.remove(run / "all")
        trainer.wait()
        save(trainer, run / "last.ckpt", 3).wait()
        trainer.wait()
        assert step_at(run / "last.ckpt") == 3
        assert not (run / "all").exists()
        assert trainer.steps() == [3]


def test_a_save_that_found_no_place_in_the_queue_replaces_nothing(run: Path) -> None:
    go = threading.Event()

    def hold(infos: Sequence[VersionInfo]) -> list[int]:
        assert go.wait(60)
        return []

    with PoolCheckpointer(run / "pool", fence_timeout=0.05) as trainer:
        save(trainer, run / "1.ckpt", 1).wait()
        trainer.part.surplus = hold
        for step in (2, 3):
            save(trainer, run / f"{step}.ckpt", step)
        refused = save(trainer, run / "4.ckpt", 4)
        trainer.remove(run / "1.ckpt")
        go.set()
        with pytest.raises(AbandonedError, match="two earlier saves were not finished"):
            refused.wait()
        trainer.wait()
        assert step_at(run / "1.ckpt") == 1
        save(trainer, run / "5.ckpt", 5).wait()
        trainer.wait()
        assert not (run / "1.ckpt").exists()
