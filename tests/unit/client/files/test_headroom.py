"""There is space for the versions to come before they come, and a lack of it is told early."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from portus.client.fence.snapshot import SnapshotMode, Snapshots
from portus.client.files.headroom import Headroom
from portus.client.files.home import FileHome
from portus.client.files.opened import RunPool
from portus.errors import MediumError, UsageError
from portus.index.keep import Keep
from portus.index.place import Place
from portus.pipeline.plan import Before, Snapshot
from portus.pipeline.queue import Queue

MIB = 1 << 20
ROOM = 16 * MIB
"""The largest size of the pools here."""


class Scene:
    """A pool that is not there yet, and keeps two versions."""

    def __init__(self, root: Path) -> None:
        self.path = root / "m.portus"
        self.home = FileHome(Place.named(self.path), "m", ROOM)
        self.pool = RunPool(self.home, "m", Keep(last=2), None, lambda: None)
        self.queue = Queue("headroom")
        self.headroom = Headroom(self.pool, self.queue)

    def close(self) -> None:
        self.queue.close()
        if self.pool.writer is not None:
            self.home.close(made=self.pool.created)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.close()


def snapshot(size: int) -> Snapshot:
    taking = Snapshots("m", SnapshotMode.SYNC)
    flat = taking.flatten({"w": torch.zeros(size, dtype=torch.uint8)})
    return taking.take(flat, 1, synchronous=True, unchanged=False, token=None, metrics={})


def test_versions_that_do_not_fit_are_refused_with_how_much_they_need(scene: Scene) -> None:
    writer, _ = scene.pool.open_or_create()
    with pytest.raises(MediumError, match=rf"{scene.path}.* has {8 * MIB} bytes.* for 3 more") as e:
        scene.headroom.check(writer, snapshot(8 * MIB))
    assert e.value.errno == errno.ENOSPC


def test_there_is_room_for_the_versions_kept_and_one_more(scene: Scene) -> None:
    writer, _ = scene.pool.open_or_create()
    scene.headroom.check(writer, snapshot(2 * MIB))
    assert 6 * MIB <= scene.path.stat().st_size <= ROOM


def test_room_for_a_layout_that_was_saved_before_is_not_made_again(scene: Scene) -> None:
    writer, _ = scene.pool.open_or_create()
    made = snapshot(8 * MIB)
    scene.pool.before = Before(None, made.layout, b"")  # type: ignore[arg-type]
    scene.headroom.check(writer, made)


def test_what_was_prepared_is_there_before_the_first_save(scene: Scene) -> None:
    scene.headroom.prepare(2 * MIB)
    assert scene.path.is_file()
    scene.queue.drain()
    assert scene.path.stat().st_size >= 6 * MIB


def test_a_pool_that_was_prepared_in_vain_goes_away(scene: Scene) -> None:
    scene.headroom.prepare(0)
    scene.close()
    assert not scene.path.exists()


def test_a_pool_that_was_there_stays_although_it_was_prepared(scene: Scene) -> None:
    scene.home.create()
    scene.headroom.prepare(0)
    scene.close()
    assert scene.path.exists()


def test_a_preparation_that_finds_no_space_is_a_warning(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.headroom.prepare(8 * MIB)
    scene.queue.drain()
    [warning] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert warning.getMessage().startswith(f"{scene.path}: the next save may not fit: ")


def test_nothing_is_prepared_for_a_run_that_is_over(scene: Scene) -> None:
    scene.pool.closed = True
    with pytest.raises(UsageError, match="closed"):
        scene.headroom.prepare(0)
    assert not scene.path.exists()
