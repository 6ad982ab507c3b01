"""Shelves whose pool others truncate or overwrite: no commit is told into it, nor stored there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import portus
from portus.companions.shelf import Shelf
from portus.engine.spec import PAGE
from portus.errors import CorruptionError, MediumError
from portus.reach.index.check import check

LOST = (CorruptionError, MediumError)


def halved(path: Path, _older: bytes, _other: bytes) -> None:
    os.truncate(path, path.stat().st_size // 2)


def shortened(path: Path, _older: bytes, _other: bytes) -> None:
    """What was cut off is behind the log."""
    os.truncate(path, path.stat().st_size - PAGE)


def emptied(path: Path, _older: bytes, _other: bytes) -> None:
    os.truncate(path, 0)


def set_back(path: Path, older: bytes, _other: bytes) -> None:
    path.write_bytes(older)  # as cp does: the file stays the same


def replaced(path: Path, _older: bytes, other: bytes) -> None:
    path.write_bytes(other)


DEEDS = [halved, shortened, emptied, set_back, replaced]

Deed = Callable[[Path, bytes, bytes], None]


def change_bytes(shelf: Shelf) -> None:
    shelf.a[:9] = 2


def change_names(shelf: Shelf) -> None:
    shelf.a[:9] = 2
    shelf.b = np.ones(5)


def change_all(shelf: Shelf) -> None:
    shelf.large[:] = 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.portus"


@pytest.fixture
def other(tmp_path: Path) -> bytes:
    """Another pool."""
    path = tmp_path / "other.portus"
    with Shelf(path) as shelf:
        shelf.x = np.full(3 << 20, 7, np.uint8)
        shelf.x[0] = 8
    return path.read_bytes()


def require_refusal(shelf: Shelf, path: Path, change: Callable[[Shelf], None]) -> None:
    """A transaction fails, and so does the next one; file and shelf stay as they are."""
    found, a = path.read_bytes(), shelf.a.copy()
    for _ in range(2):
        with pytest.raises(LOST, match=r"another (program|writer)"), shelf.transaction():
            change(shelf)
        assert np.array_equal(shelf.a, a)
    with contextlib.suppress(MediumError, CorruptionError):
        shelf.close()
    assert path.read_bytes() == found


@pytest.mark.parametrize("change", [change_bytes, change_names, change_all])
@pytest.mark.parametrize("deed", DEEDS)
def test_a_transaction_fails_once_others_changed_the_pool_and_stores_nothing_there(
    deed: Deed, change: Callable[[Shelf], None], path: Path, other: bytes
) -> None:
    with Shelf(path) as shelf:
        shelf.a = np.zeros(100_000)
        shelf.large = np.zeros(1 << 20)
    older = path.read_bytes()
    shelf = Shelf(path)
    with shelf.transaction():
        shelf.a[:9] = 1
    deed(path, older, other)
    require_refusal(shelf, path, change)
    if deed is replaced:
        assert check(path) == []
        with portus.Shelf(path, "r") as there:
            assert there.x.sum() == 7 * (3 << 20) + 1


def test_a_copy_without_the_entries_of_an_earlier_process_is_found_before_the_first_one(
    path: Path,
) -> None:
    with Shelf(path) as shelf:
        shelf.a = np.zeros(100)
    older = path.read_bytes()
    with Shelf(path) as shelf:
        shelf.a[0] = 1
    shelf = Shelf(path)
    path.write_bytes(older)
    require_refusal(shelf, path, change_bytes)


def test_a_copy_with_the_last_entry_but_not_the_newest_version_is_found(path: Path) -> None:
    shelf = Shelf(path)
    shelf.a = np.zeros(100)
    shelf.a[:] = 1
    shelf.sync()
    older = path.read_bytes()
    shelf.b = np.ones(5)
    path.write_bytes(older)
    require_refusal(shelf, path, change_bytes)


@pytest.mark.parametrize("versions", [1, 2, 3])
def test_a_copy_from_before_the_newest_version_is_found_before_anything_is_logged(
    path: Path, versions: int
) -> None:
    shelf = Shelf(path)
    for number in range(versions):
        older = path.read_bytes()
        shelf[f"x{number}"] = np.zeros(5)
    path.write_bytes(older)
    with pytest.raises(LOST, match=r"another (program|writer)"), shelf.transaction():
        shelf.x0[0] = 2


def test_growth_and_commits_of_its_own_are_no_change_by_others(path: Path) -> None:
    with Shelf(path, log_bytes=8 * PAGE) as shelf:
        shelf.a = np.zeros(1000)
        for number in range(40):
            with shelf.transaction():
                shelf.a[number] = number
            if number % 7 == 0:
                shelf[f"x{number}"] = np.zeros(number << 12)
    with Shelf(path, "r") as shelf:
        assert shelf.a.sum() == sum(range(40))
    assert check(path) == []
