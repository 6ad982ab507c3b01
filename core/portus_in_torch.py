"""The entry points ``torch.backends`` of this distribution: torch calls them at the end of its own
import, in every program on a machine with Portus.

So this module imports nothing but Python's own, is quick, and never raises, whatever is broken in
the packages behind it, or missing: an error here would break ``import torch`` for everybody.
"""

from __future__ import annotations

import importlib
import os
import sys

_FLAG = "PORTUS_ACCELERATE"


def allow_references() -> None:
    """Let ``torch.load`` read reference files."""
    try:
        importlib.import_module("portus._autoload").register()
    except Exception as error:
        if os.environ.get(_FLAG):
            sys.stderr.write(f"portus: torch.load cannot read reference files: {error!r}\n")


def follow_the_flag() -> None:
    """Turn Portus on in Accelerate, where the environment says so."""
    try:
        importlib.import_module("portus_accelerate").register()
    except Exception as error:
        if os.environ.get(_FLAG):
            sys.stderr.write(f"portus: the flag for Accelerate has no effect: {error!r}\n")
