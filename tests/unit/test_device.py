"""A file that stands in for a DAX device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import portus
from portus.engine.spec import Extent
from portus.reach.index.directory import has_pool
from portus.reach.index.place import Place, PlaceKind
from portus.reach.media.dax import DaxDevice, device_facts
from portus.reach.media.local import LocalFiles
from tests.device import stand_in
from tests.hosts import serving, url

SIZE = 32 << 20


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "dax"
    path.touch()
    os.truncate(path, SIZE)
    stand_in(str(path), str(tmp_path / "sys"), monkeypatch)
    return str(path)


def test_the_system_calls_that_file_a_device_and_no_other(device: str, tmp_path: Path) -> None:
    facts = device_facts(device)
    assert facts is not None
    assert (facts.size, facts.volatile) == (SIZE, False)
    other = tmp_path / "other"
    other.write_bytes(b"x")
    assert device_facts(str(other)) is None
    assert os.stat(other).st_size == 1
    assert Place.parse(device).kind is PlaceKind.DEVICE


def test_what_is_stored_and_persisted_is_in_the_file(device: str) -> None:
    medium = LocalFiles().open(device, writable=True)
    assert isinstance(medium, DaxDevice)
    medium.store(5, b"portus")
    medium.persist([Extent(5, 6)])
    medium.close()
    assert Path(device).read_bytes()[5:11] == b"portus"


def test_a_blank_device_has_no_pool_and_gets_none_before_the_first_save(device: str) -> None:
    assert not has_pool(device)
    with portus.PoolCheckpointer(device) as saver:
        assert saver.steps() == []
        assert not any(Path(device).read_bytes()), "nothing is made before the first save"
        saver.save({"x": 1}, 1).wait()
    assert has_pool(device)


def test_a_host_that_serves_a_blank_device_makes_its_pool(device: str) -> None:
    with serving(device) as server, portus.PoolCheckpointer(url(server), "net") as saver:
        saver.save({"x": 1}, 1).wait()
    with portus.open(device) as pool:
        assert pool.steps("net") == [1]
