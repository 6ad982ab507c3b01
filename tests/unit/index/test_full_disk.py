"""A run beside others who take all the space there is: what the pool can do without goes first."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import portus
from portus.engine.media.base import MappedMedium
from portus.engine.spec import PAGE, Extent
from portus.errors import MediumError
from portus.reach.index.directory import WRITERS, create_pool, on_disk
from portus.reach.index.pool import PoolWriter
from portus.reach.media.local import LocalFiles
from tests.moments import at
from tests.unit.cli.scene import portus as command
from tests.unit.cli.scene import portus_json
from tests.unit.conftest import Mount
from tests.unit.index.engine import save, stored

MIB = 1 << 20


@pytest.fixture(params=["tmpfs", "ext4"])
def small(request: pytest.FixtureRequest, mount: Mount) -> Path:
    """A file system of ``SMALL_BYTES``."""
    return mount(request.param)


def fill(directory: Path) -> None:
    """Another user takes all that is free there."""
    with open(directory / "other", "ab", buffering=0) as file, suppress(OSError):
        for size in (MIB, PAGE, 1):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass


def state(step: int, size: int = MIB) -> dict[str, object]:
    return {"step": step, "w": torch.full((size // 4,), float(step))}


def step_of(path: Path) -> int:
    loaded = torch.load(path)
    assert bool((loaded["w"] == loaded["step"]).all())
    return int(loaded["step"])


def opened(path: Path, *, mapped: bool = True) -> PoolWriter:
    create_pool(str(path), LocalFiles())
    return WRITERS.open(str(path), mapped=mapped)


def test_a_run_goes_on_beside_others_who_take_all_space(small: Path, tmp_path: Path) -> None:
    """The pool has room for what is saved; pointers need some too, and are on another disk."""
    run = tmp_path / "run"
    pool = portus.Place.parse(small / "run.portus")
    files = portus.TrainingFiles(portus.Settings(on_error="raise", journal=False), pool=pool)
    files.begin("net", str(run / ".portus"), str(run))
    for step in range(12):
        if step >= 3:
            files.wait()
            fill(small)
        files.save(state(step), str(run / f"{step}.ckpt"), step).wait()
        if step >= 1:
            files.remove(str(run / f"{step - 1}.ckpt"))
    files.wait()
    assert step_of(run / "11.ckpt") == 11
    files.close()
    assert not portus.check(pool)


@pytest.mark.parametrize("mapped", [True, False])
def test_space_that_was_given_back_is_taken_again_while_the_pool_is_open(
    tmp_path: Path, mapped: bool
) -> None:
    path = tmp_path / "a.portus"
    pool = opened(path, mapped=mapped)
    try:
        first = save(pool, [bytes([1]) * MIB])
        second = save(pool, [bytes([2]) * MIB], retire=[first.info.id])
        before = on_disk(str(path))
        freed = pool.give_back()
        assert freed == before - on_disk(str(path)) >= MIB
        left, size = pool.free_bytes(), pool.medium.size
        assert left < MIB
        room = pool.reserve(MIB)
        assert on_disk(str(path)) >= before - freed + MIB - left
        if mapped:
            assert isinstance(pool.medium, MappedMedium)
        pool.release(room)
        third = save(pool, [bytes([3]) * MIB])
        assert pool.medium.size == size, "it grew within"
        assert stored(pool, second) + stored(pool, third) == [bytes([n]) * MIB for n in (2, 3)]
    finally:
        WRITERS.close(pool)
    assert not portus.check(path)


def test_space_that_others_took_meanwhile_is_an_error_and_no_signal(small: Path) -> None:
    pool = opened(small / "a.portus")
    try:
        first = save(pool, [bytes([1]) * MIB])
        second = save(pool, [bytes([2]) * MIB], retire=[first.info.id])
        pool.give_back()
        fill(small)
        with pytest.raises(MediumError) as caught:
            pool.reserve(MIB)
        assert caught.value.errno == errno.ENOSPC
        assert stored(pool, second) == [bytes([2]) * MIB]
        pool.retire([second.info.id])  # there is room for that, or nothing would ever help
        (small / "other").unlink()
        third = save(pool, [bytes([3]) * MIB])
        assert stored(pool, third) == [bytes([3]) * MIB]
    finally:
        WRITERS.close(pool)


def test_free_space_in_small_pieces_becomes_room_for_records(small: Path) -> None:
    pool = opened(small / "a.portus")
    try:
        pool.release(pool.reserve(MIB))
        fill(small)
        with suppress(MediumError):
            while True:
                pool.reserve(PAGE)
        held = pool._space._held
        pieces = [held[index] for index in range(0, len(held), 2)]
        for first, after in (tuple(runs[0].tolist()) for runs in pieces):
            pool.release([Extent(first * PAGE, (after - first) * PAGE)])
        [room] = pool.reserve(3 * PAGE, contiguous=True)
        pool.medium.store(room.offset, bytes([7]) * room.length)
        assert room.length == 3 * PAGE
    finally:
        WRITERS.close(pool)


@pytest.fixture
def ended(small: Path) -> Path:
    """A pool with two versions of a run that ended; then another user took all space."""
    path = small / ".portus" / "run.portus"
    with portus.PoolCheckpointer(path, "run", keep=2) as checkpointer:
        for step in range(4):
            checkpointer.save(state(step), step).wait()
    fill(small)
    return path


def test_a_full_disk_gets_space_back_from_a_pool_that_gave_all_that_it_could(
    ended: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ended.parent.parent)
    before = on_disk(str(ended))
    assert command("gc").code == 0
    assert on_disk(str(ended)) <= before
    said = command("rm", "run@2", "--force")
    assert said.code == 0, said.err
    assert on_disk(str(ended)) <= before - MIB
    (pool,) = portus_json("ls")["pools"]
    assert [each["step"] for each in pool["models"][0]["versions"]] == [3]
    assert command("verify").code == 0


def test_tidying_takes_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is mapped must have all of its blocks, so these do not map it."""
    monkeypatch.chdir(tmp_path)
    path = str(tmp_path / ".portus" / "run.portus")
    with portus.PoolCheckpointer(path, model="run", keep=4) as checkpointer:
        for step in range(8):
            checkpointer.save(state(step), step).wait()
    before = on_disk(path)
    meanwhile: list[int] = []
    assert before < os.stat(path).st_size - MIB
    for arguments in (["gc"], ["rm", "run@4"], ["gc"], ["rm", "run", "--keep", "1"], ["gc"]):
        with at("return", PoolWriter.__init__, lambda: meanwhile.append(on_disk(path))):
            assert command(*arguments).code == 0
        assert meanwhile[-1] <= before
        assert on_disk(path) <= before
        before = on_disk(path)
    assert before < 2 * MIB
    assert command("verify").code == 0
