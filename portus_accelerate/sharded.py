"""Checkpoint directories of FSDP with sharded states: each is one group, of all ranks' parts.

Accelerate hands the state of each model and of each optimizer to ``torch.distributed.checkpoint``
by itself, into a subdirectory each. While ``save_state`` runs these calls are collected, and all
of it is saved at once, with the files of each rank: a checkpoint is never of two moments, and it
is there as a whole or not at all. While ``load_state`` runs, Accelerate's own calls get back what
they gave, by the names of the subdirectories, at any number of ranks.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any, Final

SHARDED: Final = "SHARDED_STATE_DICT"
FULL: Final = "FULL_STATE_DICT"
"""Accelerate's names for the two kinds of FSDP checkpoints that are known here."""


def kind_of(accelerator: Any) -> str | None:
    """How states are saved under FSDP; None without it."""
    if getattr(accelerator.distributed_type, "value", "") != "FSDP":
        return None
    return str(accelerator.state.fsdp_plugin.state_dict_type.name)


@contextlib.contextmanager
def collecting() -> Iterator[dict[str, Any]]:
    """What this thread lets torch save inside, by the name of the subdirectory, is collected and
    not saved."""
    of_torch = _of_torch()
    thread, stock = threading.get_ident(), of_torch.save
    found: dict[str, Any] = {}

    def save(state_dict: dict[str, Any], **named: Any) -> Any:
        path = _path_of(named, "storage_writer")
        if path is None or threading.get_ident() != thread:
            return stock(state_dict, **named)
        found[os.path.basename(path)] = state_dict
        return None

    of_torch.save = save
    try:
        yield found
    finally:
        of_torch.save = stock


@contextlib.contextmanager
def reading(directory: str, mirror: str | None = None) -> Iterator[None]:
    """What this thread lets torch load inside from subdirectories of ``directory`` comes out of
    its group. One that torch itself wrote is loaded as ever. mirror: as of ``GroupReader``.

    Raises ``UsageError`` for a group that is not complete, and ``CorruptionError`` for a damaged
    one, on all ranks.
    """
    from portus.dcp import GroupReader, load

    of_torch = _of_torch()
    reader = GroupReader.at(directory, mirror=mirror)
    if reader is None:
        yield
        return
    thread, stock = threading.get_ident(), of_torch.load

    def load_part(state_dict: dict[str, Any], **named: Any) -> None:
        path = _path_of(named, "storage_reader")
        inside = path is not None and os.path.dirname(path) == os.path.abspath(directory)
        if path is None or not inside or threading.get_ident() != thread:
            stock(state_dict, **named)
            return
        more = {key: named[key] for key in ("planner", "process_group") if key in named}
        load({os.path.basename(path): state_dict}, reader, **more)

    of_torch.load = load_part
    try:
        yield
    finally:
        of_torch.load = stock


def write_stock(shards: dict[str, Any], directory: str) -> None:
    """What Accelerate would have done with what was collected."""
    of_torch = _of_torch()
    for name, state in shards.items():
        writer = of_torch.FileSystemWriter(os.path.join(directory, name))
        of_torch.save(state, storage_writer=writer)


def _of_torch() -> Any:
    """torch's module: imported where it is needed, since few programs save in shards."""
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint


def _path_of(named: dict[str, Any], storage: str) -> str | None:
    """The absolute path that a call of torch's ``save`` or ``load`` is about."""
    path = getattr(named.get(storage), "path", None) or named.get("checkpoint_id")
    return None if path is None else os.path.abspath(os.fspath(path))
