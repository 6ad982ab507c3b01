"""Directories of checkpoints, by their names, and the directories for a run's ``.portus``."""

from __future__ import annotations

import contextlib
import os
import re

import portus


def is_inside(path: str, directory: str) -> bool:
    """Return whether ``path`` is ``directory``, or below it; both absolute."""
    return os.path.commonpath([path, directory]) == directory


def roots(project: str | None) -> list[str]:
    """Return the directories that may have a pool before any checkpoint was named."""
    found = [] if project is None else [os.path.abspath(project)]
    with contextlib.suppress(OSError):  # the working directory may be gone
        found.append(os.getcwd())
    return found


def step_of(checkpoint: str) -> int | None:
    """Return the number at the end of the directory's name, as in ``step_1200`` and
    ``checkpoint-7``."""
    found = re.search(r"(\d{1,15})$", os.path.basename(checkpoint))
    return int(found[1]) if found else None


def numbered_directories(
    directory: str, like: re.Pattern[str] = re.compile(".*", re.DOTALL)
) -> list[str]:
    """Return the directories in ``directory`` whose name is ``like`` that and has a number, as
    those of automatic naming; lowest first. Raises ``MediumError``."""
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise portus.MediumError(
            error.errno, f"{directory}: cannot list: {error.strerror}"
        ) from error
    found = []
    for name in names:
        number = re.search(r"(\d+)\D*$", name)
        path = os.path.join(directory, name)
        if number and like.fullmatch(name) and os.path.isdir(path):
            found.append((int(number[1]), path))
    return [path for _, path in sorted(found)]


def surplus(newest: str, limit: int | None) -> list[str]:
    """Return the checkpoints beside ``newest`` that exceed ``total_limit``, oldest first. Raises
    ``MediumError``."""
    if limit is None:
        return []
    others = [path for path in numbered_directories(os.path.dirname(newest)) if path != newest]
    return others[: max(0, len(others) - max(0, limit - 1))]
