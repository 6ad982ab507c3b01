"""Saves to paths on other file systems, and on full ones."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import portus
from portus.engine.directory.publisher import Publisher
from portus.engine.paths import process
from portus.engine.paths.process import load, save
from portus.engine.paths.saver import FileSaver
from portus.engine.pipeline.request import SaveRequest
from portus.errors import MediumError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only")

KINDS = ("tmpfs", "overlay", "ext2", "ext4", "xfs", "xfs with reflink", "btrfs")
SIZE = 700_000
"""Numbers of a state: 2.7 MiB, of a disk of 16."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(process, "_savers", [])
    monkeypatch.setattr(process, "_writers", [])
    yield
    process._finish()


def check(path: Path, step: int) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    found = load(path)
    assert found["step"] == step
    assert (found["w"] == step).all()


def state(step: int) -> dict[str, object]:
    return {"w": torch.full((SIZE,), float(step)), "step": step}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_system_has_fresh_files_and_spares(
    mount: Callable[[str], Path], kind: str
) -> None:
    place = mount(kind)
    for step in range(4):
        save(state(step), place / f"{step % 2}.pt")
        save(state(step), place / "last.pt").wait()
        check(place / "last.pt", step)
        check(place / f"{step % 2}.pt", step)
    process._finish()
    assert sorted(set(os.listdir(place)) - {"lost+found"}) == ["0.pt", "1.pt", "last.pt"]


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk_fails_saves_and_harms_no_file(mount: Callable[[str], Path], kind: str) -> None:
    place = mount(kind)
    committed: list[int] = []
    failed: list[MediumError] = []
    for step in range(12):
        try:
            save(state(step), place / f"{step}.pt").wait()
        except MediumError as error:
            failed.append(error)
        else:
            committed.append(step)
        for each in committed:
            check(place / f"{each}.pt", each)
    assert 3 <= len(committed) < 8
    assert {error.errno for error in failed} == {errno.ENOSPC}
    assert all(str(place) in str(error) for error in failed)
    visible = sorted(set(os.listdir(place)) - {"lost+found", ".portus"})
    assert visible == sorted(f"{each}.pt" for each in committed)
    os.remove(place / f"{committed[0]}.pt")
    save(state(50), place / "50.pt").wait()
    check(place / "50.pt", 50)
    process._finish()
    assert not (place / ".portus").exists()


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_one_path_is_saved_to_for_ever_on_a_disk_that_has_room_for_two(
    mount: Callable[[str], Path], kind: str
) -> None:
    """The file, the one in flight, and the spare would be three: the spare goes."""
    place = mount(kind)
    with open(place / "ballast", "wb") as ballast:
        ballast.write(bytes(7 << 20))
    for step in range(8):
        save(state(step), place / "last.pt").join()
        if (place / "last.pt").exists():
            found = load(place / "last.pt")
            assert (found["w"] == found["step"]).all()
    assert load(place / "last.pt")["step"] >= 6


@pytest.mark.parametrize(
    ("keep", "mib", "losses", "left"),
    [
        (2, 6, (0.0,) * 6, [4, 5]),  # the disk has room for two
        (3, 4, (0.0,) * 6, [3, 4, 5]),
        (1, 9, (0.0,) * 3, [0]),  # room for one: the only one stays
        (None, 6, (0.0,) * 4, [0, 1]),
        (portus.Keep(last=1, best=("loss", "min", 1)), 6, (0.9, 0.1, 0.5), [1, 2]),
        # What the rule would remove is the newest one that is there.
        (portus.Keep(last=1, best=("loss", "min", 1)), 6, (0.1, 0.9, 0.5), [0, 1]),
    ],
)
def test_on_a_full_disk_what_keep_removes_goes_first_while_a_newer_one_remains(
    mount: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    keep: int | portus.Keep | None,
    mib: int,
    losses: tuple[float, ...],
    left: list[int],
) -> None:
    place, remove, remaining = mount("tmpfs") / "run", FileSaver.remove, []

    def watch(own: FileSaver, path: str) -> None:
        remove(own, path)
        remaining.append((path, sorted(set(os.listdir(place)) - {".portus"})))

    monkeypatch.setattr(FileSaver, "remove", watch)
    with portus.Checkpointer(place, keep=keep, journal=False, on_error="warn") as run:
        made = []
        for step, loss in enumerate(losses):
            numbers = {"w": torch.full((mib << 18,), float(step)), "step": step}
            made.append(run.save(numbers, step, metrics={"loss": loss}))
            made[-1].join()
        assert run.steps() == left
    assert all(names and max(names) > os.path.basename(path) for path, names in remaining)
    for step in left:
        check(place / f"step-{step:08}.pt", step)
    assert [each.committed for each in made] == [step <= left[-1] for step in range(len(losses))]
    for each in made[left[-1] + 1 :]:
        with pytest.raises(MediumError, match="No space left on device"):
            each.wait()


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.parametrize(("keep", "mib"), [(1, 6), (2, 4), (3, 3)])
def test_saves_that_wait_for_each_other_all_fit_where_there_is_room_for_one_more_than_stay(
    mount: Callable[[str], Path], kind: str, keep: int, mib: int
) -> None:
    """What is queued holds what was removed meanwhile, but not its space."""
    place = mount(kind) / "run"
    with portus.Checkpointer(place, keep=keep, journal=False, on_error="warn") as run:
        made = [
            run.save({"w": torch.full((mib << 18,), float(step)), "step": step}, step)
            for step in range(8)
        ]
        for each in made:
            each.wait()
        assert run.steps() == list(range(8 - keep, 8))
    for step in range(8 - keep, 8):
        check(place / f"step-{step:08}.pt", step)
    assert len(os.listdir(place)) == keep


def test_space_that_another_thread_frees_meanwhile_is_used(
    mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a removal after the commit of the save before."""
    place = mount("tmpfs")
    filler = place / "filler"
    filler.write_bytes(bytes(14 << 20))

    def freed_by_another(self: Publisher, request: SaveRequest) -> bool:
        filler.unlink()
        return False

    monkeypatch.setattr(Publisher, "make_room", freed_by_another)
    portus.save({"w": torch.full((4 << 18,), 1.0), "step": 1}, place / "a.pt").wait()
    assert not filler.exists()
    check(place / "a.pt", 1)


@pytest.mark.parametrize("path", [".portus", ".portus/a.pt", "below/.portus/more/a.pt"])
@pytest.mark.parametrize("is_there", [False, True])
def test_nothing_is_saved_into_the_folder_of_portus(
    tmp_path: Path, path: str, is_there: bool
) -> None:
    place = tmp_path / path
    if is_there:
        (place.parent if place.suffix else place).mkdir(parents=True, exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    with contextlib.closing(portus.TrainingFiles(portus.Settings(journal=False))) as files:
        for refused in (
            lambda: save(state(1), place),
            lambda: files.save(state(1), str(place), 1),
            lambda: files.save_directory(str(place), {"a.pt": state(1)}, 1),
            lambda: portus.Checkpointer(f"{place}/run"),
        ):
            with pytest.raises(portus.UsageError, match=r"\.portus is the folder of Portus"):
                refused()
            assert sorted(tmp_path.rglob("*")) == before
