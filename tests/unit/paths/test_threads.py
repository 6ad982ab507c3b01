"""What the threads of Portus may do: a program may fork, or end, at any moment of theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only")


def test_no_thread_imports_a_module(tmp_path: Path) -> None:
    """A child that is forked in the middle of that finds half a module: ``numpy.ma``, after which
    each ``np.unique`` there failed, and each save."""
    program = (
        "import os, sys, threading\n"
        "import torch, portus\n"
        "imported = []\n"
        "def note(event, arguments):\n"
        "    if event == 'import' and threading.current_thread() is not threading.main_thread():\n"
        "        imported.append(arguments[0])\n"
        "sys.addaudithook(note)\n"
        "model = torch.nn.Linear(64, 64)\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "for place in ('run', 'run.portus'):\n"
        "    mirror = 'file://' + os.getcwd() + '/mirror' if place == 'run' else None\n"
        "    with portus.Checkpointer(place, mirror=mirror) as checkpointer:\n"
        "        for step in range(3):\n"
        "            model(torch.ones(64)).sum().backward()\n"
        "            optimizer.step()\n"
        "            state = {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}\n"
        "            checkpointer.save(state, step)\n"
        "portus.save(state, 'a.pt', wait=True)\n"
        "print(imported)\n"
    )
    # Not in the warm process, which has imported what is imported late.
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
