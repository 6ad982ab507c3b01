"""Lightning's own ways: its checkpoint classes, and its reading and writing of files.

There are two copies of Lightning, ``lightning`` and ``pytorch_lightning`` (on
``lightning_fabric``), with equal classes that are strangers to each other. ``PortusIO`` belongs to
both: it is registered with the abstract base class of each copy that the program has loaded.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import portus

LIGHTNING: Final = portus.Framework("Lightning", logging.getLogger("portus_lightning"))

_COPIES: Final = ("lightning.fabric", "lightning_fabric")


class TorchIO(Protocol):
    """``TorchCheckpointIO`` of either copy."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write with ``torch.save``."""

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read with ``torch.load``."""

    def remove_checkpoint(self, path: Any) -> None:
        """Remove the file."""


def adopt(plugin: type, *, load: bool) -> None:
    """Make ``issubclass(plugin, CheckpointIO)`` true in every copy that is loaded.

    load: if none is, load those that are installed, since a ``Trainer`` cannot be far.
    """
    copies = [copy for copy in _COPIES if copy in sys.modules]
    if load and not copies:
        copies = [copy for copy in _COPIES if _is_installed(copy)]
    for copy in copies:
        base = importlib.import_module(f"{copy}.plugins.io.checkpoint_io").CheckpointIO
        assert isinstance(base, abc.ABCMeta)
        base.register(plugin)


def torch_io() -> TorchIO:
    """Lightning's own plugin, of a copy that is loaded. ``ImportError`` without Lightning."""
    copy = next((copy for copy in _COPIES if copy in sys.modules), _COPIES[0])
    made: TorchIO = importlib.import_module(f"{copy}.plugins.io.torch_io").TorchCheckpointIO()
    return made


def local_path(path: str | os.PathLike[str]) -> str | None:
    """The absolute path on this machine's file systems; None for a URL of another place."""
    text = os.fspath(path)
    if text.startswith(("file://", "local://")):
        text = text.partition("://")[2]
    elif "://" in text or "::" in text:
        return None
    return os.path.abspath(text)


def choose(copy: str, before: Callable[[Any], None], chosen: Callable[[Any, str], None]) -> None:
    """Where a Trainer of this copy of Lightning looks for the checkpoint to resume from: call
    ``before`` if that is the last one, or a path at which there is nothing; and tell ``chosen``
    which one it found, unless the user named the path. Nothing happens where Lightning looks
    otherwise.
    """
    module = importlib.import_module(f"{copy}.trainer.connectors.checkpoint_connector")
    connector = getattr(module, "_CheckpointConnector", None)
    select = getattr(connector, "_select_ckpt_path", None)
    if connector is None or select is None or hasattr(select, "portus_asks"):
        return

    @functools.wraps(select)
    def selected(self: Any, state_fn: Any, ckpt_path: Any, *more: Any, **named: Any) -> Any:
        if ckpt_path == "last" or _is_missing(ckpt_path):
            before(self.trainer)
        found = select(self, state_fn, ckpt_path, *more, **named)
        local = local_path(found) if found is not None else None
        if local is not None and ckpt_path in (None, "last", "hpc"):
            chosen(self.trainer, local)
        return found

    selected.portus_asks = True  # type: ignore[attr-defined]
    connector._select_ckpt_path = selected


def save_late(
    copy: str,
    saving: Callable[[Any, Any], AbstractContextManager[None]],
    is_there: Callable[[Any, Any], bool | None],
    linked: Callable[[Any, str, str], bool],
) -> None:
    """Where a ``ModelCheckpoint`` of this copy of Lightning saves: enter ``saving``, with the
    Trainer and the callback; ask ``is_there`` whether there is a file; and have ``linked`` make its
    ``last`` link, which Lightning removes before it makes it anew. Nothing happens where Lightning
    does these otherwise.
    """
    callback = importlib.import_module(f"{copy}.callbacks.model_checkpoint").ModelCheckpoint
    names = ("_save_checkpoint", "file_exists", "_link_checkpoint")
    save, exists, make = (getattr(callback, name, None) for name in names)
    if save is None or exists is None or make is None or hasattr(save, "portus_saves"):
        return

    @functools.wraps(save)
    def saved(self: Any, trainer: Any, filepath: str) -> None:
        with saving(trainer, self):
            save(self, trainer, filepath)

    @functools.wraps(exists)
    def existing(self: Any, filepath: Any, trainer: Any) -> bool:
        known = is_there(trainer, filepath)
        return bool(
            exists(self, filepath, trainer) if known is None else trainer.strategy.broadcast(known)
        )

    @functools.wraps(make)
    def made(trainer: Any, filepath: str, linkpath: str) -> None:
        target, link = os.path.abspath(filepath), os.path.abspath(linkpath)
        is_made = target == link
        if not is_made and trainer.is_global_zero:
            with contextlib.suppress(OSError):  # a directory is there, or no links are made here
                is_made = linked(trainer, link, target)
        if is_made:
            trainer.strategy.barrier()
        else:
            make(trainer, filepath, linkpath)

    saved.portus_saves = True  # type: ignore[attr-defined]
    callback._save_checkpoint = saved
    callback.file_exists = existing
    callback._link_checkpoint = staticmethod(made)


def _is_missing(path: Any) -> bool:
    """True for a path at which there is nothing."""
    is_path = isinstance(path, os.PathLike) or (
        isinstance(path, str) and os.path.basename(path) != path
    )
    local = local_path(path) if is_path else None
    return local is not None and not os.path.exists(local)


def _is_installed(copy: str) -> bool:
    return importlib.util.find_spec(copy.partition(".")[0]) is not None
