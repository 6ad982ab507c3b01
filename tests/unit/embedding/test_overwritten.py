"""Protected tables whose pool others truncate or overwrite: no batch is told to be durable then."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

import portus
from portus.companions.embedding.store import MODEL
from portus.embedding import protect
from portus.engine.spec import PAGE
from portus.errors import CorruptionError, MediumError
from portus.reach.index.check import check
from tests.device import stand_in
from tests.unit.embedding.test_protected import Small
from tests.unit.shelf.test_overwritten import DEEDS, LOST, Deed, replaced, set_back

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tables.portus"


@pytest.fixture
def other(tmp_path: Path) -> bytes:
    """The pool of another training."""
    path, small = tmp_path / "other.portus", Small()
    with small.protect(path):
        small.step(1)
        small.step(2)
    return path.read_bytes()


def train(small: Small, tables: Any) -> None:
    small.step(3)
    tables.wait()


def changed_after_two_batches(deed: Deed, path: Path, other: bytes) -> tuple[Small, Any]:
    """A training whose pool others changed, with an older copy of it or with the pool ``other``."""
    small = Small()
    tables = small.protect(path)
    small.step(1)
    tables.wait()
    older = path.read_bytes()
    small.step(2)
    tables.wait()
    deed(path, older, other)
    return small, tables


def require_refusal(small: Small, tables: Any, path: Path) -> None:
    """The batch is not durable, nor is any later one; the file stays as it is."""
    found = path.read_bytes()
    for _ in range(2):
        with pytest.raises(LOST, match=r"another (program|writer)"):
            train(small, tables)
    with contextlib.suppress(MediumError, CorruptionError):
        tables.close()
    assert path.read_bytes() == found


@pytest.mark.parametrize("deed", DEEDS)
def test_a_batch_fails_once_others_changed_the_pool_and_stores_nothing_there(
    deed: Deed, path: Path, other: bytes
) -> None:
    small, tables = changed_after_two_batches(deed, path, other)
    require_refusal(small, tables, path)
    if deed is replaced:
        assert check(path) == []
    if deed in (replaced, set_back):
        with portus.open(path) as view:
            state: Any = view.load(MODEL)
        assert state["model"]["table.weight"][1, 0] == -1


@pytest.mark.parametrize("deed", DEEDS)
def test_no_mark_is_made_in_a_pool_that_others_changed(
    deed: Deed, path: Path, other: bytes
) -> None:
    small, tables = changed_after_two_batches(deed, path, other)
    found = path.read_bytes()
    with pytest.raises(LOST, match=r"another (program|writer)"):
        small.model.state_dict()
    with contextlib.suppress(MediumError, CorruptionError):
        tables.close()
    assert path.read_bytes() == found


def test_a_log_that_is_folded_in_again_and_again_is_no_change_by_others(path: Path) -> None:
    small = Small()
    with small.protect(path) as tables:
        for number in range(60):
            small.step(number % 7)
        tables.wait()
    assert check(path) == []


def test_a_batch_in_place_is_refused_before_its_rows_change_in_an_older_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "dax"
    with open(path, "wb") as file:
        file.truncate(112 << 20)
    stand_in(str(path), str(tmp_path / "facts"), monkeypatch)
    small = Small()
    tables = protect(small.model, small.optimizer, pool=path, log_bytes=60 * PAGE, in_place=True)
    small.step(1)
    tables.wait()
    older = path.read_bytes()
    small.step(2)
    tables.wait()
    with open(path, "r+b") as file:  # a device is not cut
        file.write(older)
    found = path.read_bytes()
    for _ in range(2):
        with pytest.raises(LOST, match=r"another (program|writer)"):
            small.step(3)
        assert not small.weight[3].any()
    with contextlib.suppress(MediumError, CorruptionError):
        tables.close()
    assert path.read_bytes() == found
