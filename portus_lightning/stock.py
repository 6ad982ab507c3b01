"""Lightning's own checkpoint classes, and its reading and writing of files.

There are two copies of Lightning, ``lightning`` and ``pytorch_lightning`` (on
``lightning_fabric``), with equal classes that do not know each other. ``PortusIO`` belongs to
both: it is registered with the abstract base class of each copy that the program has loaded.
"""

from __future__ import annotations

import abc
import importlib
import importlib.util
import logging
import os
import sys
from typing import Any, Final

import portus

LIGHTNING: Final = portus.Framework("Lightning", logging.getLogger("portus_lightning"))

_COPIES: Final = ("lightning.fabric", "lightning_fabric")


def adopt(plugin: type, *, load: bool) -> None:
    """Make ``issubclass(plugin, CheckpointIO)`` true in every loaded copy of Lightning.

    load: if none is, load the installed ones, since the program will make a ``Trainer``.
    """
    copies = [copy for copy in _COPIES if copy in sys.modules]
    if load and not copies:
        copies = [each for each in _COPIES if importlib.util.find_spec(each.partition(".")[0])]
    for copy in copies:
        base = importlib.import_module(f"{copy}.plugins.io.checkpoint_io").CheckpointIO
        assert isinstance(base, abc.ABCMeta)
        # Connectors check by isinstance, each against its own copy's class: a Trainer refuses a
        # plugin derived from the other's.
        base.register(plugin)


def torch_io() -> Any:
    """Return Lightning's own plugin, of a loaded copy. Raise ``ImportError`` without Lightning."""
    copy = next((copy for copy in _COPIES if copy in sys.modules), _COPIES[0])
    return importlib.import_module(f"{copy}.plugins.io.torch_io").TorchCheckpointIO()


def is_on() -> bool:
    """Return False if saves are left to Lightning: ``$PORTUS_DISABLE``, or not on Linux."""
    return not LIGHTNING.saves_itself()


def local_path(path: str | os.PathLike[str]) -> str | None:
    """Return the absolute path on this machine's file systems; None for a URL of another place."""
    text = os.fspath(path)
    if text.startswith(("file://", "local://")):
        text = text.partition("://")[2]
    elif "://" in text or "::" in text:
        return None
    return os.path.abspath(text)
