"""Checkpoint directories of torch.distributed.checkpoint, as they are on disk."""

from __future__ import annotations

import contextlib
import copyreg
import io
import os
import pickle
import re
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from portus.engine.loading.checkpoint_file import has_digests as has_digests_of
from portus.engine.loading.checkpoint_file import use_file
from portus.engine.loading.open_file import reads
from portus.errors import (
    CorruptionError,
    NoCheckpointError,
    PortusError,
    UsageError,
    printable,
)
from portus.reach.formats.safetensors import SUFFIX
from portus.reach.shards.rank_file import METADATA, RANK_FILE, read_pickle

_STOCK: Final = re.compile(r"__(\d+)_(\d+)\.distcp")
"""The name of a rank's file, whoever wrote it."""

_SHARD_FILE: Final = re.compile(r"shard-\d{5,}-model-00001-of-00001\.safetensors")

_DIGITS: Final = re.compile(r"\d+")


def pickle_metadata(metadata: object) -> bytes:
    """Return the pickle of torch's metadata, so that older versions of torch read them: 2.15 adds
    the strides of a tensor, one field more than 2.14 expects."""

    def reduce(properties: Any) -> Any:
        state = properties.__getstate__()[:_FIELDS]
        return copyreg.__newobj__, (TensorProperties,), state  # type: ignore[attr-defined]

    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: reduce}
    pickler.dump(metadata)
    return file.getvalue()


_FIELDS: Final = 5
"""The number of fields that torch 2.6 to 2.14 store of a tensor's properties."""


def series_of(name: str) -> str:
    """Return the common part of names that differ only in their numbers."""
    return _DIGITS.sub("#", name)


def read_metadata(directory: str) -> Any:
    """Return the metadata of a directory. Raise ``NoCheckpointError`` if there are none,
    ``CorruptionError``, ``MediumError``, and ``UsageError`` if another torch wrote them."""
    path = os.path.join(directory, METADATA)
    try:
        data, is_verified = use_file(
            path, lambda file: read_pickle(reads(file), file.size, printable(path))
        )
    except FileNotFoundError as error:
        raise NoCheckpointError(_why_none(directory)) from error
    try:
        return pickle.loads(data)
    except Exception as error:
        said = (
            f"{printable(path)}: torch's metadata cannot be read: {type(error).__name__}: {error}"
        )
        # With a matching digest the bytes are those of the save: it is this torch that differs.
        if not is_verified:
            raise CorruptionError(said) from error
        raise UsageError(
            f"{said}. They are as they were saved, by another version of torch than this "
            f"{torch.__version__}: load with that one"
        ) from error


def _why_none(directory: str) -> str:
    where = printable(directory)
    if not os.path.isdir(directory):
        return f"{where}: there is no checkpoint: no such directory"
    before = complete_beside(directory)
    other = f"; the newest complete one beside it is {printable(before[0])}" if before else ""
    if any(_STOCK.fullmatch(name) or _SHARD_FILE.fullmatch(name) for name in os.listdir(directory)):
        return f"{where}: its save was cut off: it has files of ranks and no {METADATA}{other}"
    return f"{where}: there is no checkpoint: it has no {METADATA}{other}"


def complete_beside(directory: str) -> list[str]:
    """Return the complete directories beside one, of other numbers, the newest save first."""
    above, name = os.path.split(os.path.abspath(directory))
    return [each for each in complete_in(above, name) if each != os.path.abspath(directory)]


def complete_in(above: str, like: str | None = None) -> list[str]:
    """Return the directories in ``above`` that have metadata, the newest save first. like: only
    those whose names differ from this one in their numbers."""
    found = []
    with contextlib.suppress(OSError), os.scandir(above) as entries:
        for each in entries:
            if like is not None and series_of(each.name) != series_of(like):
                continue
            with contextlib.suppress(OSError):
                if os.path.isfile(os.path.join(each.path, METADATA)):
                    found.append((_age(each.path), each.path))
    return [path for _, path in sorted(found, reverse=True)]


def _age(directory: str) -> tuple[int, int]:
    """Return a key that is higher for a newer save: the number of the save, which is a time, also
    in a copy; the time of the file for one by stock torch, which counts from 0."""
    matches = [RANK_FILE.fullmatch(name) for name in os.listdir(directory)]
    save = max((int(match[2]) for match in matches if match), default=0)
    written = os.stat(os.path.join(directory, METADATA)).st_mtime_ns
    return save or written, written


def has_digests(directory: str | os.PathLike[str]) -> bool:
    """Return whether Portus saved a checkpoint directory, or began to. Raises nothing."""
    with contextlib.suppress(OSError):
        return any(RANK_FILE.fullmatch(name) for name in os.listdir(directory))
    return False


def has_safetensors_of_torch(directory: str) -> bool:
    """Return whether a directory has safetensors files, none of them by an incomplete save of
    Portus. Raises nothing."""
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(directory) if name.endswith(SUFFIX)]
        return bool(names) and not any(is_shard_of_portus(directory, name) for name in names)
    return False


def is_shard_of_portus(directory: str, name: str) -> bool:
    """Return whether a save of Portus, in the layout of safetensors files, made a file."""
    try:
        return bool(_SHARD_FILE.fullmatch(name)) and has_digests_of(os.path.join(directory, name))
    except PortusError:
        return False


def stale_in(directory: str, save: int) -> set[str]:
    """Return the files of ranks in a directory that are of older saves than ``save``."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            match = _STOCK.fullmatch(name)
            # Stock torch's count from 0, and so are older than any save of Portus.
            if match and int(match[2]) < save:
                found.add(os.path.join(directory, name))
    return found
