"""``portus verify --rate``."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import serving, url
from tests.unit.cli.scene import Run, portus, portus_json
from tests.unit.cli.test_process import MAIN


@pytest.mark.parametrize("command", ["gc", "ls"])
def test_a_place_that_is_named_twice_is_refused(run: Run, command: str) -> None:
    other = run.pool / "other.portus"
    said = portus(command, run.net, "--pool", other)
    assert said.code == 2
    assert f"expected one place, found {run.net} and --pool {other}" in said.err
    assert said.out == ""


def test_rot_is_told_of_before_a_version_is_needed(run: Run) -> None:
    said = portus("verify", run.pool, "--rate", "50M/s")
    assert said.code == 0
    assert said.out.count("healthy") == 2
    run.damage(10, "weight")  # no load of the newest looks at it
    said = portus("verify", run.pool, "--rate", "1GB/s")
    assert said.code == 1
    assert "V4: version 1 of 'net' (step 10)" in said.err, "at once"
    assert "error V4: version 1 of 'net' (step 10)" in said.out
    document = portus_json("verify", "--pool", run.pool, "--rate", "1GB/s", code=1)
    assert [pool["healthy"] for pool in document["pools"]] == [False, True]


def test_what_a_storage_host_has_can_be_read_slowly(run: Run) -> None:
    run.damage(20, "weight")
    with serving(run.net) as server:
        assert portus("verify", url(server), "--rate", "1G/s").code == 1


@pytest.mark.parametrize("rate", ["fast", "0", "-1M/s", "5M/h"])
def test_a_rate_that_is_none_is_refused(run: Run, rate: str) -> None:
    said = portus("verify", run.pool, f"--rate={rate}")
    assert said.code == 2
    assert "expected a size" in said.err


@pytest.mark.long
def test_ctrl_c_ends_it(run: Run, tmp_path: Path) -> None:
    run.damage(10, "weight")
    command = [sys.executable, "-c", MAIN, "verify", str(run.net), "--rate", "1/s"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as done:
        assert done.stderr is not None
        assert "step 10" in done.stderr.readline()
        done.send_signal(signal.SIGINT)  # it waits for hours before it reads the next version
        _, said = done.communicate(timeout=60)
    assert done.returncode == 130
    assert said == "portus: interrupted\n"
