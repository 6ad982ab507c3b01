"""Portus for PyTorch Lightning: ``Trainer(plugins=[PortusIO()])``, and nothing else changes.

Works with ``lightning.pytorch``, ``lightning.fabric``, ``pytorch_lightning`` and
``lightning_fabric``. Names are imported on first use, so that this costs nothing where Lightning
alone is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from portus_lightning.io import PortusIO as PortusIO

__all__ = ["PortusIO"]

_MODULE_OF: Final = {"PortusIO": "portus_lightning.io"}


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'portus_lightning' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
