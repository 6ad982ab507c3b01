"""What the caller of a save asked for, looked at before anything is done."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from portus.errors import UsageError
from portus.format.layout import MAGIC
from portus.format.reference import SIZE_MAX
from portus.format.text import is_text
from portus.index.keep import checked_metrics
from portus.spec import checked_step

References = Mapping[str, str | None]
"""Absolute paths of reference files, and the part of the state that each leads to (None: all)."""


@dataclass(frozen=True, slots=True)
class WantedSave:
    """See ``Checkpointer.save``."""

    step: int
    references: References
    synchronous: bool
    token: bytes | None
    metrics: Mapping[str, float]

    @classmethod
    def of(
        cls,
        state: object,
        step: int,
        *,
        reference: str | os.PathLike[str] | Mapping[str, str] | None,
        synchronous: bool,
        token: bytes | None,
        metrics: Mapping[str, float] | None,
    ) -> WantedSave:
        """Raises ``UsageError`` for what makes no sense."""
        files = _references(reference, state)
        scored = checked_metrics(metrics)
        return cls(checked_step(step), files, synchronous, _checked(token), scored)


def check_model(model: str) -> None:
    """Raises ``UsageError`` for what is no name of a model."""
    is_name = isinstance(model, str) and model and is_text(model)
    if not is_name or len(model.encode()) > 200:
        raise UsageError(f"model: expected a name of 1 to 200 bytes, found {model!r}")


def _checked(token: bytes | None) -> bytes | None:
    if token is not None and len(token) != 16:
        raise UsageError(f"token: expected 16 bytes, found {len(token)}")
    return token


def _references(
    reference: str | os.PathLike[str] | Mapping[str, str] | None, state: object
) -> References:
    """Absolute paths, and which part of ``state`` each is to lead to."""
    if reference is None:
        return {}
    if not isinstance(reference, Mapping):
        return {_checked_path(os.path.abspath(os.fspath(reference))): None}
    for path, part in reference.items():
        if not isinstance(state, dict) or part not in state:
            raise UsageError(
                f"reference: {path} should lead to {part!r}, which is not a key of state"
            )
    return {_checked_path(os.path.abspath(path)): part for path, part in reference.items()}


def _checked_path(path: str) -> str:
    """A reference file takes the place of what is at ``path``: not of a device, nor of a pool."""
    kind = _in_the_way(path)
    if kind is not None:
        raise UsageError(f"reference: {path} is {kind}, which a file would replace; name another")
    return path


def _in_the_way(path: str) -> str | None:
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            return None  # made way for, or refused where the file is put
        if not stat.S_ISREG(status.st_mode):
            return "not a regular file"
        if status.st_size > SIZE_MAX:
            with open(path, "rb") as file:
                return "a pool" if file.read(len(MAGIC)) == MAGIC else None
    except (OSError, ValueError):
        pass  # nothing is there, or nobody can tell
    return None
