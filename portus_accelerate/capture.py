"""What Accelerate would write into a checkpoint directory, taken from it instead of written.

``Accelerator.save_state`` decides what is saved, and by what name, in a dozen calls of
``torch.save`` and of safetensors. While a ``Capture`` is on, these calls go to it. So whatever
Accelerate saves is saved, of any version and device, and the objects are the live ones: nothing
was copied or pickled.
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
    """The files of one checkpoint directory: what each is to hold, and how to write it."""

    def __init__(self, directory: str) -> None:
        """directory: the one whose files are taken."""
        self.directory: Final = os.path.realpath(directory)
        self.flush: Callable[[], object] = lambda: None
        """Saves what was taken so far; returns when it is there."""
        self.removed: Final[list[str]] = []
        """Directories that are to go once the checkpoint is committed."""
        self.parts: Final[dict[str, Any]] = {}
        """What was taken for each file, under the name that Accelerate gives it."""

    def takes(self, path: Any) -> bool:
        """Whether a file, which may be an open one, goes here."""
        if not isinstance(path, str | os.PathLike):
            return False
        above, name = os.path.split(os.fspath(path))
        return bool(name) and os.path.realpath(above) == self.directory

    def add(self, path: Any, value: Any) -> None:
        """``value`` is to be at ``path``."""
        self.parts[os.path.basename(os.fspath(path))] = value


def torch_name(name: str) -> str:
    """The name of a torch file with the same content: a pointer is read by ``torch.load``."""
    if not name.endswith(".safetensors"):
        return name
    stem = name.removesuffix(".safetensors")
    return f"pytorch_{stem}.bin" if stem.startswith("model") else f"{stem}.bin"


# Of a context, so of one thread: what others save meanwhile goes where they say.
_current: Final[contextvars.ContextVar[Capture | None]] = contextvars.ContextVar(
    "portus_capture", default=None
)


@contextlib.contextmanager
def capturing(directory: str) -> Iterator[Capture]:
    """What this thread has Accelerate save inside, into that directory, goes to the capture."""
    capture = Capture(directory)
    token = _current.set(capture)
    try:
        yield capture
    finally:
        _current.reset(token)


def current() -> Capture | None:
    """The capture that is on in this thread."""
    return _current.get()


_verifying: Final[contextvars.ContextVar[bool]] = contextvars.ContextVar(
    "portus_verifying", default=False
)


@contextlib.contextmanager
def verifying() -> Iterator[None]:
    """What this thread has Accelerate load inside is verified."""
    token = _verifying.set(True)
    try:
        with torch.serialization.safe_globals(_missing()):
            yield
    finally:
        _verifying.reset(token)


def _missing() -> list[Any]:
    """Return what old versions of Accelerate do not allow, and have in their own random states:
    under torch 2.6 and later they pass over these without a word."""
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
    """Load as ``safetensors.torch.load_file``, or, while what is loaded is verified, by
    ``portus.load``."""
    if not _verifying.get():
        return stock(filename, device, **named)
    return portus.load(filename, map_location=device)


class _StandIn(ModuleType):
    """A stand-in for a module, which it was made of."""

    def __init__(self, stock: ModuleType) -> None:
        super().__init__(stock.__name__)
        self._stock: Final = stock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


class Shutil(_StandIn):
    """A stand-in for ``shutil`` within ``transformers.trainer_utils``, with its own ``rmtree``."""

    def rmtree(self, path: Any, *more: Any, **named: Any) -> Any:
        """``shutil.rmtree``, or what is to go after the commit for the capture that is on."""
        capture = _current.get()
        if capture is None:
            return self._stock.rmtree(path, *more, **named)
        capture.removed.append(os.path.abspath(path))
        return None


class Torch(_StandIn):
    """A stand-in for ``torch`` in ``accelerate.checkpointing``, with its own ``load`` and
    ``save``."""

    def load(self, f: Any, *more: Any, **named: Any) -> Any:
        """``torch.load``, or, while what is loaded is verified, ``portus.load``."""
        if _verifying.get() and isinstance(f, str | os.PathLike) and not more:
            return portus.load(f, **named)
        return self._stock.load(f, *more, **named)

    def save(self, obj: Any, f: Any, *more: Any, **named: Any) -> Any:
        """``torch.save``, or what to save for the capture that is on. Every process writes."""
        capture = _current.get()
        if capture is None or not capture.takes(f):
            return self._stock.save(obj, f, *more, **named)
        capture.add(f, obj)
        return None
