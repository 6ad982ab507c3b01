"""The checkpoint directories of a project: their names, which are complete, and what is in them.

The files that a save writes in the background appear in one step. A directory without them was
never complete, whatever else is in it. Stock takes the highest number.

A directory put together by hand, from two checkpoints, is refused: it would load, and be no state
that training ever had. Not detected: files of the same run and step, saved twice. Accelerate and
torch find other errors; here the checkpoint and the rank are added to them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

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


RANDOM: Final = "random_states_{}.pkl"
"""Accelerate's file of a process's random states, by its number. Every save has it."""

_ANY_RANDOM: Final = re.compile(r"random_states_\d+\.pkl")
_WEIGHTS: Final = re.compile(r"(pytorch_)?model(_\d+)?\.(bin|safetensors)(\.index\.json)?")
"""Files of a checkpoint of Accelerate."""

NUMBERED: Final = re.compile(r"checkpoint_\d+")
"""The name of a checkpoint that Accelerate chose."""

NAME: Final = re.compile(r"checkpoint-\d+")
"""The name of a checkpoint of ``transformers.Trainer``."""

_OTHERS: Final = re.compile(r"rng_state_[1-9]\d*\.pth")
"""Files of a checkpoint of Trainer, of processes that save only these."""

_STATE: Final = "trainer_state.json"
"""A file of a checkpoint of Trainer, which needs it."""

TELLING: Final = rf"{_ANY_RANDOM.pattern}|{re.escape(_STATE)}"
"""Names of files without which a directory is no checkpoint, of Accelerate or of Trainer."""

_WRITTEN: Final = (".safetensors", ".bin", ".pt", ".pth")
"""Files of a checkpoint of Trainer that appear at the end of a save."""


def install() -> None:
    """Change the loaded ``transformers.trainer_utils``, before scripts take a name from it."""
    setattr(*portus.around(sys.modules["transformers.trainer_utils"], "get_last_checkpoint", last))


def _is_saved(directory: str) -> bool:
    """Return True if ``directory`` has the files that ``save_state`` makes visible last. Hooks
    write weights, too; with ``save_on_each_node`` process 0 may be on another machine."""
    names = os.listdir(directory)
    if RANDOM.format(0) in names:
        return True
    return any(map(_WEIGHTS.fullmatch, names)) and any(map(_ANY_RANDOM.fullmatch, names))


def why_incomplete(directory: str, is_complete: Callable[[str], bool] = _is_saved) -> str:
    """Return why a directory is no checkpoint, with the one before it; "" if it may be one.
    is_complete: whether it has the files that a save makes visible last."""
    if not os.path.isdir(directory) or is_complete(directory):
        return ""
    above = os.path.dirname(os.path.abspath(directory))
    beside = [os.path.join(above, name) for name in os.listdir(above) if name[:1] != "."]
    before = [path for path in beside if os.path.isdir(path) and is_complete(path)]
    newest = max(before, key=lambda path: os.stat(path).st_mtime_ns, default=None)
    return f"{directory}: it was never complete: its save was cut off, or it is no checkpoint. " + (
        f"Load the one before it, {newest}" if newest else "There is none before it"
    )


def is_complete(directory: str) -> bool:
    """Return True if a directory has the files that a save makes visible last, and those that its
    removal deletes first."""
    names = os.listdir(directory)
    return _STATE in names and any(
        name.endswith(_WRITTEN) and not _OTHERS.fullmatch(name) for name in names
    )


def complete_in(folder: str) -> list[str]:
    """Return the checkpoints in ``folder`` whose save was not cut off; newest first."""
    found = numbered_directories(folder, NAME)[::-1]
    return [path for path in found if not why_incomplete(path, is_complete)]


def last(stock: Callable[[Any], Any], folder: Any) -> Any:
    """Return what ``get_last_checkpoint`` does, but skip saves that were cut off."""
    found = stock(folder)
    if found is None or not why_incomplete(found, is_complete):
        return found
    return next(iter(complete_in(os.fspath(folder))), None)


_NOTED: Final = (".safetensors", ".bin", ".pkl", ".pt")
"""Suffixes of the files that Accelerate writes."""

_SECOND: Final = re.compile(r"~\d+$")
"""The end of a run's name in a pool that has another run of that name."""


def origin_of(directory: str) -> str:
    """Return the checkpoint with its run and step, for messages; "" if no file in ``directory``
    names them.

    Raises ``UsageError`` naming the files and steps if they are of several checkpoints,
    ``CorruptionError`` for a damaged file.
    """
    found: dict[str, list[str]] = {}
    for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else ():
        path = os.path.join(directory, name)
        pointer = portus.read_reference(path)  # following it would open a pool
        said = _read_note(path) if pointer is None else (pointer.model, pointer.step)
        if said is not None:
            origin = f"model {_SECOND.sub('', said[0])!r}, step {said[1]}"
            found.setdefault(origin, []).append(name)
    if len(found) > 1:
        parts = [f"{', '.join(names)} of {origin}" for origin, names in found.items()]
        raise portus.UsageError(
            f"{directory}: its files are of different checkpoints: {'; '.join(parts)}. Load a "
            "directory as it was saved"
        )
    return next((f"{directory} ({origin})" for origin in found), "")


def note(model: str, step: int) -> bytes:
    """Return the note of its origin that each file of a checkpoint has."""
    return json.dumps({"model": model, "step": step}).encode()


def _read_note(path: str) -> tuple[str, int] | None:
    """Return model and step from a file's note."""
    if not os.path.isfile(path) or os.path.splitext(path)[1] not in _NOTED:
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
        if not origin or type(error) not in (RuntimeError, ValueError):
            raise  # the others name it themselves, as ours do
        text = f"{where} does not fit what the script prepared: {error}"
        raise type(error)(text) from error
    except FileNotFoundError as error:
        if not origin or type(error) is not FileNotFoundError:
            raise
        raise FileNotFoundError(error.errno, f"{where} lacks a file", error.filename) from error
