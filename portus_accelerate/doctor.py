"""The findings of ``portus doctor`` about Accelerate: if the flag takes effect, or why not."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Final

from portus_accelerate import FLAG, is_on

ASKED_S_MAX: Final = 60.0
"""Seconds that importing torch and Accelerate may take, on a machine that is doing other work."""

_PROGRAM: Final = """
import sys
sys.path[:] = filter(None, sys.path)  # what lies here would come first, as for no script
import torch, accelerate.accelerator
from portus_accelerate.autoload import status
print(status())
"""

Finding = tuple[str, str, str]
"""Name, text, and the remedy, empty if none is needed."""


def findings() -> list[Finding]:
    """Return the findings of a new process, which imports as a script would. Takes seconds."""
    if importlib.util.find_spec("accelerate") is None:
        return [("-", "not installed", "")]
    answer = _answer()
    if answer.startswith("on, "):
        if is_on():
            return [("flag", f"takes effect: {answer}", "")]
        text = f"off here: ${FLAG} is not set. It would take effect: {answer}"
        return [("flag", text, "")]
    here = "is set, and has NO effect" if is_on() else "is off here, and would have NO effect"
    return [("flag", f"{here}: {answer}", _advice(answer))]


def _answer() -> str:
    """Return ``status`` in a process with the flag on, or the error that process died of."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env={**os.environ, FLAG: "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=ASKED_S_MAX,
        )
    except subprocess.TimeoutExpired:
        return f"importing torch and Accelerate took more than {ASKED_S_MAX:.0f} s"
    said = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return said[-1] if said else f"a process that imports Accelerate ended with {done.returncode}"


def _advice(answer: str) -> str:
    if "PORTUS_DISABLE" in answer:
        return "unset PORTUS_DISABLE"
    if "torch did not call" in answer:
        return "unset TORCH_DEVICE_BACKEND_AUTOLOAD, or use `-m portus_accelerate.run`"
    if "settings are wrong" in answer:
        return "mend `portus_config:`, or $PORTUS_ACCELERATE_CONFIG"
    if "is not supported by this version" in answer:
        return "install an Accelerate in that range, or a newer portus-checkpoint"
    return "install portus-checkpoint again, then Accelerate"
