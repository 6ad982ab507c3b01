"""The capture of the files that Accelerate would write into a checkpoint directory.

``Accelerator.save_state`` decides what is saved, and by what name, in a dozen calls of
``torch.save`` and of safetensors. While a ``Capture`` is on, it receives these calls. So Portus
saves all that Accelerate saves, of any version and device, and the objects are the live ones:
nothing was copied or pickled.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from _codecs import encode
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from accelerate.utils import other

import portus

Writer = Callable[..., Any]


class Capture:
    """The files of one checkpoint directory: the content of each, and how to write it."""

    def __init__(self, directory: str) -> None:
        """Capture the files of ``directory``."""
        self.directory: Final = os.path.realpath(directory)
        self.flush: Callable[[], object] = lambda: None
        """Save the captured files so far; return when they exist."""
        self.removed: Final[list[str]] = []
        """The directories to remove once the checkpoint is committed."""
        self.parts: Final[dict[str, Any]] = {}
        """The content of each file, under the name that Accelerate gives it."""

    def takes(self, path: Any) -> bool:
        """Return whether a file, which may be an open one, belongs to this capture."""
        if not isinstance(path, str | os.PathLike):
            return False
        above, name = os.path.split(os.fspath(path))
        return bool(name) and os.path.realpath(above) == self.directory

    def add(self, path: Any, value: Any) -> None:
        """Add ``value`` as the content of ``path``."""
        self.parts[os.path.basename(os.fspath(path))] = value


def torch_name(name: str) -> str:
    """Return the name of a torch file with the same content: ``torch.load`` reads pointers."""
    if not name.endswith(".safetensors"):
        return name
    stem = name.removesuffix(".safetensors")
    return f"pytorch_{stem}.bin" if stem.startswith("model") else f"{stem}.bin"


# A variable of the context, so of one thread: saves of other threads stay stock's.
_current: Final[contextvars.ContextVar[Capture | None]] = contextvars.ContextVar(
    "portus_capture", default=None
)


@contextlib.contextmanager
def capturing(directory: str) -> Iterator[Capture]:
    """Capture what this thread has Accelerate save into the directory inside."""
    capture = Capture(directory)
    token = _current.set(capture)
    try:
        yield capture
    finally:
        _current.reset(token)


def current() -> Capture | None:
    """Return the capture that is on in this thread."""
    return _current.get()


_verifying: Final[contextvars.ContextVar[bool]] = contextvars.ContextVar(
    "portus_verifying", default=False
)


@contextlib.contextmanager
def verifying() -> Iterator[None]:
    """Verify what this thread has Accelerate load inside."""
    token = _verifying.set(True)
    try:
        with torch.serialization.safe_globals(_missing()):
            yield
    finally:
        _verifying.reset(token)


def _missing() -> list[Any]:
    """Return the globals that old versions of Accelerate do not allow, and have in their own random
    states: with torch 2.6 and later they silently skip these states."""
    if hasattr(other, "load"):
        return []
    core = getattr(np, "_core", None) or np.core
    return [core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype("uint32")), encode]


def safe_save_file(stock: Writer, tensors: Any, filename: Any, metadata: Any = None) -> Any:
    """Save as ``safetensors.torch.save_file``, or for the capture that is on."""
    capture = _current.get()
    if capture is None or not capture.takes(filename):
        return stock(tensors, filename, metadata=metadata)
    capture.add(filename, portus.Safetensors(tensors, metadata or {}))
    return None


def safe_load_file(stock: Writer, filename: Any, device: Any = "cpu", **named: Any) -> Any:
    """Load as ``safetensors.torch.load_file``, or by ``portus.load`` within ``verifying``."""
    if not _verifying.get():
        return stock(filename, device, **named)
    return portus.load(filename, map_location=device)


class _StandIn(ModuleType):
    """A stand-in for a module, with that module's attributes."""

    def __init__(self, stock: ModuleType) -> None:
        super().__init__(stock.__name__)
        self._stock: Final = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


class Shutil(_StandIn):
    """A stand-in for ``shutil`` within ``transformers.trainer_utils``, with its own ``rmtree``."""

    def rmtree(self, path: Any, *more: Any, **named: Any) -> Any:
        """Remove a tree, or have the capture that is on do it after the commit."""
        capture = _current.get()
        if capture is None:
            return self._stock.rmtree(path, *more, **named)
        capture.removed.append(os.path.abspath(path))
        return None


class Torch(_StandIn):
    """A stand-in for ``torch`` in ``accelerate.checkpointing``, with its own ``load`` and
    ``save``."""

    def load(self, f: Any, *more: Any, **named: Any) -> Any:
        """Load as ``torch.load``, or by ``portus.load`` within ``verifying``."""
        if _verifying.get() and isinstance(f, str | os.PathLike) and not more:
            return portus.load(f, **named)
        return self._stock.load(f, *more, **named)

    def save(self, obj: Any, f: Any, *more: Any, **named: Any) -> Any:
        """Save as ``torch.save``, or for the capture that is on. Every process writes."""
        capture = _current.get()
        if capture is None or not capture.takes(f):
            return self._stock.save(obj, f, *more, **named)
        capture.add(f, obj)
        return None
