"""What reference files hold, what goes with the last of them, and what is put aside."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import portus
from portus.client.files.keeper import _WITHDRAWN_MAX, ASIDE, is_aside
from portus.client.files.reference import read
from portus.format.reference import Reference
from portus.index.directory import links_directory
from portus.index.keep import Keep
from portus.spec import VersionInfo


@dataclass
class Coming:
    """A save in flight."""

    token: bytes
    step: int
    model: str = "net"
    over: bool = False


class Scene:
    """A run with versions of steps 1, 2, 3 that nothing but files holds, and its keeper."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.run = portus.PoolCheckpointer(root / ".portus", "net", keep=None, journal=False)
        for step in (1, 2, 3):
            self.run.save({"step": step}, step).wait()
        self.writer, self.keeper = self.run._pool.open_or_create()
        self._tokens = itertools.count(100)

    def info(self, step: int) -> VersionInfo:
        [found] = [info for info in self.run.versions() if info.step == step]
        return found

    def path(self, name: str) -> str:
        return str(self.root / name)

    def put(self, name: str, step: int, part: str | None = None) -> Reference:
        """A file that leads to a committed version."""
        info = self.info(step)
        made = self.keeper.place(self.path(name), info.token, step, "net", part)
        self.keeper.make_durable([self.path(name)])
        return made

    def put_failed(self, name: str, step: int = 9, part: str | None = None) -> Reference:
        """A file whose version never comes."""
        token = next(self._tokens).to_bytes(16, "big")
        return self.keeper.place(self.path(name), token, step, "net", part)

    def held(self) -> list[int]:
        """Steps that files hold."""
        held = self.keeper.held(self.writer.catalogue())
        return [info.step for info in self.run.versions() if info.id in held]

    def deleted(self) -> list[int]:
        gone = self.keeper.deleted()
        return [info.step for info in self.run.versions() if info.id in gone]

    def there(self) -> list[str]:
        return sorted(name for name in os.listdir(self.root) if name != ".portus")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.run.close()


def test_a_version_is_held_as_long_as_one_of_its_files_is_there(scene: Scene) -> None:
    scene.put("a.pt", 1)
    scene.put("b.pt", 1)
    assert (scene.held(), scene.deleted()) == ([1], [])
    os.unlink(scene.path("a.pt"))
    assert (scene.deleted(), scene.held()) == ([], [1])
    os.unlink(scene.path("b.pt"))
    assert (scene.deleted(), scene.held()) == ([1], [])


def test_a_file_that_was_renamed_holds_what_it_held(scene: Scene) -> None:
    scene.put("a.pt", 1)
    os.rename(scene.path("a.pt"), scene.path("best.pt"))
    assert (scene.deleted(), scene.held()) == ([], [1])


def test_what_keep_wants_for_ever_does_not_go_with_its_file(scene: Scene) -> None:
    scene.keeper.keep("net", Keep(last=1, every=2))
    for step in (1, 2):
        scene.put(f"{step}.pt", step)
        scene.keeper.remove(scene.path(f"{step}.pt"))
    assert scene.run.steps() == [2, 3]


def test_a_file_replaced_lets_go_of_what_it_alone_led_to(scene: Scene) -> None:
    scene.put("last.pt", 1)
    scene.keeper.replace(scene.path("last.pt"), scene.info(3))
    assert scene.run.steps() == [2, 3]
    assert portus.load_reference(scene.path("last.pt")) == {"step": 3}


def test_a_replacement_may_leave_the_old_version_to_the_next_commit(scene: Scene) -> None:
    scene.put("last.pt", 1)
    scene.keeper.replace(scene.path("last.pt"), scene.info(3), retire=False)
    assert scene.run.steps() == [1, 2, 3]
    assert scene.held() == [3]


def test_a_copy_of_a_file_that_was_removed_keeps_its_version(scene: Scene) -> None:
    scene.put("a.pt", 1)
    os.link(scene.path("a.pt"), scene.path("copy.pt"))
    scene.keeper.remove(scene.path("a.pt"))
    assert 1 in scene.run.steps()
    assert portus.load_reference(scene.path("copy.pt")) == {"step": 1}


def test_a_directory_removed_lets_go_of_what_led_from_there_alone(scene: Scene) -> None:
    os.makedirs(scene.path("step_1"))
    scene.put("step_1/a.pt", 1)
    scene.put("step_1/b.pt", 2)
    scene.put("else.pt", 2)
    Path(scene.path("step_1/notes.txt")).write_text("the user's")
    scene.keeper.remove_directory(scene.path("step_1"))
    assert scene.run.steps() == [2, 3]
    assert scene.there() == ["else.pt"]


def test_a_path_is_spare_only_if_nothing_is_lost_with_it(scene: Scene) -> None:
    os.makedirs(scene.path("one"))
    scene.put("one/a.pt", 1)
    assert not scene.keeper.is_spare(scene.path("one")), "its version has no other file"
    scene.put("b.pt", 1)
    assert scene.keeper.is_spare(scene.path("one"))
    Path(scene.path("one/notes.txt")).write_text("the user's")
    assert not scene.keeper.is_spare(scene.path("one")), "it has a file of somebody else"


def test_a_path_is_outlived_only_by_a_newer_version_with_a_file(scene: Scene) -> None:
    scene.put("a.pt", 2)
    assert not scene.keeper.is_outlived(scene.path("a.pt")), "of version 3 there is no file"
    scene.put("older.pt", 1)
    assert not scene.keeper.is_outlived(scene.path("a.pt"))
    scene.put("newer.pt", 3)
    assert scene.keeper.is_outlived(scene.path("a.pt"))
    os.unlink(scene.path("newer.pt"))
    assert not scene.keeper.is_outlived(scene.path("a.pt"))


def test_a_file_to_come_falls_back_to_the_newest_version(scene: Scene) -> None:
    made = scene.put_failed("a.pt")
    assert (made.fallback, made.fallback_step) == (scene.info(3).token.hex(), 3)
    assert made.in_flight is None
    assert portus.load_reference(scene.path("a.pt")) == {"step": 3}


def test_a_part_falls_back_to_nothing(scene: Scene) -> None:
    made = scene.put_failed("a.bin", part="step")
    assert (made.fallback, made.in_flight) == (None, None)


def test_a_file_falls_back_first_to_the_save_whose_commit_may_retire_its_fallback(
    scene: Scene,
) -> None:
    coming = Coming(bytes(15) + b"c", 4)
    scene.keeper.held(scene.writer.catalogue(), coming)  # it was decided what goes with it
    made = scene.put_failed("a.pt")
    assert (made.in_flight, made.in_flight_step) == (coming.token.hex(), 4)
    coming.over = True
    assert scene.put_failed("b.pt").in_flight is None


def test_a_save_that_was_decided_about_does_not_come_before_a_version_that_a_file_holds(
    scene: Scene,
) -> None:
    scene.put("three.pt", 3)
    scene.keeper.held(scene.writer.catalogue(), Coming(bytes(15) + b"c", 4))
    assert scene.put_failed("a.pt").in_flight is None


def test_the_file_of_a_save_that_failed_is_put_aside_under_a_name_of_its_own(scene: Scene) -> None:
    for _ in range(2):
        made = scene.put_failed("a.pt")
        scene.keeper.withdraw(scene.path("a.pt"), made, 1 << 62, is_in_doubt=False)
    assert scene.there() == [f"a.pt{ASIDE}", f"a.pt{ASIDE}-2"]
    assert all(map(is_aside, scene.there()))
    assert not is_aside("a.pt")


def test_a_run_leaves_so_many_files_of_saves_that_failed_and_no_more(scene: Scene) -> None:
    for step in range(_WITHDRAWN_MAX + 3):
        made = scene.put_failed(f"{step:02}.pt", step)
        scene.keeper.withdraw(scene.path(f"{step:02}.pt"), made, 1 << 62, is_in_doubt=False)
    expected = [f"{step:02}.pt{ASIDE}" for step in range(3, _WITHDRAWN_MAX + 3)]
    assert scene.there() == expected, "the oldest went"


def test_what_is_newer_than_the_save_that_failed_stays(scene: Scene) -> None:
    made = scene.put_failed("a.pt")
    scene.keeper.replace(scene.path("a.pt"), scene.info(2))
    scene.keeper.withdraw(scene.path("a.pt"), made, 1 << 62, is_in_doubt=False)
    assert scene.there() == ["a.pt"]
    assert portus.load_reference(scene.path("a.pt")) == {"step": 2}


def test_the_part_of_a_directory_is_left_to_who_mends_the_whole(scene: Scene) -> None:
    made = scene.put_failed("a.bin", part="step")
    scene.keeper.withdraw(scene.path("a.bin"), made, 1 << 62, is_in_doubt=False)
    assert scene.there() == ["a.bin"]


def test_a_link_to_a_file_that_is_put_aside_leads_to_the_newest_one_there_is(scene: Scene) -> None:
    scene.put("2.pt", 2)
    made = scene.put_failed("9.pt")
    os.symlink("9.pt", scene.path("last.pt"))
    scene.keeper.withdraw(scene.path("9.pt"), made, 1 << 62, is_in_doubt=False)
    assert portus.load_reference(scene.path("last.pt")) == {"step": 2}


def test_a_start_puts_aside_what_was_never_committed_and_nothing_of_other_models(
    scene: Scene,
) -> None:
    scene.put("2.pt", 2)
    scene.put_failed("9.pt")
    scene.keeper.place(scene.path("other.pt"), bytes(15) + b"o", 5, "other")
    scene.keeper.begin("net")
    assert "9.pt" in scene.there(), "the run has begun before, so the save may be in flight"
    scene.keeper._begun = False
    scene.keeper.begin("net")
    assert scene.there() == ["2.pt", f"9.pt{ASIDE}", "other.pt"]


def test_files_that_were_retired_by_hand_are_not_taken_for_saves_that_were_cut_off(
    scene: Scene,
) -> None:
    scene.put("2.pt", 2)
    [id_] = scene.keeper.held(scene.writer.catalogue())
    scene.keeper.renounce([id_])
    scene.writer.retire([id_])
    assert scene.keeper.mend(uncommitted=True) == []
    assert (scene.there(), scene.held()) == (["2.pt"], [])


def test_a_file_is_put_back_in_the_run_alone_and_over_nothing(
    scene: Scene, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(scene.root)
    scene.keeper.put_back("sub/1.pt", scene.info(1), None)
    assert portus.load_reference(scene.path("sub/1.pt")) == {"step": 1}
    Path(scene.path("mine.pt")).write_text("the user's")
    scene.keeper.put_back("mine.pt", scene.info(1), None)
    assert Path(scene.path("mine.pt")).read_text() == "the user's"
    for outside in (str(elsewhere / "x.pt"), os.path.relpath(elsewhere / "x.pt", scene.root)):
        scene.keeper.put_back(outside, scene.info(1), None)
    assert os.listdir(elsewhere) == []


def test_what_is_placed_is_listed_by_its_path_from_the_root_of_the_run(scene: Scene) -> None:
    os.makedirs(scene.path("sub"))
    made = scene.put("sub/1.pt", 1)
    scene.keeper.place(scene.path("other.pt"), bytes(15) + b"o", 5, "other")
    assert {path: each.id for path, each in scene.keeper.placed("net").items()} == {
        "sub/1.pt": made.id
    }
    shutil.rmtree(scene.path("sub"))
    assert scene.keeper.placed("net") == {}


def test_a_file_says_all_that_leads_from_it_to_its_version(scene: Scene) -> None:
    made = scene.put("sub/1.pt", 1)
    assert read(scene.path("sub/1.pt")) == made
    pool = os.path.normpath(os.path.join(scene.root, "sub", made.pool_relative))
    assert pool == made.pool_path == scene.run.path
    assert scene.keeper.is_here(made)


@pytest.mark.parametrize("size", [10, 1 << 20])
@pytest.mark.parametrize("part", [None, "model"])
def test_a_file_that_another_program_writes_to_in_place_holds_nothing_and_its_bytes_are_not_kept(
    scene: Scene, size: int, part: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    name = "a.ckpt" if part is None else "a/model.ckpt"
    made, other = scene.put(name, 2, part), scene.put("b.ckpt", 1)
    torch.save({"other": torch.zeros(size)}, scene.path(name))
    links = Path(links_directory(scene.run.path))
    assert any(made.id in each for each in os.listdir(links))
    (links / "README").write_text("of somebody else")
    assert scene.keeper.deleted() == {scene.info(2).id}
    assert f"{scene.path(name)} was a reference file" in caplog.text
    assert {each.split(".")[0] for each in os.listdir(links)} == {other.id, "README"}
    assert torch.load(scene.path(name))["other"].shape == (size,)
    assert scene.keeper.held(scene.writer.catalogue()) == {scene.info(1).id}


def test_what_a_process_put_aside_that_died_then_leaves_no_link(scene: Scene) -> None:
    scene.put_failed("a.ckpt")
    moved, held = scene.put_failed("moved.ckpt"), scene.put("b.ckpt", 1)
    os.rename(scene.path("a.ckpt"), scene.path("a.ckpt") + ASIDE)
    os.rename(scene.path("moved.ckpt"), scene.path("elsewhere.ckpt"))
    scene.keeper.deleted()
    scene.keeper._begun = False  # as by the next process
    scene.keeper.begin("net")
    links = {each.split(".")[0] for each in os.listdir(links_directory(scene.run.path))}
    assert links == {moved.id, held.id}


def test_a_damaged_reference_is_not_taken_for_what_another_program_wrote(scene: Scene) -> None:
    made = scene.put("a.ckpt", 2)
    with open(scene.path("a.ckpt"), "r+b") as file:
        file.seek(400)
        file.write(b"?")
    assert scene.keeper.deleted() == set()
    links = links_directory(scene.run.path)
    assert [each.split(".")[0] for each in os.listdir(links)] == [made.id]
    assert scene.info(2).id in scene.keeper.held(scene.writer.catalogue())
