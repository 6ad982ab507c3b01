"""The files of a ``Trainer``'s checkpoint that are no part of the pool: weights, configurations.

They stay real files. Where there is a mirror they are saved with the rest, too, so that a machine
with an empty disk gets whole checkpoints back. ``trainer_state.json`` is written last: where it is,
all are.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any, Final

import torch

import portus

KEY: Final = "portus.files"
"""Of a saved state: bytes by name."""

LAST: Final = "trainer_state.json"


def gathered(directory: str, but: Collection[str]) -> dict[str, torch.Tensor]:
    """The bytes of the files in ``directory`` but some, mapped: nothing is read here. They may be
    removed meanwhile, and not written to."""
    found = {}
    for entry in sorted(os.scandir(directory), key=lambda each: each.name):
        size = entry.stat().st_size if entry.is_file(follow_symlinks=False) else 0
        if size and entry.name not in but:
            found[entry.name] = torch.from_file(
                entry.path, shared=False, size=size, dtype=torch.uint8
            )
    return found


def put_back(checkpointer: portus.PoolCheckpointer, output: str) -> None:
    """Write the files of the checkpoints in ``output`` that have their references, and lack these.
    Raises as ``Checkpointer.load_version``, and ``OSError``."""
    for name in os.listdir(output) if os.path.isdir(output) else ():
        directory = os.path.join(output, name)
        if not os.path.isdir(directory) or os.path.exists(os.path.join(directory, LAST)):
            continue
        token = next(filter(None, map(_token, os.scandir(directory))), None)
        if token is not None:
            _write(directory, _files(checkpointer, token))


def _token(entry: os.DirEntry[str]) -> bytes | None:
    reference = portus.read_reference(entry.path) if entry.is_file() else None
    return None if reference is None else bytes.fromhex(reference.token)


def _files(checkpointer: portus.PoolCheckpointer, token: bytes) -> dict[str, Any]:
    try:
        found: Any = checkpointer.load_version(token, KEY)
    except (portus.StaleError, portus.UsageError):  # it was saved without a mirror
        return {}
    return dict(found)


def _write(directory: str, files: dict[str, Any]) -> None:
    for name in sorted(files, key=lambda each: (each == LAST, each)):
        if os.path.basename(name) != name or name in (os.curdir, os.pardir):
            raise portus.CorruptionError(f"{directory}: {name!r} is no name of a file")
        path = os.path.join(directory, name)
        if os.path.lexists(path):
            continue
        fresh = f"{path}.portus"
        with open(fresh, "wb") as file:
            file.write(files[name].numpy())
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
