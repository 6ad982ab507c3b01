"""Two guests on one link: a trainer host, and a storage host with persistent memory."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.lab.guest import Guest, Machine

STORAGE: Final = "10.9.0.1"
TRAINER: Final = "10.9.0.2"

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]


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
        statuses = [guest.wait(240) for guest in (storage, trainer)]
        said = [*storage.rest(), *trainer.rest()]
        print("\n".join(said))
        assert statuses == [0, 0]
    assert any(line.startswith("storage: READ") for line in said)
    assert said[-1] == "trainer: verified"
