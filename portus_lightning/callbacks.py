"""Entry points, from which Lightning gets the callbacks to add to every Trainer.

Each is called for every Trainer of every program on a machine with Portus, so it does nothing,
and imports nothing, unless the program has made a ``PortusIO``.
"""

from __future__ import annotations

import sys


def companion_callbacks() -> list[object]:
    """Return the companion callback, for Trainers of ``lightning.pytorch``."""
    if not _is_used():
        return []
    from portus_lightning.companion_of_lightning import PortusCompanion

    return [PortusCompanion()]


def companion_callbacks_for_pytorch_lightning() -> list[object]:
    """Return the companion callback, for Trainers of ``pytorch_lightning``."""
    if not _is_used():
        return []
    from portus_lightning.companion_of_pytorch_lightning import PortusCompanion

    return [PortusCompanion()]


def _is_used() -> bool:
    module = sys.modules.get("portus_lightning.io")
    return module is not None and bool(module.INSTANCES)
