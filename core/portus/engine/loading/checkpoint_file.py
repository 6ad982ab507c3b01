"""The checkpoint file at a path, or the one in a pool that a pointer there refers to."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from portus.engine.extensions import USE_POINTER, extension
from portus.engine.format.pointer_marks import POINTER_MAX, is_pointer
from portus.engine.loading.any_format import (
    has_digests_in,
    load_opened,
    note_of,
    verify_opened,
)
from portus.engine.loading.open_file import OpenFile, open_file, reads
from portus.engine.loading.patterns import Patterns
from portus.engine.loading.restore_over import RestoreOptions
from portus.engine.loading.torch_file import restore_torch
from portus.engine.media.pace import Pace
from portus.errors import UsageError, printable

Result = TypeVar("Result")


def load_file(
    path: str | os.PathLike[str],
    names: Patterns = None,
    *,
    verify: bool = True,
    **settings: Any,
) -> Any:
    """Return the state in the file at ``path``, verified if the file has digests: of a safetensors
    file the tensors by their names, else the result of ``torch.load``.

    names: shell patterns of key paths: only matching storages are read, and only matching parts of
        dicts, lists and tuples returned, with None for what a list or tuple lacks.
    verify: False compares no digests of storages.
    settings: those of ``torch.load``. With ``mmap`` the whole file is read and verified first.

    Blocks. Raises ``CorruptionError``, ``MediumError``, ``UsageError`` for a pattern that matches
    nothing, and the errors of ``torch.load``.
    """
    where = os.fspath(path)
    if os.path.isdir(where):
        raise UsageError(
            f"{printable(where)}: expected a file of torch.save, found a directory; portus.open "
            "reads a pool"
        )
    return use_file(
        where, lambda file: load_opened(file, where, names, verify=verify, settings=dict(settings))
    )


def restore_file(
    path: str | os.PathLike[str], state: object, options: RestoreOptions
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Copy the file of torch at ``path`` over the tensors of ``state``, and set its other leaves;
    see ``over.restore_over``, also for the result and the errors.

    Storages are read straight into tensors that are plain blocks of memory.
    """
    where = os.fspath(path)
    return use_file(where, lambda file: restore_torch(file, where, state, options))


def read_note(path: str | os.PathLike[str]) -> bytes | None:
    """Return the note in a file, by its saver; None if there is none. Reads little of the file.
    Raises ``CorruptionError`` for one that is cut off, ``MediumError``."""
    where = os.fspath(path)
    return use_file(where, lambda file: note_of(file, where))


def has_digests(path: str | os.PathLike[str]) -> bool:
    """Return whether a file has digests of its storages, as one that Portus saved. Reads little of
    it. Raises ``CorruptionError`` for one that is cut off, ``MediumError``."""
    where = os.fspath(path)
    return use_file(where, lambda file: has_digests_in(file, where), as_torch=False)


def verify_file(path: str | os.PathLike[str], pace: Pace | None = None) -> int:
    """Read every byte of a file and compare it with the digests in it; return their number. A stock
    file of torch is compared with the CRCs of its zip, and one of safetensors with nothing.

    pace: a limit of the rate; cached bytes of the file are read from the disk then. Raises
    ``CorruptionError``, ``MediumError``.
    """
    where = os.fspath(path)
    return use_file(where, lambda file: verify_opened(file, where, pace), as_torch=False)


def use_file(where: str, act: Callable[[OpenFile], Result], *, as_torch: bool = True) -> Result:
    """Return the result of ``act`` for the file at a path, or for the file in a pool that a pointer
    there refers to. as_torch: see ``open_file``."""
    with open_file(where, as_torch=as_torch) as file:
        if file.size > POINTER_MAX or not is_pointer(reads(file)(0, file.size)):
            return act(file)
    found: Result = extension(USE_POINTER)(where, act)
    return found
