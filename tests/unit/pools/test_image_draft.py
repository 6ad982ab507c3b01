"""What a pool has of a file are its bytes, all of them, however they came there."""

from __future__ import annotations

import io
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import portus
from portus.engine.files.queue import Errand
from portus.engine.format.checksum import UNIT
from portus.engine.loading.checkpoint_file import verify_file
from portus.errors import CorruptionError, MediumError
from portus.reach.index.directory import open_reader
from portus.reach.training.safetensors import Safetensors
from portus.reach.training.training_files import TrainingFiles
from tests.hosts import serving, url
from tests.same import assert_same
from tests.unit.pools.scene import Scene, allocated, stored, written

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only"),
    pytest.mark.usefixtures("own_saver"),
]


def tied() -> dict[str, Any]:
    """Views, ties, and a layout that is not contiguous."""
    base = torch.arange(60.0)
    return {
        "base": base,
        "view": base[7:11],
        "transposed": base.reshape(6, 10).t(),
        "again": base,
        "in a list": [base[1:], {"deeper": base[:0]}],
    }


STATES: dict[str, Callable[[], Any]] = {
    "tensors": lambda: {"w": torch.arange(3000.0), "step": 7, "name": "net"},
    "values alone": lambda: {"step": 7, "losses": [0.5, float("nan")]},
    "a tensor alone": lambda: torch.arange(9),
    "nothing": dict,
    "empty storages": lambda: {
        "first": torch.zeros(0),
        "between": torch.ones(3),
        "other": torch.zeros((4, 0), dtype=torch.int8),
    },
    "empty storages alone": lambda: [torch.zeros(0), torch.zeros(0)],
    "views and ties": tied,
    "kinds": lambda: {
        "half": torch.ones(33, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "complex": torch.randn(5, dtype=torch.complex64).conj(),
        "array": np.arange(100, dtype=np.int16),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    },
    "a unit to the byte": lambda: {"w": torch.arange(UNIT, dtype=torch.uint8), "b": torch.ones(1)},
    "more than a unit": lambda: {"b": torch.ones(1), "w": torch.arange((UNIT >> 3) + 77)},
}

TENSORS: dict[str, Callable[[], Safetensors]] = {
    "tensors": lambda: Safetensors({"b": torch.arange(70.0), "a": torch.ones(3, 5)}),
    "metadata": lambda: Safetensors({"a": torch.ones(3)}, {"format": "pt"}),
    "an empty one": lambda: Safetensors({"a": torch.ones(3), "b": torch.zeros(0)}),
    "none": lambda: Safetensors({}),
    "more than a unit": lambda: Safetensors({"w": torch.arange((UNIT >> 3) + 77)}),
}


@pytest.fixture(params=["file", "host"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    if request.param == "file":
        yield Scene(tmp_path)
        return
    with serving(tmp_path / "host") as server:
        yield Scene(tmp_path, url(server))


@pytest.mark.parametrize("kind", STATES)
def test_the_bytes_in_a_pool_are_those_of_the_file_that_portus_saves(
    scene: Scene, kind: str
) -> None:
    state = STATES[kind]()
    path = scene.path("last.ckpt")
    with scene.training() as files:
        files.save(state, path, 1).wait()
        assert stored(path) == written(scene.root / "plain", "last.ckpt", state)
    verify_file(path)


@pytest.mark.parametrize("kind", TENSORS)
def test_the_bytes_of_safetensors_in_a_pool_are_those_of_the_file_that_portus_saves(
    scene: Scene, kind: str
) -> None:
    tensors = TENSORS[kind]()
    path = scene.path("model.safetensors")
    with scene.training() as files:
        files.save(tensors, path, 1).wait()
        assert stored(path) == written(scene.root / "plain", "model.safetensors", tensors)
    found = safetensors.torch.load(stored(path))
    assert_same(sorted(found), sorted(tensors.tensors))
    assert all(torch.equal(found[name], tensors.tensors[name]) for name in found)


def test_each_file_of_a_version_has_the_bytes_of_its_own(scene: Scene) -> None:
    shared = torch.arange(5000.0)
    state: dict[str, Any] = {
        "model.safetensors": TENSORS["tensors"](),
        "optimizer.bin": {"exp_avg": shared, "half": shared[:9]},
        "empty.bin": {},
        "scheduler.bin": {"last_epoch": 3},
        "other.safetensors": TENSORS["an empty one"](),
        "storages.bin": STATES["empty storages"](),
    }
    with scene.training() as files:
        files.save_directory(scene.path("step-1"), state, 1).wait()
        for name, each in state.items():
            made = written(scene.root / "plain", name, each)
            assert stored(scene.path(f"step-1/{name}")) == made, name
    assert len(scene.steps()) == 1


def frozen_and_trained(step: int) -> dict[str, Any]:
    """Storages that stay as they are, before and behind one that does not."""
    return {
        "frozen": torch.arange((UNIT >> 3) + 100),
        "trained": torch.full((3000,), float(step)),
        "none": torch.zeros(0),
        "buffer": torch.arange(70_000, dtype=torch.int32),
    }


def test_a_file_whose_storages_moved_to_other_units_has_their_crcs(scene: Scene) -> None:
    """A storage before them has grown, or shrunk, by a unit."""
    path, shared = scene.path("last.ckpt"), []
    with scene.training() as files:
        for step in range(6):
            state = {
                "grows": torch.full((UNIT + 1 if step == 3 else 9,), step, dtype=torch.uint8),
                **{f"{n}": torch.full((70_000,), n) for n in range(4)},
            }
            save = files.save(state, path, step)
            save.wait()
            shared.append(save.stats.shared_bytes)
            with zipfile.ZipFile(io.BytesIO(stored(path))) as archive:
                assert archive.testzip() is None, step
    assert max(shared[3:]) > 70_000


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("restarts", [False, True])
def test_a_file_whose_storages_are_shared_with_another_version_is_whole(
    scene: Scene, restarts: bool
) -> None:
    """The archive has their CRCs, which a process that starts again has to find out."""
    shared, path = [], scene.path("last.ckpt")
    for steps in [range(4), range(4, 6)] if restarts else [range(6)]:
        with scene.training() as files:
            for step in steps:
                handle = files.save(frozen_and_trained(step), path, step)
                handle.wait()
                shared.append(handle.stats.shared_bytes)
                state = frozen_and_trained(step)
                assert stored(path) == written(scene.root / "plain", "last.ckpt", state), step
                with zipfile.ZipFile(io.BytesIO(stored(path))) as archive:
                    assert archive.testzip() is None
    kept = frozen_and_trained(0)
    assert shared[-1] == kept["frozen"].nbytes + kept["buffer"].nbytes
    assert scene.steps() == [5]


def test_files_that_are_shared_in_part_are_each_whole(scene: Scene) -> None:
    def state(step: int) -> dict[str, Any]:
        return {
            "a.bin": frozen_and_trained(step),
            "b.safetensors": Safetensors(frozen_and_trained(step)),
        }

    with scene.training() as files:
        for step in range(4):
            handle = files.save_directory(scene.path("last"), state(step), step)
            handle.wait()
        assert handle.stats.shared_bytes > 2 * UNIT
        for name, each in state(3).items():
            assert stored(scene.path(f"last/{name}")) == written(scene.root / "plain", name, each)


def test_what_two_versions_share_is_there_once(scene: Scene) -> None:
    frozen = torch.arange((UNIT >> 3) + 100)
    with scene.training() as files:
        for step in range(6):
            state = {"frozen": frozen, "step": torch.tensor([step])}
            files.save(state, scene.path(f"{step}.ckpt"), step).wait()
        files.wait()
        assert scene.steps() == list(range(6))
        assert allocated(scene.place) < 3 * frozen.nbytes
        for step in range(5):
            files.remove(scene.path(f"{step}.ckpt"))
        state = {"frozen": frozen, "step": torch.tensor([5])}
        assert stored(scene.path("5.ckpt")) == written(scene.root / "plain", "5.ckpt", state)


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("change", ["fewer files", "longer", "fewer storages", "another name"])
def test_a_version_that_looks_another_way_is_whole(scene: Scene, change: str) -> None:
    first: dict[str, Any] = {"a.bin": frozen_and_trained(1), "b.bin": frozen_and_trained(2)}
    then = {name: dict(state) for name, state in first.items()}
    if change == "fewer files":
        del then["a.bin"]
    elif change == "longer":
        then["a.bin"]["trained"] = torch.ones(9000)
    elif change == "fewer storages":
        del then["a.bin"]["frozen"]
    else:
        then["c.bin"] = then.pop("b.bin")
    with scene.training() as files:
        for step in range(3):
            files.save_directory(scene.path("last"), first, step).wait()
        for step in range(3, 6):
            files.save_directory(scene.path("last"), then, step).wait()
            for name, state in then.items():
                made = written(scene.root / "plain", name, state)
                assert stored(scene.path(f"last/{name}")) == made, (step, name)


class Trained:
    """Weights that an optimizer writes, so that they are copied after the call."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(300, 200)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.step()

    def step(self) -> None:
        for each in self.model.parameters():
            each.grad = torch.ones_like(each)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def test_what_is_copied_in_the_background_is_the_file_of_the_call(scene: Scene) -> None:
    path = scene.path("last.ckpt")
    with scene.training() as files:
        files.open()
        training = Trained()
        for step in range(5):
            training.step()
            expected = written(scene.root / "plain", "last.ckpt", training.state())
            handle = files.save(training.state(), path, step)
            training.step()
            handle.wait()
            assert stored(path) == expected


def wait_for(event: threading.Event) -> None:
    assert event.wait(30)


@pytest.mark.parametrize("is_host", [False, True])
def test_a_save_behind_another_one_in_flight_is_the_state_of_its_call(
    tmp_path: Path, is_host: bool
) -> None:
    """Nothing was stepped between the two, so the second one shares what the first one stored."""
    with ExitStack() as stack:
        host = [url(stack.enter_context(serving(tmp_path / "host")))] if is_host else []
        scene = Scene(tmp_path, *host)
        files = stack.enter_context(scene.training())
        files.open()
        training = Trained()
        for step in range(4):
            training.step()
            go = threading.Event()
            files._open()[0].shared.queue.put(Errand(partial(wait_for, go)))
            first, second = (
                files.save(training.state(), scene.path(f"{each}.ckpt"), 2 * step + each)
                for each in (0, 1)
            )
            go.set()
            first.wait()
            second.wait()
            for each in (0, 1):
                made = written(scene.root / "plain", f"{each}.ckpt", training.state())
                assert stored(scene.path(f"{each}.ckpt")) == made, (step, each)


def test_a_flipped_bit_anywhere_in_a_version_is_found(tmp_path: Path) -> None:
    """Also in the bytes around the storages, which are as many as the storages here."""
    scene = Scene(tmp_path)
    path = scene.path("last.ckpt")
    with scene.training() as files:
        files.save({"w": torch.arange(100.0), "e": torch.zeros(0)}, path, 1).wait()
    size = len(stored(path))
    pool = Path(scene.place.path)
    whole = pool.read_bytes()
    reader = open_reader(str(pool))
    (entry,) = reader.catalogue().entries()
    record = reader.record(entry)
    extents = [
        extent for index in range(len(record.storages)) for extent in record.storage_extents(index)
    ]
    reader.close()
    assert sum(each.length for each in extents) == size
    places = [each.offset + at for each in extents for at in range(each.length)]
    for place in places[::29]:
        damaged = bytearray(whole)
        damaged[place] ^= 1
        pool.write_bytes(damaged)
        with portus.open(pool) as view, pytest.raises(CorruptionError, match=r"step 1 "):
            view.verify(view.versions()[0])
        assert portus.check(pool)
    pool.write_bytes(whole)
    verify_file(path)


@pytest.mark.parametrize("is_host", [False, True])
def test_a_pool_that_is_full_gives_back_what_waits_to_be_removed(
    tmp_path: Path, is_host: bool
) -> None:
    """There is room for two versions, and one more is saved before the oldest has to go."""
    size = 3 << 20

    def state(step: int) -> dict[str, Any]:
        return {"w": torch.full((size >> 2,), float(step))}

    def train(files: TrainingFiles, scene: Scene) -> None:
        for step in range(2):
            files.save(state(step), scene.path(f"{step}.ckpt"), step).wait()
        with pytest.raises(MediumError):
            files.save(state(9), scene.path("9.ckpt"), 9).wait()
        files.wait()
        files.remove(scene.path("0.ckpt"))  # waits: the newest save that was asked for has failed
        assert scene.steps() == [0, 1]
        files.save(state(2), scene.path("2.ckpt"), 2).wait()
        files.wait()
        assert scene.steps() == [1, 2]
        assert not (scene.checkpoints / "0.ckpt").exists()
        assert torch.equal(torch.load(scene.path("2.ckpt"))["w"], state(2)["w"])

    if not is_host:
        scene = Scene(tmp_path)
        with scene.training(max_bytes=9 << 20) as files:
            train(files, scene)
        assert scene.is_sound()
        return
    with serving(tmp_path / "host", quota=9 << 20) as server:
        scene = Scene(tmp_path, url(server))
        with scene.training() as files:
            train(files, scene)


def test_a_pool_that_is_full_fails_the_save_and_harms_no_file(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    path = scene.path("last.ckpt")
    with scene.training(max_bytes=9 << 20) as files:
        files.save({"w": torch.ones(1 << 20)}, path, 1).wait()
        before = (Path(path).read_bytes(), stored(path))
        with pytest.raises(MediumError, match="max_bytes"):
            files.save({"w": torch.ones(4 << 20)}, path, 2).wait()
        assert (Path(path).read_bytes(), stored(path)) == before
        assert scene.steps() == [1]
    assert scene.is_sound()
