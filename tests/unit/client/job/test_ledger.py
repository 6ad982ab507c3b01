"""What became of a save is told to the training, shown to other processes, and kept for good."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from portus.client.files.home import FileHome
from portus.client.files.opened import RunPool
from portus.client.job.ledger import Ledger
from portus.client.job.settings import Settings
from portus.errors import MediumError
from portus.index.directory import open_reader
from portus.index.journals import journals_in, read
from portus.index.messages import read_failure
from portus.index.place import Place
from portus.journal.lines import Failed
from portus.pipeline.handle import RefusedSave, SaveStats
from portus.pipeline.queue import Queue


class Scene:
    """A ledger of a run whose pool is open."""

    def __init__(self, root: Path, settings: Settings) -> None:
        self.path = root / "m.portus"
        self.home = FileHome(Place.named(self.path), "m", None)
        self.pool = RunPool(self.home, "m", None, None, lambda: None)
        self.pool.open_or_create()
        self.queue = Queue("ledger")
        self.ledger = Ledger(self.pool, self.queue, settings)

    def fails(self) -> MediumError:
        error = MediumError(28, "no space")
        self.ledger.failed(RefusedSave(error, SaveStats()), 7)
        self.queue.drain()
        return error

    def shown(self) -> str:
        """What another process finds."""
        with contextlib.closing(open_reader(str(self.path))) as pool:
            return read_failure(pool.medium)

    def kept(self) -> list[Failed]:
        lines = [line for path in journals_in(self.home.journal()) for line in read(path).lines]
        return [line for line in lines if isinstance(line, Failed)]

    def close(self) -> None:
        self.queue.close()
        self.ledger.close()
        self.home.close(made=True)


@pytest.fixture
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scene]:
    made = Scene(tmp_path, getattr(request, "param", Settings()))
    yield made
    made.close()


def test_a_failed_save_is_told_once_shown_and_kept(scene: Scene) -> None:
    error = scene.fails()
    with pytest.raises(MediumError) as caught:
        scene.ledger.tell()
    assert caught.value is error
    scene.ledger.tell()
    assert scene.shown().startswith("m@7 at ")
    assert scene.shown().endswith("no space")
    [line] = scene.kept()
    assert (line.step, line.why) == (7, "[Errno 28] no space")


@pytest.mark.parametrize("scene", [Settings(journal=False)], indirect=True)
def test_a_run_without_a_journal_still_shows_its_failures(scene: Scene) -> None:
    scene.fails()
    scene.ledger.asked(bytes(16), 8)
    assert "no space" in scene.shown()
    assert not Path(scene.home.journal()).exists()
    with pytest.raises(MediumError):
        scene.ledger.tell()


@pytest.mark.parametrize("is_heard_of", [False, True])
def test_a_save_raises_a_failure_unless_all_ranks_hear_of_it(
    scene: Scene, is_heard_of: bool
) -> None:
    scene.fails()
    with contextlib.nullcontext() if is_heard_of else pytest.raises(MediumError):
        scene.ledger.tell(is_save=True, is_heard_of=is_heard_of)
    with pytest.raises(MediumError) if is_heard_of else contextlib.nullcontext():
        scene.ledger.tell()


def test_a_failure_that_nobody_may_write_down_is_told_all_the_same(scene: Scene) -> None:
    scene.path.unlink()
    scene.fails()
    with pytest.raises(MediumError):
        scene.ledger.tell()


def test_who_asks_for_the_place_of_a_journal_does_not_hold_the_pool(tmp_path: Path) -> None:
    home = FileHome(Place.named(tmp_path / "m.portus"), "m", None)
    pool, queue = RunPool(home, "m", None, None, lambda: None), Queue("ledger")
    ledger = Ledger(pool, queue, Settings())
    ledger.count_steps()
    journal, known = ledger.journal, weakref.ref(pool)
    assert journal is not None
    del ledger, pool
    assert known() is None
    journal.close()
