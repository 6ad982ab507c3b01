"""``kill -9`` of plain loops that save to paths: what is visible is whole, equals the state at its
step, and is read by a process that has never heard of Portus. ``PORTUS_TEST_KILLS=60`` kills each
loop as often."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from portus.engine.paths import process
from portus.engine.paths.process import load
from tests.crash.path_saver import WAYS
from tests.crash.saver import Training
from tests.same import assert_same
from tests.warm import Warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only")

KILLS = int(os.environ.get("PORTUS_TEST_KILLS", "8"))
DELAY_S_MAX = 0.05
LINES_MAX = 6

STOCK = """
import json, sys, zipfile
sys.modules["portus"] = None
import torch
for line in sys.stdin:
    name = json.loads(line)
    assert zipfile.ZipFile(name).testzip() is None
    print(json.dumps(torch.load(name, weights_only=False)["step"]), flush=True)
"""


@pytest.fixture(params=["tmpfs", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk" or not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="portus-kill-") as name:
        yield Path(name)


def visible(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != ".portus")


@pytest.mark.long
@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.timeout(120 + 10 * KILLS)
def test_whatever_is_visible_after_a_kill_is_whole_for_stock_torch(
    folder: Path, way: str, seed: int
) -> None:
    random_ = random.Random(seed)
    children = Warm("tests.crash.path_saver")
    stock = subprocess.Popen(
        [sys.executable, "-c", STOCK],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert stock.stdin is not None
    assert stock.stdout is not None
    newest = 0
    with stock:
        for number in range(KILLS):
            with children.start("train_for_ever", str(folder), way) as child:
                lines = [child.line() for _ in range(random_.randint(1, LINES_MAX))]
                assert lines[0] == f"resumed {newest}", f"kill {number}"
                time.sleep(random_.uniform(0, DELAY_S_MAX))
                lines += child.kill()
            told = max(int(line.rpartition(" ")[2]) for line in lines)
            process.recover_left(str(folder))  # as the first save or load of the next program does
            found = []
            for name in visible(folder):
                stock.stdin.write(json.dumps(str(folder / name)) + "\n")
                stock.stdin.flush()
                step = json.loads(stock.stdout.readline())
                state = load(folder / name, weights_only=False)
                assert state["step"] == step
                assert_same(state, Training(step).state())
                if way != "several" or name.startswith("part-2-"):
                    found.append(step)
            assert max(found, default=0) >= told, f"kill {number}: {visible(folder)}"
            newest = max(found, default=0)
        stock.stdin.close()
    assert newest > KILLS
