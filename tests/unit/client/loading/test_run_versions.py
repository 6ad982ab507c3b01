"""The versions of a run are found while it saves, and the run is found by who loads (V11)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from portus.client.loading.resolve import POOLS
from portus.client.pool_checkpointer import PoolCheckpointer
from portus.errors import StaleError, UsageError
from portus.index.reader import PoolReader
from portus.index.records import VersionEntry
from portus.media import calls
from portus.pipeline.queue import Chore


class Pause(Chore):
    """Holds up the worker until it is told to go on."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def run(self) -> None:
        assert self.over.wait(60)


class Loading(Chore):
    """Waits on the worker for what is in flight, which it is itself."""

    def __init__(self, run: PoolCheckpointer) -> None:
        self.run_of = run
        self.waited: bool | None = None

    def run(self) -> None:
        self.waited = self.run_of._versions.await_saves(None, bytes(16))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[PoolCheckpointer]:
    with PoolCheckpointer(tmp_path / "m.portus", "m", journal=False) as made:
        yield made


def hold(run: PoolCheckpointer) -> Pause:
    """What is saved from now on is committed once the pause is over, which is soon."""
    pause = Pause()
    run._queue.put(pause)
    threading.Timer(0.2, pause.over.set).start()
    return pause


def test_before_the_first_save_there_is_nothing_and_no_pool_is_made(
    run: PoolCheckpointer, tmp_path: Path
) -> None:
    versions = run._versions
    assert (versions.infos(), versions.uuid) == ([], b"")
    with pytest.raises(UsageError, match=r"m\.portus: there is no pool yet; nothing was saved"):
        versions.load(None, None)
    with pytest.raises(UsageError, match="nothing was saved"):
        versions.load_version(bytes(16))
    assert list(tmp_path.iterdir()) == []


def test_what_another_one_saved_before_the_first_save_is_listed_and_not_begun_anew(
    run: PoolCheckpointer, tmp_path: Path
) -> None:
    assert run.steps() == []
    with PoolCheckpointer(tmp_path / "m.portus", "m", journal=False) as other:
        other.save({"step": 7}, 7).wait()
    assert run.steps() == [7]
    assert run.load() == {"step": 7}


def test_a_load_waits_for_the_save_in_flight(run: PoolCheckpointer) -> None:
    run.save({"step": 1}, 1).wait()
    hold(run)
    run.save({"step": 2}, 2)
    assert run._versions.load(None, None) == {"step": 2}


def test_a_version_that_is_there_is_used_at_once_and_one_in_flight_is_waited_for(
    run: PoolCheckpointer,
) -> None:
    first = run.save({"step": 1}, 1).wait()
    pause = hold(run)
    token = b"t" * 16
    run.save({"step": 2}, 2, token=token)
    assert run._versions.load_version(first.token) == {"step": 1}
    assert not pause.over.is_set()
    assert run._versions.load_version(token, "step") == 2


def test_a_version_that_nobody_saved_is_stale_and_named_with_the_pool(
    run: PoolCheckpointer,
) -> None:
    run.save({"step": 1}, 1).wait()

    def use(_: PoolReader, entry: VersionEntry) -> None:
        raise AssertionError(entry)

    with pytest.raises(StaleError, match=rf"version {'78' * 16} .*m\.portus"):
        run._versions.use_version(b"x" * 16, use)


def test_the_worker_waits_for_no_save(run: PoolCheckpointer) -> None:
    loading = Loading(run)
    run._queue.put(loading)
    run._queue.drain(60)
    assert loading.waited is False


def test_awaiting_saves_tells_whether_there_were_any(run: PoolCheckpointer) -> None:
    assert run._versions.await_saves(None, bytes(16)) is False
    hold(run)
    run.save({"step": 1}, 1)
    assert run._versions.await_saves(None, bytes(16)) is True
    assert run.steps() == [1]


def test_a_run_is_found_and_held_while_its_pool_is_open(tmp_path: Path) -> None:
    run = PoolCheckpointer(tmp_path / "m.portus", "m")
    run.save({"step": 1}, 1).wait()
    versions, known = run._versions, weakref.ref(run)
    assert POOLS.open_ones()[0] is versions
    del run
    assert POOLS.open_ones()[0] is versions
    held = known()
    assert held is not None, "who would finish its saves?"
    held.close()
    assert versions not in POOLS.open_ones()
    del held
    assert known() is None


def test_a_run_without_a_pool_is_held_by_nobody(tmp_path: Path) -> None:
    run = PoolCheckpointer(tmp_path / "m.portus", "m")
    known, pool = weakref.ref(run), run._pool
    del run
    assert known() is None
    assert pool.closed


@calls.marked
def within_a_call(run: PoolCheckpointer) -> tuple[object, list[int]]:
    """What a signal handler finds that interrupts a call of ours here."""
    return run._versions.load(None, None), [info.step for info in run._versions.infos()]


def test_within_another_call_what_is_committed_is_found_without_waiting(
    run: PoolCheckpointer,
) -> None:
    run.save({"step": 1}, 1).wait()
    pause = Pause()
    run._queue.put(pause)
    run.save({"step": 2}, 2)
    assert within_a_call(run) == ({"step": 1}, [1])
    pause.over.set()
    assert run.load() == {"step": 2}


def test_nothing_is_found_any_more_once_the_run_is_over(run: PoolCheckpointer) -> None:
    info = run.save({"step": 1}, 1).wait()
    run.close()
    with pytest.raises(UsageError, match="this Checkpointer is closed"):
        run._versions.load(None, None)
    with pytest.raises(UsageError, match="this Checkpointer is closed"):
        run._versions.load_version(info.token)
    with pytest.raises(UsageError, match="this Checkpointer is closed"):
        run._versions.infos()
