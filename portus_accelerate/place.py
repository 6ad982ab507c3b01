"""Where a run's pool is, and what the run is called in it."""

from __future__ import annotations

import hashlib
import os
import re
from typing import Final

import portus

_NAME_MAX: Final = 120


def root_of(checkpoint: str, project: str | None, uploaded: str | None = None) -> str:
    """The directory that gets ``.portus``: on the file system of the checkpoints, not among them.

    checkpoint: a checkpoint directory. project: the Accelerator's ``project_dir``. uploaded: a
    directory of which everything is uploaded: none in it.
    """
    above = os.path.dirname(checkpoint)
    for candidate in roots(project):
        is_free = uploaded is None or not _is_inside(candidate, uploaded)
        if is_free and _is_inside(above, candidate) and _device(candidate) == _device(above):
            return candidate
    if uploaded is not None and _is_inside(above, uploaded):
        return os.path.dirname(uploaded)
    return above


def _is_inside(path: str, directory: str) -> bool:
    return os.path.commonpath([path, directory]) == directory


def home_of(checkpoint: str, project: str | None, uploaded: str | None = None) -> str:
    """The directory for what is not in a pool: notes, and checkpoints that were cut off. It is on
    the file system of the checkpoints, wherever the pool is, and holds the pool by default."""
    return os.path.join(root_of(checkpoint, project, uploaded), ".portus")


def roots(project: str | None) -> list[str]:
    """Where a pool may be before any checkpoint was named."""
    return [os.path.abspath(each) for each in (project, os.getcwd()) if each is not None]


def name_of(checkpoint: str, root: str, *, is_shared: bool) -> str:
    """A name for the run that saves ``checkpoint``: the same after a restart.

    Where several projects share a pool directory, a part of a digest keeps them apart.
    """
    above = os.path.dirname(checkpoint)
    below = os.path.relpath(above, root).replace(os.sep, "/")
    name = "/".join(part for part in below.split("/") if part not in (".", ".."))
    name = re.sub("(^|/)checkpoints$", "", name) or os.path.basename(root) or "run"
    if is_shared or len(name) > _NAME_MAX:
        mark = hashlib.sha256(os.fsencode(above)).hexdigest()[:8]
        name = f"{name[-_NAME_MAX:]}-{mark}"
    return name


def step_of(checkpoint: str) -> int | None:
    """The number at the end of the directory's name, as in ``step_1200`` and ``checkpoint-7``."""
    found = re.search(r"(\d{1,15})$", os.path.basename(checkpoint))
    return int(found[1]) if found else None


def numbered(directory: str) -> list[str]:
    """The directories in ``directory`` that have a number in their name, as those of automatic
    naming do; lowest first. Raises ``MediumError``."""
    found = []
    for name in names_in(directory):
        number = re.search(r"(\d+)\D*$", name)
        if number and os.path.isdir(os.path.join(directory, name)):
            found.append((int(number[1]), os.path.join(directory, name)))
    return [path for _, path in sorted(found)]


def names_in(directory: str) -> list[str]:
    """The names in ``directory``. Raises ``MediumError``."""
    try:
        return os.listdir(directory)
    except OSError as error:
        raise portus.MediumError(
            error.errno, f"{directory}: cannot list: {error.strerror}"
        ) from error


def surplus(newest: str, limit: int | None) -> list[str]:
    """Checkpoints beside ``newest`` that ``total_limit`` has no room for, oldest first. Raises
    ``MediumError``."""
    if limit is None:
        return []
    others = [path for path in numbered(os.path.dirname(newest)) if path != newest]
    return others[: max(0, len(others) - max(0, limit - 1))]


def _device(path: str) -> int:
    """The file system of ``path``, or of what is to hold it. Raises ``MediumError``."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    try:
        return os.stat(path).st_dev
    except OSError as error:
        raise portus.MediumError(
            error.errno, f"{path}: cannot ask for its file system: {error.strerror}"
        ) from error
