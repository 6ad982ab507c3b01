"""The origin of a checkpoint directory: the run and step of its files.

A directory put together by hand, from two checkpoints, is refused: it would load, and be no state
that training ever had. Not detected: files of the same run and step, saved twice. Accelerate and
torch find other errors; here the checkpoint and the rank are added to them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import portus

_SUFFIXES: Final = (".safetensors", ".bin", ".pkl", ".pt")
"""Suffixes of the files that Accelerate writes."""

_OF_ONE_WRITER: Final = re.compile(r"(~\d+)?(/rank-\d+-of-\d+)?$")
"""The end of a run's name if several processes save it: each has a pool file of its own."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of ``directory``: saved as ``step`` of ``model``."""

    directory: str
    model: str
    step: int

    def __str__(self) -> str:
        return f"{self.directory} (model {self.model!r}, step {self.step})"


def origin_of(directory: str) -> Origin | None:
    """Return the origin of a checkpoint; None if no file in ``directory`` names one.

    Raises ``UsageError`` naming the files and steps if they are of several checkpoints,
    ``CorruptionError`` for a damaged file.
    """
    found: dict[Origin, list[str]] = {}
    for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else ():
        path = os.path.join(directory, name)
        pointer = portus.read_reference(path)  # following it would open a pool
        said = _read_note(path) if pointer is None else (pointer.model, pointer.step)
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
    """Return the note of its origin that each file of a checkpoint has."""
    return json.dumps({"model": model, "step": step}).encode()


def _read_note(path: str) -> tuple[str, int] | None:
    """Return model and step from a file's note."""
    if not os.path.isfile(path) or os.path.splitext(path)[1] not in _SUFFIXES:
        return None
    data = portus.read_note(path)
    with contextlib.suppress(ValueError, LookupError, TypeError):
        said = json.loads(data or b"null")
        return str(said["model"]), int(said["step"])
    return None


@contextlib.contextmanager
def naming(directory: str, rank: int) -> Iterator[None]:
    """Add the checkpoint and the rank to the errors raised inside, where ``directory`` is loaded.
    Their type stays the same, for handlers. Raises as ``origin_of``, too."""
    origin = origin_of(directory)
    where = f"rank {rank}: {origin}"
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if origin is None or type(error) not in (RuntimeError, ValueError):
            raise  # the others name it themselves, as ours do
        text = f"{where} does not fit what the script prepared: {error}"
        raise type(error)(text) from error
    except FileNotFoundError as error:
        if origin is None or type(error) is not FileNotFoundError:
            raise
        raise FileNotFoundError(error.errno, f"{where} lacks a file", error.filename) from error
