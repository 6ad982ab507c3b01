"""What a process that cannot import Portus finds in checkpoint files of torch's."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path

from tests.nursery import Say, nursery


def steps_and_sums(directory: Path) -> dict[str, tuple[int, float]]:
    """Of each file with weights of ``tiny.Net`` in the directory: its step, and the sum of the
    first ones. Each is whole."""
    if not directory.is_dir():
        return {}
    with nursery(__name__, TORCH_DEVICE_BACKEND_AUTOLOAD="0").start(
        "look", str(directory)
    ) as child:
        found = json.loads(child.line())
        assert child.wait() == 0
    return {name: (step, total) for name, (step, total) in found.items()}


# In the nursery.


def warm_up() -> None:
    """What reads them."""
    import torch  # noqa: F401


def look(say: Say, directory: str) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0].startswith("portus")]:
        sys.modules[name] = None  # type: ignore[assignment]
    import torch

    found = {}
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if name.endswith(".ckpt"):
            assert zipfile.ZipFile(path).testzip() is None, name
            state = torch.load(path, weights_only=True)
            weight = state["state_dict"]["layers.0.weight"]
            found[name] = [state["global_step"], weight.double().sum().item()]
    say(json.dumps(found))
