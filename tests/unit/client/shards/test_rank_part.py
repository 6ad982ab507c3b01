"""Of a part, other ranks decide what goes, and no file of it leads to what never was complete."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import portus
from portus.client.loading.view import PoolFile
from portus.client.pool_checkpointer import PoolCheckpointer
from portus.errors import MediumError, UsageError
from portus.index.place import Place
from portus.media import calls
from portus.spec import VersionInfo


@pytest.fixture
def run(tmp_path: Path) -> Iterator[PoolCheckpointer]:
    with PoolCheckpointer(tmp_path / "m.portus", "m", keep=1, journal=False) as made:
        yield made


def test_a_part_is_announced_before_its_first_save_and_its_pool_is_known_by_the_sign(
    run: PoolCheckpointer,
) -> None:
    sign = run.part.announce()
    with contextlib.closing(PoolFile(Place.named(run.path))) as file:
        assert file.sign == sign
    assert sign.uuid == run.uuid
    assert run.part.announce().uuid == sign.uuid


def test_a_pool_that_was_announced_and_never_saved_to_goes_away(
    run: PoolCheckpointer, tmp_path: Path
) -> None:
    run.part.announce()
    run.close()
    assert not (tmp_path / "m.portus").exists()


@calls.marked
def announce_within_a_call(run: PoolCheckpointer) -> None:
    """What a signal handler asks for that interrupts a call of ours here."""
    run.part.announce()


def test_a_pool_that_is_not_there_is_not_made_within_another_call(
    run: PoolCheckpointer, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"creation of .*m\.portus: this signal handler"):
        announce_within_a_call(run)
    assert list(tmp_path.iterdir()) == []
    run.part.announce()
    announce_within_a_call(run)  # asks for nothing that somebody may hold


def test_what_others_decide_replaces_keep(run: PoolCheckpointer) -> None:
    seen: list[list[int]] = []

    def surplus(there: object) -> list[int]:
        assert isinstance(there, list)
        seen.append([info.step for info in there])
        return [info.id for info in there if info.step == 2]

    run.part.surplus = surplus
    for step in (1, 2, 3):
        run.save({"step": step}, step).wait()
    assert seen == [[1], [1, 2]]
    assert run.steps() == [1, 3]


def test_each_commit_is_told_and_a_failed_save_is_not(run: PoolCheckpointer) -> None:
    told: list[VersionInfo] = []
    run.part.on_commit = told.append
    first = run.save({"step": 1}, 1).wait()
    run.part.surplus = _fail
    with pytest.raises(MediumError):
        run.save({"step": 2}, 2).wait()
    run.part.surplus = None
    run.wait()
    assert told == [first]


@pytest.mark.parametrize("is_heard_of", [False, True])
def test_a_failure_that_all_ranks_raise_is_not_raised_by_the_next_save_of_one(
    tmp_path: Path, is_heard_of: bool
) -> None:
    with PoolCheckpointer(tmp_path / "m.portus", "m", on_error="raise") as run:
        run.save({"step": 1}, 1).wait()
        run.part.is_heard_of, run.part.surplus = is_heard_of, _fail
        run.save({"step": 2}, 2)
        run._queue.drain()
        run.part.surplus = None
        with contextlib.nullcontext() if is_heard_of else pytest.raises(MediumError):
            run.save({"step": 3}, 3)
        with pytest.raises(MediumError) if is_heard_of else contextlib.nullcontext():
            run.wait()


def test_what_is_let_go_is_gone_but_for_what_a_file_leads_to(
    run: PoolCheckpointer, tmp_path: Path
) -> None:
    run.part.surplus = lambda there: []
    file = tmp_path / "1.ckpt"
    run.save({"step": 1}, 1, reference=file).wait()
    for step in (2, 3):
        run.save({"step": step}, step).wait()
    run.part.let_go([info.id for info in run.versions() if info.step < 3])
    assert run.steps() == [1, 3]
    assert portus.load_reference(file) == {"step": 1}


def test_nothing_is_let_go_where_nothing_was_saved(run: PoolCheckpointer, tmp_path: Path) -> None:
    run.part.let_go([1])
    assert list(tmp_path.iterdir()) == []
    run.close()
    with pytest.raises(UsageError, match="closed"):
        run.part.let_go([1])


def test_a_file_of_what_was_never_complete_does_not_look_like_a_checkpoint(
    run: PoolCheckpointer, tmp_path: Path
) -> None:
    run.part.surplus = lambda there: []
    infos = {
        step: run.save({"step": step}, step, reference=tmp_path / f"{step}.ckpt").wait()
        for step in (1, 2)
    }
    run.part.cut_off([])
    assert (tmp_path / "1.ckpt").exists()
    run.part.cut_off([infos[1].token])
    assert not (tmp_path / "1.ckpt").exists()
    assert portus.load_reference(tmp_path / "2.ckpt") == {"step": 2}


def _fail(there: object) -> list[int]:
    raise MediumError(5, "no")
