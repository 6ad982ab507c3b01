"""Waiting for the files of other ranks."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import pytest

from portus.errors import AbandonedError
from portus.reach.dcp.rank_files import _Gate
from portus.reach.shards import arrival
from portus.reach.shards.arrival import await_files

WAIT_S_MAX = 30.0
SAVE, OTHER = 1, 2


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may be overdue for longer than any test takes."""
    monkeypatch.setattr(arrival, "GONE_S", 600.0)
    monkeypatch.setattr(arrival, "GONE_HERE_S", 600.0)


class Waiting:
    """A rank that waits, on a thread as the worker's."""

    def __init__(self, gate: _Gate) -> None:
        self.error: AbandonedError | None = None
        self._gate = gate
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._gate.ready()
        except AbandonedError as error:
            self.error = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(WAIT_S_MAX)
        assert self.is_over


def test_a_save_that_is_given_up_while_it_waits_waits_no_more(tmp_path: Path) -> None:
    given_up = {OTHER}
    gate = _Gate(str(tmp_path), SAVE, given_up)
    with closing(gate):
        waiting = Waiting(gate)
        assert not waiting.is_over, "no gate is open"
        gate.open(["a", "b"])
    (tmp_path / "a").touch()
    assert not waiting.is_over
    given_up.add(SAVE)
    waiting.join()
    assert "a rank could not save its part" in str(waiting.error)


def test_files_become_visible_once_those_of_all_others_are_there(tmp_path: Path) -> None:
    gate = _Gate(str(tmp_path), SAVE, set())
    with closing(gate):
        gate.open(["a", "b"])
    (tmp_path / "a").touch()
    waiting = Waiting(gate)
    assert not waiting.is_over
    (tmp_path / "b").touch()
    waiting.join()
    assert waiting.error is None


def test_a_gate_that_nobody_opened_lets_nothing_through(tmp_path: Path) -> None:
    gate = _Gate(str(tmp_path), SAVE, set())
    with closing(gate):
        pass
    with pytest.raises(AbandonedError, match="another rank could not begin"):
        gate.ready()


def test_who_waits_for_nobody_looks_at_no_directory(tmp_path: Path) -> None:
    gate = _Gate(str(tmp_path / "not there"), SAVE, set())
    with closing(gate):
        gate.open(())
    gate.ready()
    await_files(str(tmp_path), (), SAVE, {SAVE})
