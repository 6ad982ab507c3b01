"""The entry points ``torch.backends`` of this distribution: torch calls them at the end of its own
import, in every program on a machine with Portus.

So this module imports nothing but Python's own, is quick, and never raises, whatever is broken in
the packages behind it, or missing: an error here would break ``import torch`` for everybody.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

_FLAGS = ("PORTUS_ACCELERATE", "PORTUS_DEEPSPEED")


def allow_references() -> None:
    """Let ``torch.load`` follow pointers."""
    _register("portus._autoload", "torch.load cannot follow pointers")


def follow_the_flag() -> None:
    """Turn Portus on in Accelerate, where the environment says so."""
    _register("portus_accelerate", "the flag has no effect")


def _register(module: str, without: str) -> None:
    try:
        importlib.import_module(module).register()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if any(os.environ.get(flag) for flag in _FLAGS):
            with contextlib.suppress(Exception):  # stderr may be closed, or not be there
                sys.stderr.write(f"portus: {without}: {error!r}\n")
