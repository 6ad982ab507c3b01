"""Portus for Hugging Face Accelerate: turn it on by a flag, and the training script stays as it is.

Three ways to say it: ``portus_config:`` in the YAML of ``accelerate launch``; the environment
variable ``PORTUS_ACCELERATE=1`` for any other launcher; ``accelerate launch -m
portus_accelerate.run train.py``. Or by hand, in the script: ``portus_accelerate.enable(...)``.

Names are imported on first use: this module is loaded by every program that imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from portus_accelerate.patch import enable as enable
    from portus_accelerate.patch import status as status

__all__ = ["enable", "status"]

_MODULE_OF: Final = {"enable": "portus_accelerate.patch", "status": "portus_accelerate.patch"}


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'portus_accelerate' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
