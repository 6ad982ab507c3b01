"""Sharded checkpoints on a storage host: directories of torch's whose files are pointers."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

import portus
import portus.dcp
from portus.dcp import PortusStorageReader, PortusStorageWriter
from portus.engine.loading.checkpoint_file import verify_file
from portus.errors import CorruptionError, UsageError
from portus.reach.daemon.server import Server
from portus.reach.dcp import whole_calls
from portus.reach.pools import resolve
from tests.hosts import serving, url
from tests.unit.dcp.running import run
from tests.unit.pools.scene import stored

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="pools are written on Linux only"),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(whole_calls, "_writers", [])
    monkeypatch.setattr(resolve, "ALLOWED", [])
    with serving(tmp_path / "host") as made:
        yield made


@pytest.fixture
def host(server: Server) -> str:
    """The address of a host."""
    return url(server)


def state(step: int) -> dict[str, Any]:
    weight = torch.full((300, 70), float(step))
    return {"model": {"w": weight, "t": weight.t(), "none": torch.zeros(0)}, "step": step}


def emptied() -> dict[str, Any]:
    return state(0)


def assert_loads(place: str | Path, step: int) -> None:
    found = emptied()
    portus.dcp.load(found, place)
    assert found["step"] == step
    assert torch.equal(found["model"]["w"], state(step)["model"]["w"])


def steps(host: str) -> list[int]:
    """Those of the versions on the host."""
    with portus.open(host) as pool:
        return sorted(info.step for info in pool.versions())


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(
    ("kind", "ranks", "loads"),
    [
        ("fsdp", 4, ("fsdp:1", "fsdp:2", "fsdp:3")),
        ("tp", 2, ("fsdp:1", "tp:2")),
        ("hsdp", 4, ("fsdp:1", "fsdp:2")),
    ],
)
def test_what_is_saved_to_a_host_is_bit_equal_at_any_number_of_ranks(
    host: str, tmp_path: Path, kind: str, ranks: int, loads: tuple[str, ...]
) -> None:
    said = [each.split(":") for each in loads]
    run(
        tmp_path,
        f"hosts_save:{ranks}:{kind}",
        *(f"hosts_load:{count}:{how}:{step}" for how, count in said for step in (1, 2)),
        PORTUS_POOL=host,
    )
    with portus.open(host) as pool:
        assert [name.partition("/")[2] for name in pool.models()] == [
            f"rank-{rank}" for rank in range(ranks)
        ]
    assert steps(host) == sorted([1, 2] * ranks)


def test_a_run_is_called_on_a_host_as_its_user_says(host: str, tmp_path: Path) -> None:
    writer = PortusStorageWriter(pool=host, model="net")
    writer.save(state(1), tmp_path / "step_1").wait()
    writer.close()
    with portus.open(host) as pool:
        assert pool.models() == ["net/rank-0"]


def test_the_files_of_a_directory_are_those_that_a_directory_without_a_host_has(
    host: str, tmp_path: Path
) -> None:
    for place, pool in (("plain", None), ("pooled", host)):
        writer = PortusStorageWriter(pool=pool)
        writer.save(state(1), tmp_path / place / "step_1").wait()
        writer.close()
    plain, pooled = tmp_path / "plain" / "step_1", tmp_path / "pooled" / "step_1"
    (shard,), (pointer,) = plain.glob("*.distcp"), pooled.glob("*.distcp")
    assert len(os.listdir(plain)) == len(os.listdir(pooled)) == 2
    assert stored(pointer)[:-64] == shard.read_bytes()[:-64]  # each save has an id at its end
    verify_file(pointer)
    assert_loads(pooled, 1)


def test_calls_without_a_writer_save_to_the_host_of_the_variable(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORTUS_POOL", host)
    portus.dcp.save(state(1), tmp_path / "step_1")
    whole_calls._writers[0].close()
    assert steps(host) == [1]
    assert_loads(tmp_path / "step_1", 1)


def test_a_part_is_loaded_by_its_keys(host: str, tmp_path: Path) -> None:
    with_pool = PortusStorageWriter(pool=host)
    with_pool.save(state(3), tmp_path / "step_3").wait()
    with_pool.close()
    found = {"model": {"w": torch.zeros(300, 70)}}
    dcp.load(found, checkpoint_id=tmp_path / "step_3", storage_reader=PortusStorageReader())
    assert torch.equal(found["model"]["w"], state(3)["model"]["w"])


def test_keep_lets_go_of_directories_and_of_what_they_led_to(host: str, tmp_path: Path) -> None:
    writer = PortusStorageWriter(pool=host, keep=2)
    for step in range(1, 6):
        writer.save(state(step), tmp_path / f"run/step_{step}").wait()
        writer.wait()
    assert sorted(os.listdir(tmp_path / "run")) == [".portus", "step_4", "step_5"]
    assert set(steps(host)) == {4, 5}
    writer.remove(tmp_path / "run/step_4")
    writer.close()
    assert set(steps(host)) == {5}
    assert_loads(tmp_path / "run/step_5", 5)


def test_what_stays_as_it_is_is_stored_once(host: str, tmp_path: Path) -> None:
    frozen = torch.arange(500_000.0)
    writer = PortusStorageWriter(pool=host)
    shared = []
    for step in range(4):
        saved = {"frozen": frozen, "w": torch.full((10,), float(step))}
        handle = writer.save(saved, tmp_path / f"step_{step}")
        handle.wait()
        shared.append(handle.stats.shared_bytes)
    writer.close()
    assert shared[-1] >= frozen.nbytes
    found = {"frozen": torch.zeros_like(frozen), "w": torch.zeros(10)}
    portus.dcp.load(found, tmp_path / "step_3")
    assert torch.equal(found["frozen"], frozen)
    assert found["w"].tolist() == [3.0] * 10


def test_a_directory_is_loaded_only_from_a_host_that_is_configured(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = PortusStorageWriter(pool=host)
    writer.save(state(1), tmp_path / "step_1").wait()
    writer.close()
    resolve.ALLOWED.clear()
    with pytest.raises(UsageError, match="may not choose what is opened"):
        portus.dcp.load(emptied(), tmp_path / "step_1")
    dcp.load(emptied(), checkpoint_id=tmp_path / "step_1", storage_reader=PortusStorageReader(host))
    resolve.ALLOWED.clear()
    monkeypatch.setenv("PORTUS_POOL", host)
    assert_loads(tmp_path / "step_1", 1)


def test_a_directory_that_is_copied_is_loaded_while_its_version_is_there(
    host: str, tmp_path: Path
) -> None:
    writer = PortusStorageWriter(pool=host)
    writer.save(state(1), tmp_path / "run" / "step_1").wait()
    shutil.copytree(tmp_path / "run" / "step_1", tmp_path / "copy")
    assert_loads(tmp_path / "copy", 1)
    writer.remove(tmp_path / "run" / "step_1")
    writer.close()
    assert steps(host) == []
    with pytest.raises(UsageError, match="any more"):
        portus.dcp.load(emptied(), tmp_path / "copy")


def test_a_damaged_shard_is_told_and_the_newest_that_is_whole_is_taken(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = PortusStorageWriter(pool=url(server))
    for step in (1, 2):
        writer.save(state(step), tmp_path / "run" / f"step_{step}").wait()
    writer.close()
    pool = server.house.pools.of("default").writer
    (entry,) = [each for each in pool.catalogue().entries() if each.info.step == 2]
    record = pool.record(entry)
    largest = int(record.storages["length"].argmax())
    extent = record.storage_extents(largest)[0]
    pool.medium.store(extent.offset + 4000, b"rotten")
    with pytest.raises(CorruptionError, match=r"\.distcp"):
        portus.dcp.load(emptied(), tmp_path / "run" / "step_2")
    found = emptied()
    assert portus.dcp.load_newest(found, tmp_path / "run") == str(tmp_path / "run" / "step_1")
    assert found["step"] == 1
    assert "step_2 is passed over" in caplog.text


def test_torch_s_own_reader_finds_a_directory_of_pointers_and_fails_instead_of_starting_afresh(
    host: str, tmp_path: Path
) -> None:
    writer = PortusStorageWriter(pool=host)
    writer.save(state(1), tmp_path / "step_1").wait()
    writer.close()
    with pytest.raises(CheckpointException, match="metadata read failed"):
        dcp.load(emptied(), storage_reader=FileSystemReader(tmp_path / "step_1"))


@pytest.mark.long
def test_what_has_no_room_on_the_host_is_heard_of_by_all_ranks(tmp_path: Path) -> None:
    with serving(tmp_path / "host", quota=8 << 20) as server:
        run(tmp_path, "hosts_full:2", PORTUS_POOL=url(server))


def test_a_pool_file_takes_no_shards(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one pool, with one writer"):
        PortusStorageWriter(pool=tmp_path / "run.portus")
