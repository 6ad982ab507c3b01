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

LINE_S_MAX: Final = 600.0
"""Until the next word: `import torch` takes more than a minute."""

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]


def machine(address: str, link: tuple[Path, Path], nvdimms: tuple[Path, ...] = ()) -> Machine:
    return Machine(
        devices="rdma pmem" if nvdimms else "rdma",
        nvdimms=nvdimms,
        memory_mib=1024,
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


def test_a_training_goes_on_while_its_storage_host_dies_and_is_restored_when_it_died_itself(
    tmp_path: Path, link: tuple[Path, Path]
) -> None:
    """``portus serve`` on a DAX device and a training with torch, by verbs alone. The storage guest
    is killed in the middle of a save, and booted again on its NVDIMM; then the trainer guest is
    killed, and another one restores."""
    secret = tmp_path / "secret"
    secret.write_text("a-secret-of-two-hosts-in-a-lab\n")
    secret.chmod(0o600)
    nvdimms = (tmp_path / "nvdimm0", tmp_path / "nvdimm1")
    one, other = link
    serve = f"portus serve {DEVDAX_IN_LAB} --listen {STORAGE}:7117 --transport verbs"
    script = f"portus format {DEVDAX_IN_LAB}; exec {serve} --secret-file {secret}"
    environment = {"PORTUS_SECRET_FILE": str(secret), "PORTUS_TRANSPORT": "verbs"}
    storage_machine = machine(STORAGE, (one, other), nvdimms)
    trainer_machine = replace(
        machine(TRAINER, (other, one)), environment=environment, memory_mib=2048
    )
    train = [sys.executable, "-m", "tests.hardware.training", f"portus://{STORAGE}:7117"]
    said: list[str] = []

    def until(guest: Guest, word: str, count: int = 1) -> None:
        """Read until ``word`` was said so often."""
        while count:
            said.append(guest.line(LINE_S_MAX))
            print(said[-1])
            count -= said[-1].startswith(word)

    with Guest(trainer_machine, train) as trainer:
        with Guest(storage_machine, ["sh", "-c", script]) as storage:
            for guest in (storage, trainer):
                guest.boot()
            until(trainer, "saved", 3)
            until(trainer, "saving")
            time.sleep(0.3)
            storage.kill()
            print(*storage.rest(), sep="\n")
        with Guest(storage_machine, ["sh", "-c", script]) as storage:
            storage.boot()
            until(trainer, "back")
            until(trainer, "saving")
            time.sleep(0.3)
            trainer.kill()
            said += trainer.rest()
            with Guest(trainer_machine, [*train, "restore"]) as another:
                another.boot()
                until(another, "restored")
                assert another.wait(LINE_S_MAX) == 0
    assert any(line.startswith("lost") for line in said)
    digests = {line.split()[1]: line.split()[2] for line in said if line.startswith("saving")}
    reported = [line.split()[1] for line in said if line.startswith("saved")]
    _, step, digest = said[-1].split()
    assert int(step) >= int(reported[-1])
    assert digest == digests[step]
