"""Directories for checkpoints, made where a framework names them."""

from __future__ import annotations

import os

from portus.errors import MediumError, printable


def make_directory(path: str) -> None:
    """Make a directory, and those above it; nothing if it is there. Raises ``MediumError``."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise MediumError(
            error.errno, f"{printable(path)}: cannot make the directory: {error.strerror}"
        ) from error
