"""The generators of this process, of all devices, as Accelerate itself would pickle them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def take() -> dict[str, Any]:
    """Where they stand."""
    found = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def put(states: dict[str, Any]) -> None:
    """Put them where they stood when they were ``take``."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
