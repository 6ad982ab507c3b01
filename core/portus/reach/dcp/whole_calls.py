"""``portus.dcp.save``, ``async_save``, ``load``, ``load_newest``: whole sharded checkpoints."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as torch_load

from portus.companions.job.exchange import beside, broadcast, standing
from portus.engine.job.settings import Settings
from portus.engine.pipeline.handle import SaveHandle
from portus.errors import CorruptionError, PortusError, UsageError, printable
from portus.reach.dcp.directory_reader import PortusStorageReader
from portus.reach.dcp.directory_writer import PortusStorageWriter, call_torch
from portus.reach.shards.directories import complete_in
from portus.reach.training.training_files import TrainingFiles

_log: Final = logging.getLogger("portus")

_writers: Final[list[PortusStorageWriter]] = []
"""The writer of ``save`` and ``async_save``."""


def save(
    state: dict[str, Any],
    checkpoint_id: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save ``state`` to the directory ``checkpoint_id``, as ``dcp.save`` does. Call it on every
    rank. Returns when the checkpoint is complete, durable, on all ranks. Raises as ``async_save``,
    and the error of this save."""
    _writer().save(state, checkpoint_id, blocking=True, process_group=process_group)


def async_save(
    state: dict[str, Any],
    checkpoint_id: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> SaveHandle:
    """Begin to save ``state`` to the directory ``checkpoint_id``. Call it on every rank.

    Tensors that an optimizer steps are copied in the background, and its step waits for that; all
    others are copied when this returns. process_group: all ranks of the job, with a backend for
    tensors on the CPU; None: the job's own.

    Returns the handle of this rank's part; on the rank that coordinates, of the whole checkpoint.
    Raises on all ranks ``UsageError`` for a value that cannot be saved, ``BusyError`` if another
    job saves checkpoints of such names, and the error of an earlier save until one succeeds.
    """
    return _writer().save(state, checkpoint_id, process_group=process_group)


def _writer() -> PortusStorageWriter:
    if not _writers:
        _writers.append(PortusStorageWriter())
    return _writers[0]


def load(
    state: dict[str, Any],
    checkpoint_id: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
    verify: bool = True,
    **more: Any,
) -> None:
    """Load the directory ``checkpoint_id`` into ``state``, as ``dcp.load`` does, and compare every
    byte with its digest. Call it on every rank.

    verify: False compares no digests of tensors. more: further arguments of ``dcp.load``.

    Raises ``NoCheckpointError`` if there is none, ``CorruptionError`` (``state`` may be changed in
    part by then), and ``UsageError`` if ``state`` does not fit.
    """
    reader = PortusStorageReader(checkpoint_id, verify=verify)
    try:
        with call_torch():
            torch_load(state, storage_reader=reader, process_group=process_group, **more)
    except CheckpointException as error:
        told = "; ".join(f"rank {rank}: {why[0]}" for rank, why in sorted(error.failures.items()))
        raise UsageError(f"{printable(os.fspath(checkpoint_id))} was not loaded: {told}") from error


def load_newest(
    state: dict[str, Any],
    directory: str | os.PathLike[str],
    *,
    mirror: str | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> str | None:
    """Load the newest complete checkpoint in ``directory`` into ``state``. Return its directory, or
    None if there is none: the job starts fresh. The same on all ranks.

    Damaged ones are skipped, with an error in the log. mirror: the source to fetch them from, if
    there is none here. Raises ``CorruptionError`` if all are damaged, and as ``load``.
    """
    above = os.path.realpath(directory)
    first: CorruptionError | None = None
    for each in _agree(above, mirror, process_group):
        try:
            load(state, each, process_group=process_group)
            return each
        except CorruptionError as error:
            first = first or error
            if standing()[0] == 0:
                _log.error("portus: %s is passed over: %s", printable(each), error)
    if first is not None:
        raise first
    return None


def _agree(above: str, mirror: str | None, group: dist.ProcessGroup | None) -> list[str]:
    """Return the complete directories, newest first, as the first rank sees them. Raise its errors
    on all ranks."""
    found: Any = None
    if standing(group)[0] == 0:
        try:
            settings = Settings(mirror=mirror, journal=False)
            if settings.has_mirror:
                with contextlib.closing(TrainingFiles(settings, of_directories=True)) as files:
                    files.fetch(None, None, above)
            found = complete_in(above)
        except PortusError as error:
            found = error  # sent, not raised: the others wait in the broadcast
    if dist.is_initialized():
        found = broadcast(found, group or beside())
    if isinstance(found, PortusError):
        raise found
    return list(found)
