"""In the mirror of a storage host are the files of its versions, as anybody would use them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file

import portus
from portus.engine.copying.segments import Stop
from portus.engine.format.checksum import UNIT
from portus.engine.loading.checkpoint_file import verify_file
from portus.errors import CorruptionError, MediumError, TransportError
from portus.reach.index.directory import create_pool, open_reader, open_writer
from portus.reach.index.reader import PoolReader
from portus.reach.media.local import LocalFiles
from portus.reach.mirror.folder import Folder
from portus.reach.mirror.log import SupersededError
from portus.reach.mirror.mirror import Mirror
from portus.reach.mirror.objects import DIGEST_SUFFIX, VERSIONS, Added
from portus.reach.pools import restore
from portus.reach.pools.mirror_versions import load_version
from portus.reach.training.safetensors import Safetensors
from portus.reach.training.training_files import TrainingFiles
from tests.same import assert_same
from tests.unit.mirror.test_mirror import new_pool
from tests.unit.pools.scene import stored

MODEL = "gpt"

QUOTED = "gr=C3=B6=C3=9Fe=20=2B=2Ept"
"""``größe +.pt``: not all stores take every character."""


def state(step: int) -> dict[str, Any]:
    """More than one unit in one storage, and more than one around them."""
    noise = torch.Generator().manual_seed(step)
    return {
        "big": torch.rand(UNIT // 4 + 1000 if step == 1 else 1000, generator=noise),
        "empty": torch.empty(0),
        "same": [torch.zeros(1000), torch.zeros(1000)],
        "small": [torch.rand(n, generator=noise) for n in range(20)],
        "text": f"{step}" * (UNIT + 7 if step == 2 else 10),
        "step": step,
    }


class Scene:
    """A pool with versions of one file and of two, and the files that a directory would have."""

    def __init__(self, root: Path) -> None:
        self.root = root
        checkpoints = root / "ckpt"
        settings = portus.Settings(journal=False, on_error="raise")
        pool = portus.Place.parse(root / "run.portus")
        with contextlib.closing(TrainingFiles(settings, pool=pool)) as files:
            files.begin(MODEL, str(root / ".portus"), str(checkpoints))
            files.save(state(1), str(checkpoints / "step=1.ckpt"), 1).wait()
            files.save(state(2), str(checkpoints / "step=2.ckpt"), 2).wait()
            both = {
                "model.safetensors": Safetensors({"w": state(3)["big"]}, {"format": "pt"}),
                "größe +.pt": {"step": 3},
            }
            files.save_directory(str(checkpoints / "third"), both, 3).wait()
        self.files = {each.name: stored(each) for each in checkpoints.rglob("*") if each.is_file()}
        self.bucket = root / "bucket"
        self.store = Folder(str(self.bucket))
        self.mirror = self.of_mirror()
        self.reader: PoolReader = open_reader(str(root / "run.portus"))

    def of_mirror(self) -> Mirror:
        return Mirror(self.store, MODEL)

    def copy(self) -> list[Added]:
        """Mirror all versions."""
        self.mirror.claim("a test", self.reader.uuid, 0)
        entries = list(self.reader.catalogue().entries())
        return [self.mirror.copy(self.reader, each.info.id, Stop()) for each in entries]

    def objects(self) -> dict[str, Path]:
        """The files of versions in the store, by their names there."""
        below = self.bucket / MODEL / VERSIONS
        return {
            each.name: each
            for each in sorted(below.rglob("*"))
            if each.is_file() and not each.name.endswith(DIGEST_SUFFIX)
        }


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    with contextlib.closing(made.reader):
        yield made


def test_stock_tools_load_what_is_there_without_portus(scene: Scene) -> None:
    scene.copy()
    found = scene.objects()
    assert sorted(found) == [QUOTED, "model.safetensors", "step=1.ckpt", "step=2.ckpt"]
    for step in (1, 2):
        assert_same(torch.load(found[f"step={step}.ckpt"]), state(step))
    assert torch.equal(load_file(found["model.safetensors"])["w"], state(3)["big"])
    assert torch.load(found[QUOTED]) == {"step": 3}
    for path in found.values():
        said = path.with_name(path.name + DIGEST_SUFFIX).read_text()
        assert said == f"{xxhash.xxh3_128_hexdigest(path.read_bytes())}  {path.name}\n"


def test_the_bytes_are_those_of_the_pool_and_of_an_export(scene: Scene) -> None:
    scene.copy()
    found = {name.replace(QUOTED, "größe +.pt"): path for name, path in scene.objects().items()}
    assert {name: path.read_bytes() for name, path in found.items()} == scene.files
    for path in found.values():
        assert verify_file(path) == path.stat().st_size


def test_a_fresh_pool_gets_all_of_it(scene: Scene) -> None:
    writer = new_pool()
    for added in scene.copy():
        scene.of_mirror().fetch(added, writer)
    assert portus.check(writer) == []
    first, second, third = writer.catalogue().entries()
    assert_same(restore.load(writer, first), state(1))
    assert_same(restore.load(writer, second), state(2))
    both: Any = restore.load(writer, third)
    assert both["größe +.pt"] == {"step": 3}
    writer.close()


def damages(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    middle = len(data) // 2

    def flip(at: int) -> None:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])

    return {
        "its first byte": lambda: flip(0),
        "its middle": lambda: flip(middle),
        "its last byte": lambda: flip(len(data) - 1),
        "cut": lambda: path.write_bytes(data[:-1]),
        "longer": lambda: path.write_bytes(data + b"x"),
        "gone": path.unlink,
    }


@pytest.mark.parametrize(
    "name", ["step=1.ckpt", "model.safetensors", f"step=1.ckpt{DIGEST_SUFFIX}"]
)
def test_whatever_happens_to_a_file_is_found_and_mended_and_nothing_else_is_sent(
    scene: Scene, name: str
) -> None:
    versions = scene.copy()
    path = scene.objects()[name.removesuffix(DIGEST_SUFFIX)]
    path = path.with_name(name)
    whole = {each: each.read_bytes() for each in scene.bucket.rglob("*") if each.is_file()}
    for what, damage in damages(path).items():
        damage()
        hurt = [each for each in versions if scene.mirror.find_damage(each, lambda _: None)]
        [added] = hurt
        with pytest.raises(CorruptionError, match=str(path.name).removesuffix(DIGEST_SUFFIX)):
            scene.of_mirror().check(added, lambda _: None)
        if what in ("cut", "longer", "gone"):  # a list shows it
            [(lost, names)] = scene.mirror.suspects()
            assert (lost, len(names)) == (added, 1), what
        entries = scene.reader.catalogue().entries()
        number = next(each.info.id for each in entries if each.info.token == added.token)
        names = [*scene.mirror.find_damage(added, lambda _: None)]
        assert len(names) == 1
        scene.mirror.mend(added, names, scene.reader, number, Stop())
        versions = [*scene.mirror.read().added]
        assert not any(scene.mirror.find_damage(each, lambda _: None) for each in versions), what
        assert {each: each.read_bytes() for each in whole} == whole


def test_what_is_removed_goes_with_its_files(scene: Scene) -> None:
    first, second, third = scene.copy()
    assert len(scene.objects()) == 4
    scene.mirror.remove([first.token, third.token])
    assert [*scene.objects()] == ["step=2.ckpt"]
    assert not scene.mirror.find_damage(second, lambda _: None)


def test_a_file_that_arrived_is_not_sent_again_after_a_failure(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    stream = Folder.put_stream

    def put_stream(store: Folder, name: str, parts: Any, size: int, **rest: str) -> None:
        if name.endswith(QUOTED) and not is_up:
            raise TransportError("the store does not answer")
        stream(store, name, parts, size, **rest)
        if VERSIONS in name and not name.endswith(DIGEST_SUFFIX):
            sent.append(os.path.basename(name))

    is_up = False
    monkeypatch.setattr(Folder, "put_stream", put_stream)
    monkeypatch.setattr("portus.reach.mirror.model_objects.ABREAST", 1)
    scene.mirror.claim("a test", scene.reader.uuid, 0)
    third = [*scene.reader.catalogue().entries()][2].info.id
    for _ in range(3):
        with contextlib.suppress(TransportError):
            scene.mirror.copy(scene.reader, third, Stop())
    is_up = True
    scene.mirror.copy(scene.reader, third, Stop())
    assert sent.count("model.safetensors") == 1


def test_a_version_that_is_damaged_in_the_pool_is_not_mirrored(scene: Scene) -> None:
    entry = next(iter(scene.reader.catalogue().entries()))
    record = scene.reader.record(entry)
    [extent, *_] = record.storage_extents(0)
    scene.reader.close()
    pool = scene.root / "run.portus"
    data = bytearray(pool.read_bytes())
    data[extent.offset] ^= 1
    pool.write_bytes(data)
    scene.reader = open_reader(str(pool))
    scene.mirror.claim("a test", scene.reader.uuid, 0)
    with pytest.raises(CorruptionError, match="it is not mirrored"):
        scene.mirror.copy(scene.reader, entry.info.id, Stop())
    assert scene.objects() == {}
    assert scene.mirror.read().added == ()


def test_a_bucket_that_lost_all_of_a_version_is_filled_again(scene: Scene) -> None:
    first, *_ = scene.copy()
    shutil.rmtree(scene.bucket / MODEL / VERSIONS)
    [(_, names), _, _] = scene.mirror.suspects()
    number = next(each.info.id for each in scene.reader.catalogue().entries())
    with pytest.raises(MediumError):
        scene.mirror.mend(first, names, scene.reader, number, Stop())
    scene.mirror.mend(first, names, scene.reader, number, Stop())
    assert_same(torch.load(scene.objects()["step=1.ckpt"]), state(1))


@pytest.mark.long
def test_of_many_bytes_around_storages_a_few_units_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda number: None)
    monkeypatch.setattr("portus.reach.versions.take_files.ABREAST", 2)
    monkeypatch.setattr("portus.reach.versions.open_version._KEPT", 1)
    count = 8
    with portus.PoolCheckpointer(tmp_path / "run.portus", MODEL) as saver:
        text = random.Random(1).randbytes(UNIT).hex() * (count // 2)
        saver.save({"w": torch.rand(1000), "text": text}, 1).wait()
    mirror = Mirror(Folder(str(tmp_path / "bucket")), MODEL)
    mirror.claim("a test", bytes(16), 0)
    create_pool(str(tmp_path / "fresh.portus"), LocalFiles())
    with (
        contextlib.closing(open_reader(str(tmp_path / "run.portus"))) as reader,
        contextlib.closing(open_writer(str(tmp_path / "fresh.portus"), LocalFiles())) as writer,
    ):
        [entry] = reader.catalogue().entries()
        with peak() as copying:
            added = mirror.copy(reader, entry.info.id, Stop())
        with peak() as fetching:
            mirror.fetch(added, writer)
        [there] = writer.catalogue().entries()
        assert restore.load(writer, there)["text"] == text  # type: ignore[index]
    assert max(*copying, *fetching) < (count - 1) * UNIT


@contextlib.contextmanager
def peak() -> Iterator[list[int]]:
    """Yield a list that gets the most bytes of memory that were allocated at once."""
    found: list[int] = []
    tracemalloc.start()
    try:
        yield found
        found.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def test_a_file_that_is_called_as_what_is_beside_another_has_an_object_of_its_own(
    tmp_path: Path,
) -> None:
    states = {f"a.pt{more}": {"of": more} for more in ("", DIGEST_SUFFIX)}
    pool = portus.Place.parse(tmp_path / "run.portus")
    settings = portus.Settings(journal=False, on_error="raise")
    with contextlib.closing(TrainingFiles(settings, pool=pool)) as files:
        files.begin(MODEL, str(tmp_path / ".portus"), str(tmp_path / "ckpt"))
        files.save_directory(str(tmp_path / "ckpt" / "both"), states, 1).wait()
    mirror = Mirror(Folder(str(tmp_path / "bucket")), MODEL)
    mirror.claim("a test", bytes(16), 0)
    with contextlib.closing(open_reader(str(tmp_path / "run.portus"))) as reader:
        [entry] = reader.catalogue().entries()
        added = mirror.copy(reader, entry.info.id, Stop())
    assert mirror.find_damage(added, lambda _: None) == {}
    assert_same(load_version(mirror, added), states)


def test_a_sweep_that_begins_again_after_it_was_given_up_deletes_nothing_of_who_took_over(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first entry is there, and is not taken for the second one."""
    [first, second, *_] = list(scene.reader.catalogue().entries())
    scene.mirror.claim("who is superseded", scene.reader.uuid, 0)
    scene.mirror.copy(scene.reader, first.info.id, Stop())
    monkeypatch.setattr("portus.reach.mirror.writer.GRACE_S", -10.0)
    left = scene.bucket / MODEL / VERSIONS / "step-00000009" / "a.ckpt"
    left.parent.mkdir()
    left.write_bytes(b"a part")
    create = scene.store.create

    def lose_answer(name: str, data: bytes) -> bool:
        create(name, data)
        raise TransportError("no answer")

    with monkeypatch.context() as cut:
        cut.setattr(scene.store, "create", lose_answer)
        with pytest.raises(TransportError):
            scene.mirror.sweep()
    other = scene.of_mirror()
    other.claim("who took over", scene.reader.uuid, 0)
    added = other.copy(scene.reader, second.info.id, Stop())
    with pytest.raises(SupersededError):
        scene.mirror.sweep()
    assert other.find_damage(added, lambda _: None) == {}
