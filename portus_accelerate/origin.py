"""What a checkpoint directory says of itself: of which run and step its files are.

A directory put together by hand, from two checkpoints, is refused: it would load, and be no state
that training ever had. Not seen: files of the same run and step, saved twice. What else does not
fit is found by Accelerate and torch; here it is said of which checkpoint, and on which rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import portus

_SUFFIXES: Final = (".safetensors", ".bin", ".pkl", ".pt")
"""Of the files that Accelerate writes."""

_OF_ONE_WRITER: Final = re.compile(r"(~\d+)?(/rank-\d+-of-\d+)?$")
"""What a run's name ends with where several processes save it: each has a pool file of its own."""


@dataclass(frozen=True, slots=True)
class Origin:
    """``directory`` was saved as ``step`` of ``model``."""

    directory: str
    model: str
    step: int

    def __str__(self) -> str:
        return f"{self.directory} (model {self.model!r}, step {self.step})"


def origin_of(directory: str) -> Origin | None:
    """None if nothing in ``directory`` says so: it is none of ours.

    Raises ``UsageError`` naming the files and steps if they are of several checkpoints,
    ``CorruptionError`` for a damaged file.
    """
    found: dict[Origin, list[str]] = {}
    for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else ():
        path = os.path.join(directory, name)
        reference = portus.read_reference(path)
        if reference is not None:
            said: tuple[str, int] | None = (reference.model, reference.step)
        else:
            said = _noted_in(path)
        if said is not None:
            run = _OF_ONE_WRITER.sub("", said[0])
            found.setdefault(Origin(directory, run, said[1]), []).append(name)
    if len(found) > 1:
        parts = [
            f"{', '.join(names)} of model {origin.model!r}, step {origin.step}"
            for origin, names in found.items()
        ]
        raise portus.UsageError(
            f"{directory}: its files are of different checkpoints: {'; '.join(parts)}. Load a "
            "directory as it was saved"
        )
    return next(iter(found), None)


def note(model: str, step: int) -> bytes:
    """What each file of a checkpoint says of itself."""
    return json.dumps({"model": model, "step": step}).encode()


def _noted_in(path: str) -> tuple[str, int] | None:
    """Model and step."""
    if not os.path.isfile(path) or os.path.splitext(path)[1] not in _SUFFIXES:
        return None
    data = portus.read_note(path)
    with contextlib.suppress(ValueError, LookupError, TypeError):
        said = json.loads(data or b"null")
        return str(said["model"]), int(said["step"])
    return None


def saying_of_what(stock: Callable[[str | None], Any], rank: int) -> Callable[[str | None], Any]:
    """``stock``, which loads a directory, but what it raises says of which checkpoint and rank, and
    is of the same type, for who catches it. Raises as ``origin_of``, too."""

    def load(directory: str | None) -> Any:
        origin = None if directory is None else origin_of(directory)
        try:
            return stock(directory)
        except (RuntimeError, ValueError, FileNotFoundError) as error:
            said = None if origin is None else _said(error, origin, rank)
            if said is None:
                raise
            raise said from error

    return load


def _said(error: Exception, origin: Origin, rank: int) -> Exception | None:
    where = f"rank {rank}: {origin}"
    if type(error) in (RuntimeError, ValueError):
        return type(error)(f"{where} does not fit what the script prepared: {error}")
    if type(error) is FileNotFoundError:
        return FileNotFoundError(error.errno, f"{where} lacks a file", error.filename)
    return None  # it says so itself, as ours do


def of_others(origin: Origin, rank: int, saved: int | None, now: int) -> str | None:
    """What to say if this rank found no states of its own, or another number of processes saved.

    saved: how many; None if this rank found no states.
    """
    if saved is None:
        return (
            f"rank {rank}: {origin} holds no random states of this rank: its data and random "
            "numbers do not resume where they were"
        )
    if saved != now and rank == 0:
        return (
            f"rank {rank}: {origin} was saved by {saved} processes and is loaded by {now}: the "
            "weights are whole, and a plain loader delivers each remaining sample once; other "
            "loaders and random numbers do not resume where they were"
        )
    return None
