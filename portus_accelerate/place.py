"""Where a run's pool is, and what the run is called in it."""

from __future__ import annotations

import contextlib
import os
import re

import portus
from portus_accelerate.settings import Settings


def run_of(
    checkpoint: str, settings: Settings, project: str | None, uploaded: str | None = None
) -> portus.Run:
    """The run that saves ``checkpoint``: the same after a restart. Its ``.portus`` is on the file
    system of the checkpoints, not among them, and holds the pool by default; notes in any case, and
    checkpoints that were cut off.

    checkpoint: a checkpoint directory. project: the Accelerator's ``project_dir``. uploaded: a
    directory of which everything is uploaded: no ``.portus`` in it. Raises ``MediumError``.
    """
    above = os.path.dirname(checkpoint)
    fit = [root for root in roots(project) if _is_inside(above, root)]
    otherwise = above
    if uploaded is not None:
        fit = [root for root in fit if not _is_inside(root, uploaded)]
        otherwise = os.path.dirname(uploaded) if _is_inside(above, uploaded) else above
    return portus.Run.beside(
        above,
        roots=fit,
        otherwise=otherwise,
        pool=settings.pool,
        name=settings.model,
    )


def _is_inside(path: str, directory: str) -> bool:
    return os.path.commonpath([path, directory]) == directory


def roots(project: str | None) -> list[str]:
    """Where a pool may be before any checkpoint was named."""
    found = [] if project is None else [os.path.abspath(project)]
    with contextlib.suppress(OSError):  # the working directory may be gone
        found.append(os.getcwd())
    return found


def step_of(checkpoint: str) -> int | None:
    """The number at the end of the directory's name, as in ``step_1200`` and ``checkpoint-7``."""
    found = re.search(r"(\d{1,15})$", os.path.basename(checkpoint))
    return int(found[1]) if found else None


def numbered_directories(directory: str) -> list[str]:
    """The directories in ``directory`` that have a number in their name, as those of automatic
    naming do; lowest first. Raises ``MediumError``."""
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise portus.MediumError(
            error.errno, f"{directory}: cannot list: {error.strerror}"
        ) from error
    found = []
    for name in names:
        number = re.search(r"(\d+)\D*$", name)
        if number and os.path.isdir(os.path.join(directory, name)):
            found.append((int(number[1]), os.path.join(directory, name)))
    return [path for _, path in sorted(found)]


def surplus(newest: str, limit: int | None) -> list[str]:
    """Checkpoints beside ``newest`` that ``total_limit`` has no room for, oldest first. Raises
    ``MediumError``."""
    if limit is None:
        return []
    others = [path for path in numbered_directories(os.path.dirname(newest)) if path != newest]
    return others[: max(0, len(others) - max(0, limit - 1))]
