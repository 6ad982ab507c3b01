"""Waiting for the files of other ranks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from portus.errors import AbandonedError
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

    def __init__(self, directory: Path, given_up: set[int]) -> None:
        self.error: AbandonedError | None = None
        self._awaited = str(directory), ["a", "b"], SAVE, given_up
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            await_files(*self._awaited)
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
    (tmp_path / "a").touch()
    waiting = Waiting(tmp_path, given_up)
    assert not waiting.is_over
    given_up.add(SAVE)
    waiting.join()
    assert "a rank could not save its part" in str(waiting.error)


def test_files_become_visible_once_those_of_all_others_are_there(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    waiting = Waiting(tmp_path, set())
    assert not waiting.is_over
    (tmp_path / "b").touch()
    waiting.join()
    assert waiting.error is None
