"""Portus for Hugging Face Accelerate: turn it on by a flag, and the training script stays as it is.

Three ways to set it: ``portus_config:`` in the YAML of ``accelerate launch``; the environment
variable ``PORTUS_ACCELERATE=1`` for any other launcher; ``accelerate launch -m
portus_accelerate.run train.py``. Or in the script: ``portus_accelerate.enable(...)``.

Names are imported on first use: this module is loaded by every program that imports torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from portus_accelerate.autoload import status as status
    from portus_accelerate.callback import PortusCallback as PortusCallback
    from portus_accelerate.patch import cadence as cadence
    from portus_accelerate.patch import enable as enable
    from portus_accelerate.patch import should_leave as should_leave
    from portus_accelerate.patch import should_save as should_save
    from portus_accelerate.patch import wait as wait

__all__ = ["PortusCallback", "cadence", "enable", "should_leave", "should_save", "status", "wait"]

FLAG: Final = "PORTUS_ACCELERATE"
OF_DEEPSPEED: Final = "PORTUS_DEEPSPEED"
"""The same flag for DeepSpeed without Accelerate."""

_MODULE_OF: Final = {
    "PortusCallback": "portus_accelerate.callback",
    "cadence": "portus_accelerate.patch",
    "enable": "portus_accelerate.patch",
    "should_leave": "portus_accelerate.patch",
    "should_save": "portus_accelerate.patch",
    "status": "portus_accelerate.autoload",
    "wait": "portus_accelerate.patch",
}


def is_on(flag: str = FLAG) -> bool:
    """Return True if the environment turns Portus on for Accelerate, or for ``flag``'s owner."""
    return os.environ.get(flag, "").lower() not in ("", "0", "false", "no", "off")


def register() -> None:
    """Watch for Accelerate if the flag is on. The entry point in ``portus_in_torch`` calls it at
    the end of ``import torch``, in every program on a machine with Portus: it must be fast."""
    if is_on() or is_on(OF_DEEPSPEED) or is_launcher():
        importlib.import_module("portus_accelerate.autoload").register()


def is_launcher() -> bool:
    """Return True in the process of ``accelerate launch``, by whatever name it was started."""
    started = sys.argv[:1] if sys.argv[:1] != ["-m"] else sys.orig_argv  # the module, later
    return any("accelerate" in os.path.basename(each) for each in started)


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'portus_accelerate' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
