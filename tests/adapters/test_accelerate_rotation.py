"""Scripts that rotate checkpoints by hand and are killed right after: the old or the new one is
there, never nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only")

SCRIPT = """
import os, shutil, signal, sys
import torch
from accelerate import Accelerator
import portus_accelerate

phase, way = sys.argv[1:]
accelerator = Accelerator(cpu=True, project_dir="run")
portus_accelerate.enable(accelerator)
model = torch.nn.Linear(1024, 10_000, bias=False)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))

def save(step):
    if way == "swap":
        accelerator.save_state("run/latest.new")
        shutil.rmtree("run/latest", ignore_errors=True)
        os.rename("run/latest.new", "run/latest")
    else:
        accelerator.save_state(f"run/step_{step}")
        if step > 1:
            shutil.rmtree(f"run/step_{step - 1}")

if phase == "train":
    for step in (1, 2, 3):
        accelerator.backward(model(torch.randn(2, 1024)).square().mean())
        optimizer.step()
        torch.nn.init.constant_(model.weight, step)
        save(step)
        if step == 2:
            portus_accelerate.wait(accelerator)
    os.kill(os.getpid(), signal.SIGKILL)
for name in ("latest",) if way == "swap" else ("step_3", "step_2"):
    try:
        accelerator.load_state("run/" + name)
    except Exception as error:
        print(name, error)
        continue
    print("loaded", model.weight[0, 0].item())
    break
"""


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("way", ["swap", pytest.param("rotate", marks=pytest.mark.long)])
def test_a_script_that_rotates_by_hand_and_is_killed_has_the_old_or_the_new(
    way: str, tmp_path: Path
) -> None:
    def run(phase: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, phase, way],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    killed = run("train")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    found = run("load")
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] in ("loaded 2.0", "loaded 3.0"), found.stdout
