"""Background saves of the states that TorchTitan passes to ``torch.distributed.checkpoint``.

With TorchTitan 0.3 use ``portus_accelerate.torchtitan.PortusCheckpoints``. With 0.2, two lines
before the trainer is made:

    from torchtitan.components.checkpoint import CheckpointManager
    portus_accelerate.titan.take_over(CheckpointManager)
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import torch.distributed as dist

import portus
from portus.dcp import PortusStorageWriter, load
from portus_accelerate.deepspeed import tensors_of
from portus_accelerate.directories import numbered_directories

_STEP: Final = re.compile(r"step-\d+")
"""The pattern of TorchTitan's names of checkpoints."""

WRITER: Final = "_portus_writer"
"""The attribute of a manager with its ``PortusStorageWriter``."""


def steps_in(folder: str) -> list[str]:
    """Return the checkpoints in ``folder``, by their steps, the highest first."""
    return numbered_directories(folder, _STEP)[::-1] if os.path.isdir(folder) else []


def take_over(manager: Any, **settings: Any) -> None:
    """Have the class ``CheckpointManager`` of TorchTitan save through Portus. settings: of
    ``portus.Settings``. A second call does nothing. Raises ``UsageError`` for another class."""
    missing = [name for name in ("dcp_save", "dcp_load", "close") if not hasattr(manager, name)]
    if missing:
        raise portus.UsageError(f"{manager!r}: expected TorchTitan's manager; it lacks {missing}")
    if hasattr(manager, WRITER):
        return
    setattr(manager, WRITER, None)

    def writer_of(own: Any) -> PortusStorageWriter:
        if vars(own).get(WRITER) is None:
            setattr(own, WRITER, PortusStorageWriter(**settings))
        found: PortusStorageWriter = vars(own)[WRITER]
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
        is_late = async_mode.value != "disabled"
        # Their step waits for ``writer.fence``.
        stepping = (self.states.get("optimizer") or ()) if is_late else ()
        handle = writer_of(self).save(
            state_dict,
            checkpoint_id,
            blocking=not is_late,
            process_group=getattr(self, "pg", None),
            fenced=[tensor for each in stepping for tensor in tensors_of(each)],
        )
        if not is_late:
            return None
        future = Future[None]()
        # TorchTitan asks for it before the next save; ``on_error`` rules the errors.
        vars(future)["result"] = handle.join
        return future

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
        if vars(self).get(WRITER) is not None:
            writer_of(self).close()
        stock(self)

    def maybe_wait_for_staging(stock: Callable[..., Any], self: Any) -> None:
        # TorchTitan calls this right before its optimizers step.
        if getattr(self, "enable", True):
            writer_of(self).fence()
        stock(self)

    def _purge_stale_checkpoints(self: Any) -> None:
        if dist.get_rank() == 0 and self.keep_latest_k > 0:
            for path in steps_in(self.folder)[self.keep_latest_k :]:
                writer_of(self).remove(path)  # once the newest is complete

    for each in (dcp_save, dcp_load, close, maybe_wait_for_staging):
        setattr(*portus.around(manager, each.__name__, each))
    manager._purge_stale_checkpoints = _purge_stale_checkpoints
