"""Checkpoint directories of FSDP with sharded states.

Accelerate hands the state of each model and of each optimizer to ``torch.distributed.checkpoint``
by itself, into a subdirectory each. While ``save_state`` runs these calls go to Portus, which
saves the same directories in the background; the files of the main process appear after them, so
without these nothing is a checkpoint. While ``load_state`` runs what is loaded is verified.
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
"""Accelerate's names for the two kinds of FSDP checkpoints that are known here."""


def kind_of(accelerator: Any) -> str | None:
    """How states are saved under FSDP; None without it."""
    if getattr(accelerator.distributed_type, "value", "") != "FSDP":
        return None
    return str(accelerator.state.fsdp_plugin.state_dict_type.name)


def saves_shards(accelerator: Any) -> bool:
    """Return whether torch saves the states in shards."""
    return kind_of(accelerator) == SHARDED


@contextlib.contextmanager
def saving(
    writer: PortusStorageWriter, step: int, *, now: bool
) -> Iterator[list[portus.SaveHandle]]:
    """What this thread lets torch save inside is saved late by ``writer``, or, if ``now``, returns
    when it is complete; the handles of these saves. What Portus cannot save, torch does."""
    thread, stock = threading.get_ident(), _of_torch().save
    handles: list[portus.SaveHandle] = []

    def save(state_dict: dict[str, Any], **named: Any) -> Any:
        path = _path_of(named, "storage_writer")
        if path is None or threading.get_ident() != thread:
            return stock(state_dict, **named)
        try:
            handles.append(writer.save(state_dict, path, step=step, blocking=now))
        except portus.UsageError as error:
            ACCELERATE.say_it_saves(error)
            return stock(state_dict, **named)
        return None

    # For all threads: torch's module has one name, which others may call meanwhile.
    with _replacing("save", save):
        yield handles


@contextlib.contextmanager
def verifying() -> Iterator[None]:
    """What this thread lets torch load inside is verified, if Portus saved it."""
    from portus.dcp import has_digests, load

    thread, stock = threading.get_ident(), _of_torch().load

    def load_verified(state_dict: dict[str, Any], **named: Any) -> None:
        path = _path_of(named, "storage_reader")
        if path is None or threading.get_ident() != thread or not has_digests(path):
            stock(state_dict, **named)
            return
        more = {key: named[key] for key in ("planner", "process_group") if key in named}
        load(state_dict, path, **more)

    with _replacing("load", load_verified):
        yield


@contextlib.contextmanager
def _replacing(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, torch's function ``name`` is ``function``."""
    of_torch = _of_torch()
    stock = getattr(of_torch, name)
    setattr(of_torch, name, function)
    try:
        yield
    finally:
        setattr(of_torch, name, stock)


def _of_torch() -> Any:
    """torch's module: imported where it is needed, since few programs save in shards."""
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint


def _path_of(named: dict[str, Any], storage: str) -> str | None:
    """The absolute path that a call of torch's ``save`` or ``load`` is about."""
    path = getattr(named.get(storage), "path", None) or named.get("checkpoint_id")
    return None if path is None else os.path.abspath(os.fspath(path))
