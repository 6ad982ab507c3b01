"""What the lab itself promises: what a guest runs comes back, and one that dies is noticed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.lab.guest import Guest, Machine, run
from tests.lab.needs import LabError

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

BARE = Machine(devices="", memory_mib=1024)


def test_what_a_command_says_and_how_it_ends_come_back(tmp_path: Path) -> None:
    (tmp_path / "seen").write_text("by the guest")
    script = f"cat {tmp_path}/seen; echo; echo changed > {tmp_path}/seen; exit 7"
    with Guest(BARE, ["bash", "-c", script]) as guest:
        guest.boot()
        assert guest.line(60) == "by the guest"
        assert guest.wait(60) == 7
    assert (tmp_path / "seen").read_text() == "by the guest", "the host's files are not its own"


def test_a_guest_that_dies_is_an_error() -> None:
    with pytest.raises(LabError, match="its console"):
        run(BARE, ["busybox", "poweroff", "-f"], timeout_s=120)


def test_a_guest_that_hangs_is_ended_and_an_error() -> None:
    with pytest.raises(LabError, match="said nothing for"):
        run(BARE, ["sleep", "1000"], timeout_s=25)


def test_a_guest_whose_devices_cannot_be_made_says_why() -> None:
    machine = Machine(devices="pmem", memory_mib=1024)  # and no NVDIMM
    with pytest.raises(LabError, match="failed to reconfigure namespace"):
        run(machine, ["true"], timeout_s=120)


def test_a_guest_dies_with_the_process_that_started_it() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        guest = Guest(BARE, ["sleep", "1000"])
        os.write(writer, f"{guest._process.pid} {guest._folder.name}\n".encode())
        time.sleep(1000)
    number, folder = os.read(reader, 1000).decode().split()
    until_s = time.monotonic() + 30
    while "qemu" not in Path("/proc", number, "comm").read_text() and time.monotonic() < until_s:
        time.sleep(0.01)  # before that it has not asked for its signal
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    until_s = time.monotonic() + 30
    while Path("/proc", number).exists() and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not Path("/proc", number).exists()
    for each in Path(folder).iterdir():
        each.unlink()
    Path(folder).rmdir()


def test_a_kernel_that_panics_at_its_start_is_started_again_and_given_up_in_the_end(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Panicking(Guest):
        starts = 0

        def _start(self) -> None:
            self._arguments[self._arguments.index("-append") + 1] += " init=/none rdinit=/none"
            type(self).starts += 1
            super()._start()

    with Panicking(BARE, ["true"]) as guest, pytest.raises(LabError, match="Kernel panic"):
        guest.boot()
    assert Panicking.starts == 3
    assert capfd.readouterr().err.count("lab: started again") == 2
