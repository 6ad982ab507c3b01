"""Background saves of the states that TorchTitan passes to ``torch.distributed.checkpoint``.

With TorchTitan 0.3 use ``portus_accelerate.torchtitan.PortusCheckpoints``. With 0.2, two lines
before the trainer is made:

    from torchtitan.components.checkpoint import CheckpointManager
    portus_accelerate.titan.take_over(CheckpointManager)
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import torch.distributed as dist

import portus
from portus.dcp import PortusStorageWriter, load
from portus_accelerate import place
from portus_accelerate.engine_files import tensors_of

_log: Final = logging.getLogger("portus_accelerate")

_STEP: Final = re.compile(r"step-\d+")
"""The pattern of TorchTitan's names of checkpoints."""

_WRITER: Final = "_portus_writer"


def save(
    writer: PortusStorageWriter,
    state: dict[str, Any],
    directory: str,
    ranks: Any,
    optimizers: Any,
    *,
    is_late: bool,
) -> Future[None] | None:
    """Save ``state``, on every rank. is_late: return a future before the save is complete. ranks:
    the process group. optimizers: those whose step waits for ``writer.fence``."""
    stepping = optimizers if is_late and optimizers else ()
    handle = writer.save(
        state,
        directory,
        blocking=not is_late,
        process_group=ranks,
        fenced=[tensor for each in stepping for tensor in tensors_of(each)],
    )
    return _SaveFuture(handle) if is_late else None


def purge(writer: PortusStorageWriter, folder: str, count: int) -> None:
    """Have rank 0 remove all but the newest ``count`` checkpoints, once the newest is complete."""
    if dist.get_rank() == 0 and count > 0:
        for path in steps_in(folder)[count:]:
            writer.remove(path)


class _SaveFuture(Future[None]):
    """The future that TorchTitan waits for before the next save; ``on_error`` rules its errors."""

    def __init__(self, handle: portus.SaveHandle) -> None:
        super().__init__()
        self._handle: Final = handle

    def result(self, timeout: float | None = None) -> None:
        """Block until the save has ended."""
        self._handle.join()

    def done(self) -> bool:
        """Return whether the save has ended."""
        return self._handle.done


def steps_in(folder: str) -> list[str]:
    """Return the checkpoints in ``folder``, by their steps, the highest first."""
    return place.numbered_directories(folder, _STEP)[::-1] if os.path.isdir(folder) else []


def load_newest(load_step: Callable[[int], bool], folder: str, step: int) -> bool:
    """Return ``load_step(step)``. If ``step`` is -1, the newest, and that is damaged, try the one
    before it, and so on. Raise ``CorruptionError`` if all are damaged, or a named step is."""
    try:
        return load_step(step)
    except portus.CorruptionError as error:
        if step != -1:
            raise
        first = error
    for path in steps_in(folder)[1:]:
        if not os.path.exists(os.path.join(path, ".metadata")):
            continue
        if dist.get_rank() == 0:
            _log.error("portus: passed over: %s; continuing from %s", first, path)
        try:
            return load_step(int(os.path.basename(path).split("-")[1]))
        except portus.CorruptionError:
            continue
    raise first


def take_over(manager: Any, **settings: Any) -> None:
    """Have the class ``CheckpointManager`` of TorchTitan 0.2 save through Portus. settings: of
    ``portus.Settings``. A second call does nothing. Raises ``UsageError`` for another class."""
    missing = [name for name in ("dcp_save", "dcp_load", "close") if not hasattr(manager, name)]
    if missing:
        raise portus.UsageError(f"{manager!r}: expected TorchTitan's manager; it lacks {missing}")
    if hasattr(manager, _WRITER):
        return
    setattr(manager, _WRITER, None)

    def writer_of(own: Any) -> PortusStorageWriter:
        if vars(own).get(_WRITER) is None:
            setattr(own, _WRITER, PortusStorageWriter(**settings))
        found: PortusStorageWriter = vars(own)[_WRITER]
        return found

    def dcp_save(
        stock: Callable[..., Any],
        self: Any,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        *given: Any,
        to_hf: bool = False,
        **named: Any,
    ) -> Any:
        if to_hf or "pinned" in str(async_mode.value):
            return stock(self, state_dict, checkpoint_id, async_mode, *given, to_hf=to_hf, **named)
        ranks, optimizers = getattr(self, "pg", None), self.states.get("optimizer")
        is_late = async_mode.value != "disabled"
        return save(writer_of(self), state_dict, checkpoint_id, ranks, optimizers, is_late=is_late)

    def dcp_load(
        stock: Callable[..., Any],
        self: Any,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        from_hf: bool,
        *given: Any,
        **named: Any,
    ) -> None:
        if from_hf:
            stock(self, state_dict, checkpoint_id, from_hf, *given, **named)
            return
        load(state_dict, checkpoint_id)
        if "model" in self.states:
            self.states["model"].load_state_dict(state_dict)

    def close(stock: Callable[..., Any], self: Any) -> None:
        if vars(self).get(_WRITER) is not None:
            writer_of(self).close()
        stock(self)

    def maybe_wait_for_staging(stock: Callable[..., Any], self: Any) -> None:
        # TorchTitan calls this right before its optimizers step.
        writer_of(self).fence()
        stock(self)

    def _purge_stale_checkpoints(self: Any) -> None:
        purge(writer_of(self), self.folder, self.keep_latest_k)

    for each in (dcp_save, dcp_load, close, maybe_wait_for_staging):
        setattr(*portus.around(manager, each.__name__, each))
    manager._purge_stale_checkpoints = _purge_stale_checkpoints
