"""``portus rescue``: each kind of loss, and what is left of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pytest

import portus
from portus.cli import rescue
from portus.engine.spec import PAGE
from portus.reach.format.layout import (
    DATA_START,
    SLOT,
    SLOT_OFFSETS,
)
from portus.reach.index import directory
from portus.reach.index.check import check
from portus.reach.media.lock import FileLocks
from portus.reach.media.pool import FileSystem
from portus.reach.pools.checkpointer import PoolCheckpointer
from portus.reach.pools.view import PoolView
from tests.same import assert_same
from tests.unit.cli.scene import Run, portus_json, state
from tests.unit.cli.scene import portus as command


def steps(trainer: PoolCheckpointer) -> list[int]:
    return [each.step for each in trainer.versions()]


def overwritten(path: Path, *places: tuple[int, int]) -> None:
    with path.open("r+b") as file:
        for offset, length in places:
            file.seek(offset)
            file.write(os.urandom(length))


def both_slots(path: Path) -> None:
    overwritten(path, *((offset, SLOT.size) for offset in SLOT_OFFSETS))


def all_fixed_pages(path: Path) -> None:
    overwritten(path, (0, DATA_START))


LOSSES: dict[str, Callable[[Path], None]] = {
    "both root slots": both_slots,
    "the first pages": all_fixed_pages,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_pool_that_does_not_open_is_listed_and_made_again(run: Run, loss: str) -> None:
    before = command("verify", "--pool", run.net)
    assert before.code == 0
    LOSSES[loss](run.net)
    assert command("ls", run.net).code == 1
    document = portus_json("rescue", run.net)
    assert [(each["model"], each["step"], each["whole"]) for each in document["versions"]] == [
        ("net", 10, True),
        ("net", 20, True),
    ]
    assert document["made"] is None

    fresh = run.root / "fresh.portus"
    said = command("rescue", run.net, "--into", fresh)
    assert (said.code, said.err) == (0, "")
    assert "2 versions found, 2 whole" in said.out
    assert f"{fresh}: a healthy pool" in said.out
    with PoolView(fresh) as view:
        for step, state in run.states.items():
            assert_same(view.load("net", step), state)
    out = run.root / "net.pt"
    assert command("export", "net@20", out, "--pool", fresh).code == 0

    run.net.unlink()
    os.rename(fresh, run.net)
    with run.trainer() as trainer:
        trainer.save(run.states[10], 30).wait()
        assert steps(trainer) == [10, 20, 30]
    assert command("verify", "--pool", run.net).code == 0


@pytest.mark.parametrize("loss", LOSSES)
def test_a_pool_is_made_whole_where_it_is(run: Run, loss: str) -> None:
    LOSSES[loss](run.net)
    said = command("rescue", run.net, "--in-place")
    assert (said.code, said.err) == (0, ""), said.out
    with run.trainer() as trainer:
        assert_same(trainer.load(20), run.states[20])
        trainer.save(run.states[10], 30).wait()
    assert check(run.net) == []


@pytest.mark.parametrize("loss", LOSSES)
def test_pointers_lead_to_the_pool_that_takes_the_place_of_a_lost_one(run: Run, loss: str) -> None:
    [path] = run.point(5)
    LOSSES[loss](run.led)
    fresh = run.root / "fresh.portus"
    assert command("rescue", run.led, "--into", fresh).code == 0
    os.replace(fresh, run.led)
    assert_same(portus.load(path), state(5))


def test_a_file_that_ends_within_a_page_is_made_whole_where_it_is(run: Run) -> None:
    both_slots(run.net)
    with run.net.open("ab") as file:
        file.write(b"what else was in the block of the disk")
    said = command("rescue", run.net, "--in-place")
    assert (said.code, said.err) == (0, ""), said.out
    assert check(run.net) == []
    assert run.net.stat().st_size % PAGE == 0
    with run.trainer() as trainer:
        assert_same(trainer.load(20), run.states[20])


@pytest.mark.parametrize("again", [False, True], ids=["and opens", "and is lost again"])
def test_what_was_saved_after_another_rescue_stays(
    run: Run, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    both_slots(run.net)
    locked = directory.lock

    def late(path: str, files: FileSystem) -> FileLocks:
        """The lock, once another one has mended the pool, and a training has saved to it."""
        monkeypatch.undo()
        assert command("rescue", run.net, "--in-place").code == 0
        with run.trainer() as trainer:
            trainer.save(run.states[10], 30).wait()
        if again:
            both_slots(run.net)
        return locked(path, files)

    monkeypatch.setattr(rescue, "lock", late)
    said = command("rescue", run.net, "--in-place")
    assert (said.code, said.err) == (0, ""), said.out
    with run.trainer() as trainer:
        assert steps(trainer) == [10, 20, 30]
    assert check(run.net) == []


def test_a_slot_that_rotted_is_put_right_in_place(run: Run) -> None:
    overwritten(run.net, (SLOT_OFFSETS[0], SLOT.size))
    assert command("verify", "--pool", run.net).code == 3
    assert command("rescue", run.net, "--in-place").code == 0
    assert command("verify", "--pool", run.net).code == 0


def test_the_newest_version_comes_back_if_both_places_of_its_slot_rotted(run: Run) -> None:
    with run.net.open("rb") as file:
        newest = max(SLOT_OFFSETS[:2], key=partial(sequence_at, file))
    overwritten(run.net, *((each, SLOT.size) for each in (newest, newest + 4 * PAGE)))
    assert [each["step"] for each in portus_json("rescue", run.net)["versions"]] == [10, 20]
    assert command("rescue", run.net, "--in-place").code == 0
    with PoolView(run.net) as view:
        for step, saved in run.states.items():
            assert_same(view.load("net", step), saved)


def sequence_at(file: BinaryIO, offset: int) -> int:
    file.seek(offset)
    sequence = SLOT.unpack(file.read(SLOT.size))["sequence"]
    assert isinstance(sequence, int)
    return sequence


def test_a_pool_file_that_lost_its_directory_and_its_name_is_found_by_any_name(run: Run) -> None:
    lost = run.root / "#1234"
    os.rename(run.net, lost)
    shutil.rmtree(run.pool)
    document = portus_json("rescue", lost)
    assert [each["listed"] for each in document["versions"]] == [True, True]
    assert command("rescue", lost, "--into", run.root / "again.portus").code == 0
    assert portus_json("verify", "--pool", run.root / "again.portus")["healthy"]


def test_what_is_damaged_is_named_and_left_out(run: Run) -> None:
    run.damage(20, "weight")
    both_slots(run.net)
    said = command("rescue", run.net)
    assert said.code == 0  # nobody lists it: it may have been let go of
    assert "damaged" in said.out
    fresh = run.root / "fresh.portus"
    assert command("rescue", run.net, "--into", fresh).code == 0
    with PoolView(fresh) as view:
        assert view.steps("net") == [10]


def test_what_a_root_lists_and_is_damaged_is_exit_code_1(run: Run) -> None:
    run.damage(20, "weight")
    assert command("rescue", run.net).code == 1


def test_nothing_whole_is_exit_code_1_and_makes_nothing(run: Run) -> None:
    run.net.write_bytes(os.urandom(1 << 20))
    fresh = run.root / "fresh.portus"
    assert command("rescue", run.net).code == 1
    said = command("rescue", run.net, "--into", fresh)
    assert said.code == 1
    assert "no version is whole" in said.err
    assert not fresh.exists()


def test_what_cannot_be_meant_is_refused(run: Run) -> None:
    assert command("rescue", run.pool).code == 2  # two pool files
    assert command("rescue", "portus://host", "--in-place").code == 2
    assert command("rescue", run.net, "--into", run.root / "a", "--in-place").code == 2
    taken = run.root / "taken.portus"
    taken.write_bytes(b"mine")
    assert command("rescue", run.net, "--into", taken).code == 74
    assert taken.read_bytes() == b"mine"
