"""A process without Portus loads the newest file again and again, and keeps some mapped, while a
training rotates its files and writes over spares. ``PORTUS_TEST_READ_S=600`` reads for ten
minutes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only")

READ_S = float(os.environ.get("PORTUS_TEST_READ_S", "12"))

TRAIN = """
import sys, torch, portus
from portus.engine.directory.publisher import Publisher
begun, spares, begin = 0, 0, Publisher.begin
def noted(own, *paths, **named):
    global begun, spares
    draft = begin(own, *paths, **named)
    begun, spares = begun + 1, spares + draft.files[0].is_spare
    return draft
Publisher.begin = noted
weights = [torch.empty(1 << 18) for _ in range(4)]
checkpointer, step = portus.Checkpointer(sys.argv[1], keep=2), 0
print("ready", flush=True)
while not sys.stdin.closed:
    step += 1
    for each in weights:
        each.fill_(step)
    checkpointer.save({"step": step, "weights": weights}, step)
    if step % 20 == 0:
        checkpointer.wait()
        print(step, spares, flush=True)
        if not sys.stdin.readline():
            break
"""

READ = """
import sys
sys.modules["portus"] = None
import glob, random, time, torch
directory, until, kept, loads, gone = sys.argv[1], time.monotonic() + float(sys.argv[2]), [], 0, 0
def check(state):
    for each in state["weights"]:
        assert (each == state["step"]).all(), (state["step"], each.unique()[:5])
while time.monotonic() < until:
    names = glob.glob(directory + "/step-*.pt")
    if not names:
        continue
    try:
        state = torch.load(max(names), mmap=bool(loads % 2))
    except (FileNotFoundError, RuntimeError) as error:  # it was rotated away after it was listed
        assert "No such file" in str(error), error
        gone += 1
        continue
    check(state)
    loads += 1
    if loads % 2:
        continue
    kept.append(state)
    if len(kept) > 3:
        check(kept.pop(random.randrange(4)))
for state in kept:
    check(state)
print(loads, gone)
"""


@pytest.fixture(params=["tmpfs", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk" or not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="portus-read-") as name:
        yield Path(name)


@pytest.mark.long
@pytest.mark.timeout(120 + 3 * READ_S)
def test_a_reader_that_maps_files_sees_no_byte_of_another_step(folder: Path) -> None:
    run = str(folder / "run")
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    train = subprocess.Popen(
        [sys.executable, "-c", TRAIN, run],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert train.stdin is not None
    assert train.stdout is not None
    with train:
        assert train.stdout.readline() == "ready\n"
        reader = subprocess.Popen(
            [sys.executable, "-c", READ, run, str(READ_S)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        steps = spares = 0
        while reader.poll() is None:
            steps, spares = map(int, train.stdout.readline().split())
            train.stdin.write("\n")
            train.stdin.flush()
        output, errors = reader.communicate()
        train.stdin.close()
        train.stdout.readline()
    assert reader.returncode == 0, errors
    loads = int(output.split()[0])
    assert train.returncode == 0
    assert loads > READ_S
    assert steps > READ_S
    assert spares > steps / 10, "or no file was written over"
