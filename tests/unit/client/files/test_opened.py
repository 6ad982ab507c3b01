"""A pool is made once, opened once, and stays while somebody looks at it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from portus.client.files.home import FileHome
from portus.client.files.opened import RunPool
from portus.errors import BusyError
from portus.index import directory
from portus.index.place import Place


class Scene:
    """A home in a directory, and how often its pool was opened."""

    def __init__(self, root: Path) -> None:
        self.path = root / "m.portus"
        self.home = FileHome(Place.named(self.path), "m", None)
        self.opened = 0
        self.pool = RunPool(self.home, "m", None, None, self.count)

    def count(self) -> None:
        self.opened += 1


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    if made.pool.writer is not None:
        made.home.close(made=made.pool.created)


def test_a_pool_is_made_by_the_first_who_needs_it_and_opened_once(scene: Scene) -> None:
    assert not scene.path.exists()
    first = scene.pool.open_or_create()
    assert scene.path.is_file()
    assert scene.pool.open_or_create() == first == (scene.pool.writer, scene.pool.keeper)
    assert scene.opened == 1


def test_looking_makes_no_pool(scene: Scene) -> None:
    with scene.pool.looked_at() as pools:
        assert pools == []
    assert scene.pool.place_of_journal() is None
    assert (scene.path.exists(), scene.opened) == (False, 0)


def test_who_looks_sees_the_open_pool_last(scene: Scene) -> None:
    writer, _ = scene.pool.open_or_create()
    with scene.pool.looked_at() as pools:
        assert pools == [writer]


def test_a_pool_that_went_away_meanwhile_is_not_there_and_no_error(scene: Scene) -> None:
    scene.pool.open_if_there()
    assert (scene.pool.writer, scene.opened) == (None, 0)


def test_a_pool_that_is_there_and_cannot_be_opened_is_an_error_and_nothing_is_open(
    tmp_path: Path, scene: Scene
) -> None:
    scene.path.write_bytes(b"this is no pool" * 1000)
    with pytest.raises(Exception, match=r"m\.portus"):
        scene.pool.open_if_there()
    assert (scene.pool.writer, scene.pool.keeper, scene.opened) == (None, None, 0)


def test_a_pool_is_held_against_others_once_it_is_open(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "HELD_S", 0.2)
    scene.pool.open_or_create()
    if os.fork() == 0:  # the lock is of a process
        code = 1
        try:
            other = Scene(tmp_path)
            other.pool.open_or_create()
        except BusyError:
            code = 0
        finally:
            os._exit(code)
    _, status = os.wait()
    assert os.waitstatus_to_exitcode(status) == 0


def test_nothing_holds_an_opened_pool_that_nobody_holds(tmp_path: Path) -> None:
    home = FileHome(Place.named(tmp_path / "m.portus"), "m", None)
    made = RunPool(home, "m", None, None, lambda: None)
    known = weakref.ref(made)
    del made
    assert known() is None
