"""A training that saves to a storage host at every step, for ``test_host``."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import deque

import torch

import portus
from portus.engine.job.settings import Settings
from portus.reach.index.place import Place
from portus.reach.training.training_files import TrainingFiles
from tests.nursery import Say

SIZES = (512, 256, 64, 1)


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, the same ones each time."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    pairs = itertools.pairwise(SIZES)
    model = torch.nn.Sequential(*[torch.nn.Linear(before, after) for before, after in pairs])
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def step_once(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step, on data that its number gives."""
    data = torch.randn(8, SIZES[0], generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> object:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def after(steps: int) -> object:
    """The state of an undisturbed training."""
    model, optimizer = training()
    for step in range(1, steps + 1):
        step_once(model, optimizer, step)
    return state_of(model, optimizer, steps)


def save_directories(say: Say, url: str, root: str) -> None:
    """Train and save, each step to a directory of two pointers; the fourth when there is a file
    ``go``."""
    logging.disable()
    model, optimizer = training()
    files = TrainingFiles(Settings(), of_directories=True, pool=Place.parse(url))
    files.begin("run", os.path.join(root, ".portus"), root)
    for step in range(1, 5):
        while step == 4 and not os.path.exists(os.path.join(root, "go")):
            time.sleep(0.001)
        step_once(model, optimizer, step)
        state = {"model.pt": model.state_dict(), "rest.pt": optimizer.state_dict()}
        handle = files.save_directory(os.path.join(root, f"step_{step}"), state, step)
        say(f"asked {step}")
        handle.wait()
        say(f"saved {step}")


def train_for_ever(say: Say, url: str, secret_path: str | None = None, pause_s: float = 0) -> None:
    """Train on from what is there, and save at each step; say what was done and what is durable."""
    logging.disable()
    if secret_path is not None:
        os.environ["PORTUS_SECRET_FILE"] = secret_path
    model, optimizer = training()
    step = 0
    with portus.PoolCheckpointer(url, fence_timeout=20) as checkpointer:
        if checkpointer.steps():
            state = checkpointer.load()
            assert isinstance(state, dict)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            step = state["step"]
        say(f"resumed {step}")
        handles: deque[tuple[int, portus.SaveHandle]] = deque()
        while True:
            step += 1
            time.sleep(pause_s)
            step_once(model, optimizer, step)
            handles.append((step, checkpointer.save(state_of(model, optimizer, step), step)))
            say(f"trained {step}")
            while handles and handles[0][1].done:
                number, handle = handles.popleft()
                try:
                    handle.wait(0)
                    say(f"saved {number}")
                except portus.PortusError as error:
                    say(f"lost {number} {type(error).__name__}")
