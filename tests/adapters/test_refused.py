"""The guard's tests once more, where the kernel tells nothing of writes."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.hosts import ROOT

FILES = {
    "core": [
        "tests/unit/pipeline/test_audit.py",
        "tests/unit/pipeline/test_run.py",
        "tests/unit/fence/test_writers.py",
        "tests/property/test_audit.py",
    ],
    "adapters": [
        "tests/adapters/test_torn.py",
    ],
}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is of Linux")
@pytest.mark.parametrize("name", FILES)
def test_all_holds_where_userfaultfd_is_refused(name: str) -> None:
    """As in a container, by seccomp."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", ""]
    command += ["-k", "not thousands_of_writers"]  # of them `make long` has enough
    ran = subprocess.run(
        [*command, *FILES[name]],
        env={**os.environ, "PORTUS_TEST_USERFAULTFD": "refused"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert int(re.findall(r"([0-9]+) passed", ran.stdout)[0]) >= 40
    skipped = [line for line in ran.stdout.splitlines() if line.startswith("SKIPPED")]
    kernel = [line for line in skipped if "this kernel does not tell of writes" in line]
    assert skipped == kernel, "nothing else is left out"
    assert kernel or name != "core", "it was not refused"
