"""``portus doctor`` and ``portus format``, on machines without such devices; and the files of /sys
that tell of them, as a machine that has them shows them."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from portus.cli import doctor, loopback
from portus.cli.doctor import adapters, measure
from portus.cli.loopback import PLACES, SIZE, count_misplaced
from portus.cli.machine import Machine, MachineFinding
from portus.engine.media.file_calls import file_system_of
from portus.engine.spec import PAGE
from portus.engine.writer.staged_way import set_direct
from portus.engine.writer.ways import MEASURED_MIN
from portus.errors import UsageError
from portus.reach.index.place import Place
from portus.reach.pools.checkpointer import PoolCheckpointer
from portus.reach.transport.cuda import Driver
from portus.reach.transport.verbs import QueuePair, Region
from tests.cuda import Library, memfd
from tests.unit.cli.scene import Run, portus, portus_json


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def tell(machine: Machine, **files: str) -> None:
    """Files below the root of ``machine``; an empty text makes a directory."""
    for name, text in files.items():
        path = machine.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n") if text else path.mkdir(exist_ok=True)


def topics(found: list[MachineFinding], topic: str) -> dict[str, MachineFinding]:
    return {each.name: each for each in found if each.topic == topic}


def test_a_machine_without_anything_is_told_so(machine: Machine) -> None:
    found = list(machine.findings())
    for topic in ("DAX device", "RDMA device", "GPU"):
        assert topics(found, topic)["-"].text.startswith("none")
    assert not topics(found, "NVDIMM namespace")


def test_a_dax_device_that_no_driver_serves_is_named_with_the_remedy(machine: Machine) -> None:
    tell(machine, **{"sys/bus/dax/devices/dax2.0/size": "268435456"})
    [found] = machine.dax_devices()
    assert found.name == "/dev/dax2.0"
    assert "no driver" in found.text
    assert found.advice == "daxctl reconfigure-device --mode=devdax dax2.0"


def test_a_raw_namespace_is_told_how_to_become_a_device(machine: Machine) -> None:
    region = "sys/bus/nd/devices/region0"
    tell(
        machine,
        **{
            f"{region}/persistence_domain": "memory_controller",
            f"{region}/namespace0.0/size": "1000",
            f"{region}/namespace0.0/mode": "raw",
            f"{region}/namespace0.1/size": "0",
            f"{region}/namespace0.2/size": "1000",
            f"{region}/namespace0.2/mode": "dax",
        },
    )
    found = topics(list(machine.namespaces()), "NVDIMM namespace")
    assert found.keys() == {"namespace0.0", "namespace0.2"}
    assert "memory_controller" in found["namespace0.0"].text
    assert found["namespace0.0"].advice.startswith("ndctl create-namespace -f -e namespace0.0")
    assert ", devdax," in found["namespace0.2"].text
    assert not found["namespace0.2"].advice


def test_rdma_ports_are_told_with_their_state(machine: Machine) -> None:
    port = "sys/class/infiniband/rxe0/ports/1"
    tell(
        machine,
        **{
            "sys/class/infiniband/rxe0/parent": "lo",
            f"{port}/state": "1: DOWN",
            f"{port}/rate": "2.5 Gb/sec (1X SDR)",
            f"{port}/link_layer": "Ethernet",
        },
    )
    found = topics(list(machine.rdma()), "RDMA device")
    assert (
        found["rxe0"].text == "port 1 DOWN, Ethernet, 2.5 Gb/sec (1X SDR), in software (Soft-RoCE)"
    )
    assert "bring the link" in found["rxe0"].advice
    assert {"pyverbs", "locked memory"} <= found.keys()


class Paging(QueuePair):
    """A queue pair that forgets where in its page a far place is; or one that is right."""

    def __init__(self, *, is_right: bool) -> None:
        self._is_right = is_right

    def read(self, target: int, local_key: int, source: int, remote_key: int, length: int) -> None:
        ctypes.memmove(target, self._there(source), length)

    def write(self, target: int, remote_key: int, source: int, local_key: int, length: int) -> None:
        ctypes.memmove(self._there(target), source, length)

    def poll(self) -> int:
        return 1

    def close(self) -> None:
        """Holds nothing."""

    def _there(self, address: int) -> int:
        return address if self._is_right else address // PAGE * PAGE


@pytest.mark.parametrize("is_right", [True, False])
def test_bytes_that_a_device_puts_at_the_wrong_place_are_noticed(is_right: bool) -> None:
    pages = [mmap.mmap(-1, SIZE) for _ in range(2)]
    near, far = (
        Region(np.frombuffer(each, np.uint8).ctypes.data, SIZE, SimpleNamespace(lkey=1, rkey=2))
        for each in pages
    )
    for writes in (True, False):
        wrong = count_misplaced(Paging(is_right=is_right), near, far, writes=writes)
        assert wrong == (0 if is_right else len(PLACES))


def test_a_machine_without_an_active_port_tries_none(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "portus.reach.transport.verbs._SYS", str(machine.root / "sys/class/infiniband")
    )
    assert list(loopback.loopback_findings()) == []


def test_gpus_are_told_with_their_driver(machine: Machine) -> None:
    tell(
        machine,
        **{
            "dev/nvidia0": "x",
            "dev/nvidiactl": "x",
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module 550\nGCC",
        },
    )
    found = topics(list(machine.gpus()), "GPU")
    assert found["/dev/nvidia0"].text == "NVIDIA UNIX x86_64 Kernel Module 550"
    assert set(found) == {"/dev/nvidia0", "memory"}


@pytest.mark.parametrize("peer", [True, False])
@pytest.mark.parametrize(
    ("cuda", "why"),
    [
        (Library(memfd).driver, ""),
        (Library(memfd, supported=False).driver, "the driver gives none of device 0, 1"),
        (lambda: Driver(SimpleNamespace()), "the CUDA driver has no cuInit"),
    ],
)
def test_the_way_of_gpu_memory_is_told(
    tmp_path: Path, cuda: Callable[[], Driver], why: str, peer: bool
) -> None:
    machine = Machine(tmp_path, cuda)
    tell(machine, **{"dev/nvidia0": "x"}, **({"sys/module/nvidia_peermem": ""} if peer else {}))
    found = topics(list(machine.gpus()), "GPU")["memory"]
    assert found.text.startswith("staged in pinned memory") == (why != "" and not peer)
    assert found.text.startswith("a network card can read it as a dmabuf") == (not why)
    assert ("nvidia_peermem" in found.text) == (peer or bool(why))
    assert why in found.text
    assert found.advice.startswith("modprobe nvidia_peermem") == (why != "" and not peer)


def test_a_library_told_to_flush_nothing_is_not_usable(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMEM_NO_FLUSH", "1")
    found = machine.libpmem()
    assert "not usable" in found.text
    assert "unset it" in found.text


def _takes_direct(folder: Path) -> bool:
    number = os.open(folder, os.O_RDWR | os.O_TMPFILE)
    try:
        return not file_system_of(number, str(folder))[0].volatile and set_direct(number, on=True)
    finally:
        os.close(number)


def test_a_place_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    speeds = measure(str(tmp_path), 1 << 20)
    assert min(speeds.save, speeds.load, speeds.memory) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only")
def test_the_ways_of_checkpoint_files_are_measured(tmp_path: Path) -> None:
    speeds = measure(str(tmp_path), MEASURED_MIN)
    ways = {"cached", "direct"} if _takes_direct(tmp_path) else {"cached"}
    for found in (speeds.fresh, speeds.spare):
        assert set(found) == ways
        assert min(found.values()) > 0
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_directory_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "missing", Path("/dev/null")):
        with pytest.raises(UsageError, match="expected a directory, or a DAX device"):
            measure(str(place), 1 << 20)


@pytest.mark.long
def test_the_document_holds_what_the_lines_say(tmp_path: Path) -> None:
    document = portus_json("doctor", str(tmp_path), str(tmp_path / "missing"))
    assert [each["place"] for each in document["places"]] == [str(tmp_path)]
    assert list(document["not_measured"]) == [str(tmp_path / "missing")]
    topics = {each["topic"] for each in document["found"]}
    assert {"DAX device", "libpmem", "RDMA device", "GPU", "copy helper", "shelf"} <= topics


def test_it_says_how_many_checkpoints_of_the_newest_size_there_is_room_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 << 20))
    with PoolCheckpointer(run.pool / "net.portus", "net", keep=1) as trainer:
        trainer.save({"x": torch.zeros(10 << 18)}, 30).wait()
        inside = portus_json("ls", run.net)["pools"][0]["free"]
        net, other = doctor.pools_of(Place.parse(run.pool))
    assert net.name == str(run.net)
    more = ((100 << 20) + inside) // (10 << 20)
    assert f": space for {more} more checkpoints of 10.0" in net.text
    assert not net.advice
    assert "of 1." in other.text
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with PoolCheckpointer(run.pool / "net.portus", "net", keep=1) as trainer:
        trainer.save({"x": torch.zeros(10 << 20)}, 40).wait()
        full = next(iter(doctor.pools_of(Place.parse(run.pool))))
    assert "free space" in full.advice


class Looked:
    """What ``portus doctor`` says of places; nothing else is looked at."""

    def __init__(self, document: Any) -> None:
        self.pools = {each["name"]: each["text"] for each in document["found"]}
        self.measured = [each["place"] for each in document["places"]]
        self.not_measured = document["not_measured"]


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Looked]:
    monkeypatch.setattr(Machine, "findings", lambda self: iter(()))
    monkeypatch.setattr("portus.cli.loopback.loopback_findings", lambda: iter(()))
    monkeypatch.setattr(doctor, "ADAPTERS", "none")
    real = doctor.measure
    monkeypatch.setattr(doctor, "measure", lambda place, size: real(place, 1 << 20))
    return lambda *places: Looked(portus_json("doctor", *places))


def test_a_pool_file_or_directory_that_is_named_is_looked_at(
    run: Run, look: Callable[..., Looked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the command is run, and a run's directory means the pools in its ``.portus``."""
    elsewhere = run.root / "elsewhere"
    os.rename(run.pool, run.root / "pools")
    elsewhere.mkdir()
    net, other = (str(run.root / "pools" / f"{name}.portus") for name in ("net", "other"))
    named = look("pools")
    assert named.pools.keys() == {net, other}
    assert "space for" in named.pools[net]
    assert named.measured == ["pools"]
    named = look("pools/net.portus", "pools", net)
    assert named.pools.keys() == {net, other}
    assert named.measured == ["pools", str(run.root / "pools")]
    monkeypatch.chdir("pools")
    assert look("net.portus").measured == ["."]
    os.rename(run.root / "pools", run.pool)
    named = look(str(run.root))
    assert named.pools.keys() == {str(run.net), str(run.pool / "other.portus")}
    assert named.measured == [str(run.pool)]
    named = look(str(elsewhere))
    assert named.pools == {}
    assert named.measured == [str(elsewhere)]
    assert not named.not_measured
    monkeypatch.chdir(run.root)
    assert look().measured == [str(run.pool), "/dev/shm"]
    monkeypatch.setenv("PORTUS_POOL", str(elsewhere / "not" / "yet"))
    assert look().measured == [str(elsewhere), "/dev/shm"]


def test_what_is_not_on_this_machine_is_told_and_not_measured(
    run: Run, look: Callable[..., Looked]
) -> None:
    host = "portus+tls://store-1:7217"
    [pointer] = run.point(5)
    named = look(host, "s3://bucket/runs", "missing", pointer, "/dev/null")
    assert named.measured == []
    assert named.pools.keys() == {host}
    assert named.not_measured.keys() == {
        host,
        "s3://bucket/runs",
        "missing",
        str(pointer),
        "/dev/null",
    }
    assert "run `portus doctor` on its machine" in named.not_measured[host]
    assert named.pools[host] == named.not_measured[host]
    assert "portus mirror status s3://bucket/runs" in named.not_measured["s3://bucket/runs"]
    assert "found nothing of this name" in named.not_measured["missing"]
    assert "is a pointer to a checkpoint" in named.not_measured[str(pointer)]
    said = portus("doctor", host, "missing")
    assert "ready" not in said.out
    assert "- place missing: not measured: expected a pool file" in said.out
    assert said.out.count(host) == 1
    assert said.out.count("missing") == 1


def test_an_adapter_that_is_broken_is_a_finding() -> None:
    points = [
        EntryPoint("Broken", "not_there:findings", "portus.doctor"),
        EntryPoint("Whole", "tests.unit.cli.test_doctor:whole", "portus.doctor"),
    ]
    broken, found = adapters(points)
    assert "No module named 'not_there'" in broken.text
    assert broken.advice
    assert found == MachineFinding("Whole", "flag", "is on")


def whole() -> list[tuple[str, str, str]]:
    """What an adapter offers."""
    return [("flag", "is on", "")]


def test_only_a_dax_device_can_be_formatted(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path, Path("/dev/null")):
        said = portus("format", str(place), "--force")
        assert said.code == 2
        assert "expected a DAX device" in said.err
    assert (tmp_path / "file").read_bytes() == b""
