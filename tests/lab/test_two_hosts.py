"""Two guests on one link: a trainer host, and a storage host with persistent memory."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from tests.hardware.conftest import DEVDAX_IN_LAB
from tests.lab.guest import Guest, Machine

STORAGE: Final = "10.9.0.1"
TRAINER: Final = "10.9.0.2"

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]


def machine(address: str, link: tuple[Path, Path], nvdimms: tuple[Path, ...] = ()) -> Machine:
    return Machine(
        devices="rdma pmem" if nvdimms else "rdma",
        nvdimms=nvdimms,
        memory_mib=1024,
        processors=1,
        address=f"{address}/24",
        link=link,
    )


def command(role: str) -> list[str]:
    return [sys.executable, "-m", "tests.hardware.two_hosts", role, STORAGE]


@pytest.fixture
def link() -> Iterator[tuple[Path, Path]]:
    """The two ends of a link. The names of sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="portus-link-") as folder:
        yield Path(folder, "0"), Path(folder, "1")


def test_a_storage_host_pulls_from_a_trainer_host_and_pushes_back(
    tmp_path: Path, link: tuple[Path, Path]
) -> None:
    nvdimms = (tmp_path / "nvdimm0", tmp_path / "nvdimm1")
    one, other = link
    with (
        Guest(machine(STORAGE, (one, other), nvdimms), command("storage")) as storage,
        Guest(machine(TRAINER, (other, one)), command("trainer")) as trainer,
    ):
        for guest in (storage, trainer):
            guest.boot()
        statuses = [guest.wait(400) for guest in (storage, trainer)]
        said = [*storage.rest(), *trainer.rest()]
        print("\n".join(said))
        assert statuses == [0, 0]
    assert any(line.startswith("storage: READ") for line in said)
    assert said[-1] == "trainer: verified"


def test_a_training_goes_on_while_its_storage_host_dies_and_comes_back(
    tmp_path: Path, link: tuple[Path, Path]
) -> None:
    """``portus serve`` on a DAX device, and a trainer, by verbs alone; the storage guest is killed
    in the middle of a save, and booted again on its NVDIMM."""
    secret = tmp_path / "secret"
    secret.write_text("a-secret-of-two-hosts-in-a-lab\n")
    secret.chmod(0o600)
    nvdimms = (tmp_path / "nvdimm0", tmp_path / "nvdimm1")
    one, other = link
    serve = f"portus serve {DEVDAX_IN_LAB} --listen {STORAGE}:7117 --transport verbs"
    script = f"portus format {DEVDAX_IN_LAB}; exec {serve} --secret-file {secret}"
    environment = {"PORTUS_SECRET_FILE": str(secret), "PORTUS_TRANSPORT": "verbs"}
    storage_machine = machine(STORAGE, (one, other), nvdimms)
    trainer_machine = replace(machine(TRAINER, (other, one)), environment=environment)
    train = [sys.executable, "-m", "tests.hardware.training", f"portus://{STORAGE}:7117"]
    said: list[str] = []
    with Guest(trainer_machine, train) as trainer:
        with Guest(storage_machine, ["sh", "-c", script]) as storage:
            for guest in (storage, trainer):
                guest.boot()
            while not any("serving" in line for line in said):
                said.append(storage.line(300))
            while sum(line.startswith("saved") for line in said) < 3:
                said.append(trainer.line(300))
            while not said[-1].startswith("saving"):
                said.append(trainer.line(300))
            time.sleep(0.3)
            storage.kill()
        with Guest(storage_machine, ["sh", "-c", script]) as storage:
            storage.boot()
            said += trainer.lines(600)
            status = trainer.wait(60)
    print("\n".join(said))
    assert status == 0
    assert any(line.startswith("lost") for line in said)
    assert said[-1].startswith("verified")
