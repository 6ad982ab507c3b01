"""Runs the jobs of ``jobs``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.warm import Warm


def run(root: Path, *tasks: str, **environment: str) -> str:
    """Jobs one after another, in processes of their own; what they printed."""
    with (
        tempfile.NamedTemporaryFile() as errors,
        Warm("tests.unit.dcp.jobs").start(
            "run", str(root), tasks, environment, errors.name
        ) as child,
    ):
        printed = child.rest()
        assert child.wait() == 0, errors.read().decode(errors="replace")
    return "\n".join(printed)
