"""Entry points, from which Lightning gets the callbacks to add to every Trainer.

Each is called for every Trainer of every program on a machine with Portus, so it does nothing,
and imports nothing, unless the program has made a ``PortusIO``.
"""

from __future__ import annotations

import importlib
import sys


def companion_callbacks() -> list[object]:
    """Return the companion callback, for Trainers of ``lightning.pytorch``."""
    return _callbacks("portus_lightning.of_lightning")


def companion_callbacks_for_pytorch_lightning() -> list[object]:
    """Return the companion callback, for Trainers of ``pytorch_lightning``."""
    return _callbacks("portus_lightning.of_pytorch_lightning")


def _callbacks(module: str) -> list[object]:
    io = sys.modules.get("portus_lightning.io")
    if io is None or not io.INSTANCES:
        return []
    return [importlib.import_module(module).PortusCompanion()]
