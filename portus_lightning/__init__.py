"""Portus for PyTorch Lightning: ``Trainer(plugins=[PortusIO()])``, and nothing else changes.

Works with ``lightning.pytorch``, ``lightning.fabric``, ``pytorch_lightning`` and
``lightning_fabric``. Names are imported on first use, so this package costs nothing in programs
that use Lightning alone.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from portus_lightning.io import PortusIO as PortusIO
    from portus_lightning.of_lightning import PortusCheckpoint as PortusCheckpoint

__all__ = ["PortusCheckpoint", "PortusIO"]

_MODULE_OF: Final = {
    "PortusCheckpoint": "portus_lightning.of_lightning",
    "PortusIO": "portus_lightning.io",
}


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'portus_lightning' has no attribute {name!r}")
    # Each has a ``ModelCheckpoint`` of its own; if both are imported, name the module.
    is_other = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    if name == "PortusCheckpoint" and is_other:
        module = "portus_lightning.of_pytorch_lightning"
    value: object = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
