"""Saves of several files, in a process that kills itself at a change of a name."""

from __future__ import annotations

import os
import shutil

import torch

from portus.engine.paths.process import saver
from portus.engine.paths.request import FileToSave
from tests.adapters.kills import Kills
from tests.nursery import Say


def run(say: Say, where: str, number: int, way: str) -> None:
    """Say how many changes there were. way: "new" directories, or "last", the same one."""
    os.chdir(where)
    kills = Kills(number)
    for step in range(1, 5):
        directory = f"c{step}" if way == "new" else "last"
        os.makedirs(directory, exist_ok=True)
        state = {"step": step, "x": torch.ones(step)}
        files = [FileToSave(f"{directory}/{name}.pt", state) for name in "abc"]
        handle = saver().save_files(files)
        if way == "new" and step > 1:  # too early
            shutil.rmtree(f"c{step - 1}")
        handle.wait()
        with open("told", "w") as file:
            file.write(str(step))
    say(str(number - kills.left))
