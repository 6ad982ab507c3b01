"""Checkpoint directories of FSDP with sharded states.

Accelerate passes the state of each model and optimizer to ``torch.distributed.checkpoint``, into a
subdirectory each. While ``save_state`` runs, Portus gets these calls, and saves the same
directories in the background. The files of the main process appear after them, and make the
directory a checkpoint. While ``load_state`` runs, Portus verifies what is loaded.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import portus
from portus_accelerate.settings import ACCELERATE

if TYPE_CHECKING:
    from portus.dcp import PortusStorageWriter

SHARDED: Final = "SHARDED_STATE_DICT"
FULL: Final = "FULL_STATE_DICT"
"""Accelerate's names for the two kinds of FSDP checkpoints that Portus knows."""


def kind_of(accelerator: Any) -> str | None:
    """Return how states are saved under FSDP; None without FSDP."""
    if getattr(accelerator.distributed_type, "value", "") != "FSDP":
        return None
    return str(accelerator.state.fsdp_plugin.state_dict_type.name)


@contextlib.contextmanager
def saving(
    writer: PortusStorageWriter, step: int, *, now: bool
) -> Iterator[list[portus.SaveHandle]]:
    """Have ``writer`` save, in the background or ``now``, what this thread passes to torch inside.
    Yield the handles of these saves. torch saves what Portus cannot."""
    handles: list[portus.SaveHandle] = []

    def save(state_dict: dict[str, Any], path: str, **named: Any) -> bool:
        try:
            handles.append(writer.save(state_dict, path, step=step, blocking=now))
        except portus.UsageError as error:
            ACCELERATE.say_it_saves(error)
            return False
        return True

    with _replacing("save", "storage_writer", save):
        yield handles


@contextlib.contextmanager
def verifying() -> Iterator[None]:
    """Verify what this thread lets torch load inside, if Portus saved it."""
    from portus.dcp import has_digests, load

    def load_verified(state_dict: dict[str, Any], path: str, **named: Any) -> bool:
        if not has_digests(path):
            return False
        more = {key: named[key] for key in ("planner", "process_group") if key in named}
        load(state_dict, path, **more)
        return True

    with _replacing("load", "storage_reader", load_verified):
        yield


@contextlib.contextmanager
def _replacing(name: str, storage: str, function: Callable[..., bool]) -> Iterator[None]:
    """Call ``function``, with the state and the absolute path, when this thread calls torch's
    function ``name`` for a path inside. If it returns False, call torch's.

    storage: the name of torch's argument that may have the path.
    """
    import torch.distributed.checkpoint  # few programs save in shards

    module, thread = torch.distributed.checkpoint, threading.get_ident()
    stock = getattr(module, name)

    def call(state_dict: dict[str, Any], **named: Any) -> Any:
        path = getattr(named.get(storage), "path", None) or named.get("checkpoint_id")
        # torch's module has one name for all threads: others may call it meanwhile.
        if path is None or threading.get_ident() != thread:
            return stock(state_dict, **named)
        is_done = function(state_dict, os.path.abspath(os.fspath(path)), **named)
        return None if is_done else stock(state_dict, **named)

    setattr(module, name, call)
    try:
        yield
    finally:
        setattr(module, name, stock)
