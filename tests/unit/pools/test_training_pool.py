"""Pointers, and the versions that they keep: a version goes with its last pointer, if that was
removed or replaced through Portus where it had been put."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import portus
from portus.engine.directory.system import Linux
from portus.engine.media.process import Descriptor
from portus.engine.writer.image_file import FileDraft
from portus.errors import BusyError, MediumError, UsageError
from portus.reach.daemon.shared_state import ClientTimeouts
from portus.reach.training.training_files import TrainingFiles
from portus.reach.versions.host import HostPool
from tests.hosts import serving, url
from tests.moments import WAIT_S_MAX
from tests.unit.pools.scene import Scene, stored
from tests.unit.pools.stuck import gated
from tests.warm import in_process

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only"),
    pytest.mark.usefixtures("own_saver"),
]


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((3000,), float(step)), "step": step}


def step_at(path: str | Path) -> int:
    """The step of what ``torch.load`` finds at a path."""
    found = torch.load(path)
    assert torch.equal(found["w"], state(found["step"])["w"])
    return int(found["step"])


def save(files: TrainingFiles, path: str, step: int) -> None:
    finish(files, files.save(state(step), path, step))


def finish(files: TrainingFiles, handle: portus.SaveHandle) -> None:
    """What comes after the commit is over too."""
    handle.wait()
    files.wait()


@pytest.fixture(params=["file", "host"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    if request.param == "file":
        made = Scene(tmp_path)
        yield made
        if Path(made.place.path).exists():
            assert made.is_sound()
        return
    with serving(tmp_path / "host") as server:
        yield Scene(tmp_path, url(server))


def test_a_pointer_is_small_and_torch_loads_what_it_leads_to(scene: Scene) -> None:
    path = scene.path("last.ckpt")
    with scene.training() as files:
        save(files, path, 7)
        assert os.path.getsize(path) < 4096
        reference = portus.read_reference(path)
        assert reference is not None
        assert (reference.model, reference.step, reference.part) == ("net", 7, "last.ckpt")
        assert (reference.pool_path, reference.written_path) == (str(scene.place), path)
        for weights_only in (True, False):
            assert torch.load(path, weights_only=weights_only)["step"] == 7
        assert portus.load(path)["step"] == 7
    assert sorted(os.listdir(scene.checkpoints)) == ["last.ckpt"]


def test_a_pointer_appears_once_its_version_is_committed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[int], bool]] = []
    publish = FileDraft.publish
    path = scene.path("last.ckpt")

    def watched(draft: FileDraft) -> None:
        seen.append((scene.steps(), os.path.exists(path)))
        publish(draft)
        seen.append((scene.steps(), os.path.exists(path)))

    monkeypatch.setattr(FileDraft, "publish", watched)
    with scene.training() as files:
        save(files, path, 1)
    assert seen == [([1], False), ([1], True)]


def test_until_then_there_is_what_was_there_before(scene: Scene) -> None:
    """``ready`` is the last moment at which the save may be forbidden."""
    seen: list[tuple[list[int], int]] = []
    directory = scene.path("last")
    path = f"{directory}/a.bin"

    def forbid() -> None:
        seen.append((scene.steps(), step_at(path)))
        raise MediumError(5, "another rank failed")

    with scene.training() as files:
        finish(files, files.save_directory(directory, {"a.bin": state(1)}, 1))
        handle = files.save_directory(directory, {"a.bin": state(2)}, 2, ready=forbid)
        with pytest.raises(MediumError, match="another rank failed"):
            handle.wait()
        assert seen == [([1], 1)]
        assert scene.steps() == [1]
        assert step_at(path) == 1


def test_a_directory_without_a_file_is_not_saved(scene: Scene) -> None:
    with scene.training() as files:
        with pytest.raises(UsageError, match="expected a file to save, found none"):
            files.save_directory(scene.path("last"), {}, 1)
        assert not os.path.exists(scene.path("last"))


@pytest.mark.parametrize("what", ["save", "begin"])
def test_a_save_that_failed_leaves_no_pointer(tmp_path: Path, what: str) -> None:
    scene = Scene(tmp_path)
    path = scene.path("1.ckpt")
    with scene.training(max_bytes=4 << 20) as files:
        if what == "save":
            save(files, scene.path("0.ckpt"), 0)
        with pytest.raises(MediumError, match="max_bytes"):
            files.save({"w": torch.zeros(4 << 20)}, path, 1).wait()
    assert not os.path.exists(path)
    assert os.path.exists(scene.place.path) == (what == "save"), "a pool that nobody used goes"


def test_a_version_goes_when_its_pointer_is_replaced(scene: Scene) -> None:
    path = scene.path("last.ckpt")
    with scene.training() as files:
        for step in range(4):
            save(files, path, step)
            assert scene.steps() == [step]
    with scene.training() as files:  # also one of a training before
        save(files, path, 4)
        assert scene.steps() == [4]
    assert step_at(path) == 4


def test_a_version_goes_when_its_pointer_is_removed(scene: Scene) -> None:
    with scene.training() as files:
        for step in range(3):
            save(files, scene.path(f"{step}.ckpt"), step)
        files.remove(scene.path("1.ckpt"))
        assert scene.steps() == [0, 2]
    with scene.training() as files:  # also one of a training before
        files.remove(scene.path("0.ckpt"))
        files.wait()
        assert scene.steps() == [2]
    assert sorted(os.listdir(scene.checkpoints)) == ["2.ckpt"]


def test_a_held_pointer_is_put_back_only_while_its_version_is_there(scene: Scene) -> None:
    """A save in flight holds what was the newest when it was asked for; by the time that its
    process is killed, that may have been replaced and removed."""
    held = scene.path("held.portus")
    with scene.training() as files:
        save(files, scene.path("1.ckpt"), 1)
        os.link(scene.path("1.ckpt"), held)
        with contextlib.closing(Descriptor(held, os.O_RDONLY)) as file:
            os.unlink(scene.path("1.ckpt"))
            assert Linux().is_whole(file, scene.path("1.ckpt"))
            os.link(held, scene.path("1.ckpt"))
            files.remove(scene.path("1.ckpt"))
            files.wait()
            assert not Linux().is_whole(file, scene.path("1.ckpt"))


def test_a_removal_that_opens_the_pool_lets_go_too(scene: Scene) -> None:
    with scene.training() as files:
        save(files, scene.path("1.ckpt"), 1)
        save(files, scene.path("2.ckpt"), 2)
    files = TrainingFiles(portus.Settings(journal=False), pool=scene.place)
    files.remove(scene.path("1.ckpt"))
    files.close()
    assert scene.steps() == [2]


def test_a_copy_of_a_pointer_keeps_nothing_and_removes_nothing(scene: Scene) -> None:
    one, two, copy = scene.path("1.ckpt"), scene.path("2.ckpt"), scene.path("copy.ckpt")
    with scene.training() as files:
        save(files, one, 1)
        save(files, two, 2)
        shutil.copy(two, copy)
        files.remove(copy)
        assert not os.path.exists(copy)
        assert scene.steps() == [1, 2], "what the copy led to is of the other"
        shutil.copy(two, copy)
        save(files, copy, 3)
        assert scene.steps() == [1, 2, 3], "nor does it go when the copy is replaced"
        shutil.copy(one, copy)
        assert step_at(copy) == 1
        files.remove(one)
        assert scene.steps() == [2, 3]
        with pytest.raises(UsageError, match=r"copy\.ckpt: step 1 of model 'net' is not in .* any"):
            torch.load(copy)


def test_a_hard_link_is_a_copy(scene: Scene) -> None:
    path, other = scene.path("1.ckpt"), scene.path("other.ckpt")
    with scene.training() as files:
        save(files, path, 1)
        os.link(path, other)
        files.remove(other)
        assert scene.steps() == [1]
        assert step_at(path) == 1


def test_a_pointer_that_was_moved_leads_there_and_keeps_its_version(scene: Scene) -> None:
    path, moved = scene.path("1.ckpt"), scene.path("best.ckpt")
    with scene.training() as files:
        save(files, path, 1)
        os.rename(path, moved)
        save(files, path, 2)
        assert scene.steps() == [1, 2], "nothing was replaced"
        assert (step_at(moved), step_at(path)) == (1, 2)
        files.remove(moved)
        assert scene.steps() == [1, 2], "nobody knows whether there are other copies"
        assert not os.path.exists(moved)


def test_nothing_is_concluded_from_what_a_user_deletes(scene: Scene) -> None:
    with scene.training() as files:
        for step in (1, 2):
            save(files, scene.path(f"{step}.ckpt"), step)
        os.unlink(scene.path("1.ckpt"))
        shutil.copy(scene.path("2.ckpt"), scene.root / "away.ckpt")
        shutil.rmtree(scene.checkpoints)
        save(files, scene.path("3.ckpt"), 3)
        files.remove(scene.path("1.ckpt"))
        assert scene.steps() == [1, 2, 3]
        assert step_at(scene.root / "away.ckpt") == 2


def test_a_version_of_two_files_goes_with_its_second_pointer(scene: Scene) -> None:
    directory = scene.path("1")
    with scene.training() as files:
        finish(files, files.save_directory(directory, {"a.bin": state(1), "b.bin": state(11)}, 1))
        files.remove(f"{directory}/a.bin")
        assert scene.steps() == [1]
        assert step_at(f"{directory}/b.bin") == 11
        files.remove(f"{directory}/b.bin")
        assert scene.steps() == []


def test_a_version_of_two_files_stays_while_one_of_them_is_not_replaced(scene: Scene) -> None:
    directory = scene.path("last")
    with scene.training() as files:
        finish(files, files.save_directory(directory, {"a.bin": state(1), "b.bin": state(11)}, 1))
        finish(files, files.save_directory(directory, {"a.bin": state(2)}, 2))
        assert scene.steps() == [1, 2]
        assert (step_at(f"{directory}/a.bin"), step_at(f"{directory}/b.bin")) == (2, 11)
        finish(files, files.save_directory(directory, {"b.bin": state(13), "c.bin": state(3)}, 3))
        assert scene.steps() == [2, 3]
        both = {"a.bin": state(4), "b.bin": state(14)}
        finish(files, files.save_directory(directory, both, 4))
        assert scene.steps() == [3, 4], "c.bin is still there"


def test_a_real_file_in_the_place_of_a_second_pointer_keeps_nothing(scene: Scene) -> None:
    directory = scene.path("1")
    with scene.training() as files:
        finish(files, files.save_directory(directory, {"a.bin": state(1), "b.bin": state(11)}, 1))
        torch.save(state(5), f"{directory}/b.bin")
        files.remove(f"{directory}/a.bin")
        assert scene.steps() == []
        assert step_at(f"{directory}/b.bin") == 5


def test_the_versions_of_a_directory_go_with_it(scene: Scene) -> None:
    with scene.training() as files:
        for step in range(3):
            directory = scene.path(f"step-{step}")
            both = {"a.bin": state(step), "b.bin": state(10 + step)}
            finish(files, files.save_directory(directory, both, step))
            Path(directory, "config.json").write_text("{}")
            Path(directory, "more").mkdir()
            save(files, f"{directory}/more/c.bin", 20 + step)
        files.remove(scene.path("step-1"))
        assert scene.steps() == [0, 20, 2, 22]
    assert sorted(os.listdir(scene.checkpoints)) == ["step-0", "step-2"]


def test_a_removal_waits_for_the_save_in_flight_and_then_lets_go(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    gate = gated(Path(scene.place.path))
    try:
        with scene.training() as files:
            save(files, scene.path("1.ckpt"), 1)
            gate.shut()
            begun = threading.Event()
            made: list[portus.SaveHandle] = []

            def save_another() -> None:
                begun.set()
                made.append(files.save(state(2), scene.path("2.ckpt"), 2))

            other = threading.Thread(target=save_another)
            other.start()
            assert begun.wait(WAIT_S_MAX)
            assert gate.reached.wait(WAIT_S_MAX)
            files.remove(scene.path("1.ckpt"))
            assert step_at(scene.path("1.ckpt")) == 1
            gate.open()
            other.join()
            made[0].wait(WAIT_S_MAX)
            files.wait()
            assert scene.steps() == [2]
            assert not os.path.exists(scene.path("1.ckpt"))
    finally:
        gate.open()


def test_a_pointer_of_another_pool_is_replaced_and_removed_and_that_pool_left_alone(
    tmp_path: Path, scene: Scene
) -> None:
    other = Scene(tmp_path / "other")
    other.root.mkdir()
    replaced, removed = scene.path("replaced.ckpt"), scene.path("removed.ckpt")
    with scene.training(pool=other.place) as files:
        save(files, replaced, 1)
        save(files, removed, 2)
    with scene.training() as files:
        save(files, replaced, 3)
        files.remove(removed)
        assert scene.steps() == [3]
        assert other.steps() == [1, 2]
    assert os.listdir(scene.checkpoints) == ["replaced.ckpt"]
    assert step_at(replaced) == 3


def test_what_lies_at_a_path_and_is_no_pointer_is_replaced_and_removed(scene: Scene) -> None:
    names = ("real", "damaged", "text")
    with scene.training() as files:
        save(files, scene.path("damaged"), 1)
        damaged = bytearray(Path(scene.path("damaged")).read_bytes())
        damaged[300] ^= 1
        for change in ("replaced", "removed"):
            torch.save(state(9), scene.path("real"))
            Path(scene.path("damaged")).write_bytes(damaged)
            Path(scene.path("text")).write_text("text")
            for number, name in enumerate(names):
                if change == "removed":
                    files.remove(scene.path(name))
                else:
                    save(files, scene.path(name), number)
                    assert step_at(scene.path(name)) == number
                    files.remove(scene.path(name))
        assert os.listdir(scene.checkpoints) == []
        assert scene.steps() == [1], "what a damaged pointer leads to is not let go of"


def test_a_removal_while_the_pool_cannot_be_reached_says_what_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path / "host") as server:
        scene = Scene(tmp_path, url(server))
        with scene.training() as files:
            save(files, scene.path("1.ckpt"), 1)
    files = TrainingFiles(portus.Settings(journal=False), pool=scene.place)
    with caplog.at_level(logging.WARNING, "portus"):
        files.remove(scene.path("1.ckpt"))
    files.close()
    assert not os.path.exists(scene.path("1.ckpt"))
    assert f"1.ckpt is removed, but its version stays in {scene.place}" in caplog.text


def test_saves_to_one_pool_go_on_after_a_version_was_removed_by_others(scene: Scene) -> None:
    with scene.training() as files:
        save(files, scene.path("1.ckpt"), 1)
        if scene.place.is_shared:
            other = TrainingFiles(portus.Settings(journal=False), pool=scene.place)
            other.remove(scene.path("1.ckpt"))
            other.close()
        else:
            os.unlink(scene.path("1.ckpt"))
        save(files, scene.path("2.ckpt"), 2)
        assert step_at(scene.path("2.ckpt")) == 2


def test_a_pool_that_nobody_saved_to_goes_at_the_end(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    with scene.training():
        assert os.path.exists(scene.place.path), "begin makes it, or says why it cannot"
    assert not os.path.exists(scene.place.path)


@pytest.mark.long
def test_a_pool_file_has_one_writer_process(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    program = (
        "import sys, portus\n"
        "files = portus.TrainingFiles(\n"
        "    portus.Settings(), pool=portus.Place.parse(sys.argv[1]), is_named=False)\n"
        "try:\n"
        "    files.begin('net', sys.argv[2] + '/.portus', sys.argv[2])\n"
        "except portus.BusyError as error:\n"
        "    print('busy:', error)\n"
    )
    with scene.training() as files:
        save(files, scene.path("1.ckpt"), 1)
        done = in_process(program, str(scene.place), str(tmp_path))
    assert f"pid {os.getpid()}" in done.stdout, done.stderr


def test_a_poisoned_pool_fails_saves_and_what_was_saved_before_stays(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    gate = gated(Path(scene.place.path))
    with scene.training() as files:
        save(files, scene.path("1.ckpt"), 1)
        gate.broken = True
        for step in (2, 3):
            with pytest.raises(MediumError):
                save(files, scene.path(f"{step}.ckpt"), step)
        gate.broken = False
        with pytest.raises(MediumError):
            save(files, scene.path("4.ckpt"), 4)
        assert os.listdir(scene.checkpoints) == ["1.ckpt"]
    assert step_at(scene.path("1.ckpt")) == 1
    assert scene.steps() == [1]


# --- storage hosts ---


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Scene]:
    """Two hosts."""
    with serving(tmp_path / "a") as one, serving(tmp_path / "b") as two:
        yield Scene(tmp_path, url(one), url(two))


def test_ranks_save_to_hosts_in_turn_and_each_pointer_leads_to_its_own(hosts: Scene) -> None:
    for rank in range(3):
        with hosts.training(rank=rank) as files:
            save(files, hosts.path(f"{rank}.ckpt"), rank)
    one, two = hosts.place.hosts
    assert (hosts.steps(one), hosts.steps(two)) == ([0, 2], [1])
    with portus.open(one) as pool:
        assert pool.models() == ["net/rank-0", "net/rank-2"]
    assert [step_at(hosts.path(f"{rank}.ckpt")) for rank in range(3)] == [0, 1, 2]


def test_the_first_rank_lets_go_of_versions_on_the_other_host(hosts: Scene) -> None:
    directory = hosts.path("step-1")
    for rank in range(2):
        with hosts.training(rank=rank) as files:
            save(files, f"{directory}/{rank}.ckpt", rank)
            save(files, hosts.path(f"step-2/{rank}.ckpt"), 10 + rank)
    with hosts.training(rank=0) as files:
        files.remove(directory)
        files.wait()
    one, two = hosts.place.hosts
    assert (hosts.steps(one), hosts.steps(two)) == ([10], [11])
    assert os.listdir(hosts.checkpoints) == ["step-2"]


def test_a_rank_that_replaces_the_pointer_of_another_lets_go_of_what_it_led_to(
    hosts: Scene,
) -> None:
    with hosts.training(rank=1) as files:
        save(files, hosts.path("last.ckpt"), 1)
    with hosts.training(rank=0) as files:
        save(files, hosts.path("last.ckpt"), 2)
    one, two = hosts.place.hosts
    assert (hosts.steps(one), hosts.steps(two)) == ([2], [])


def test_a_busy_name_that_nobody_chose_is_followed_by_the_next_on_a_host(tmp_path: Path) -> None:
    with serving(tmp_path / "host", patience=ClientTimeouts(claim_s=0.1)) as server:
        scene = Scene(tmp_path, url(server))
        with contextlib.closing(HostPool(url(server), "net")):  # another client has the name
            with scene.training(is_named=False) as second:
                save(second, scene.path("2.ckpt"), 2)
                with scene.training(is_named=False) as third:
                    save(third, scene.path("3.ckpt"), 3)
            with pytest.raises(BusyError, match="another model name"), scene.training():
                raise AssertionError("two trainings have one name")
        with portus.open(scene.place) as pool:
            assert {info.step: info.model for info in pool.versions()} == {
                2: "net~2",
                3: "net~3",
            }
        found = portus.read_reference(scene.path("2.ckpt"))
        assert found is not None
        assert found.model == "net~2"
        with scene.training(is_named=False) as again:
            again.remove(scene.path("3.ckpt"))
            again.wait()
            assert scene.steps() == [2], "its pointer lies where it was put, whoever removes it"


def test_a_second_writer_of_this_process_takes_the_next_name_without_asking_the_host(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with serving(tmp_path / "host", patience=ClientTimeouts(claim_s=0.1)) as server:
        scene = Scene(tmp_path, url(server))
        with contextlib.ExitStack() as kept:
            for step in (1, 2, 3):  # a writer for each save, none of which is closed
                files = kept.enter_context(scene.training(is_named=False))
                save(files, scene.path(f"{step}.ckpt"), step)
        with scene.training(is_named=False) as after:
            save(after, scene.path("4.ckpt"), 4)
        with portus.open(scene.place) as pool:
            assert {info.step: info.model for info in pool.versions()} == {
                1: "net",
                2: "net~2",
                3: "net~3",
                4: "net",
            }
    assert "CLAIM refused" not in caplog.text, "each one would have waited"
    warned = [each.getMessage() for each in caplog.records if "already" in each.getMessage()]
    assert [each.partition("now ")[2][:8] for each in warned] == ["'net~2' ", "'net~3' "]


def test_a_host_is_chosen_by_its_address_as_it_was_said(tmp_path: Path) -> None:
    """A pointer that names the host in another way is left alone, and so is its version."""
    with serving(tmp_path / "host") as server:
        scene = Scene(tmp_path, url(server))
        with scene.training() as files:
            save(files, scene.path("1.ckpt"), 1)
        other = portus.Place.parse(f"portus://localhost:{server.listeners[0].port}")
        with scene.training(pool=other) as files:
            save(files, scene.path("1.ckpt"), 2)
        assert stored(scene.path("1.ckpt"))
        assert scene.steps() == [1, 2]
