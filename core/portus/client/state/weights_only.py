"""Pickles of states in pools, by the rules of ``torch.load(weights_only=True)``: nothing that they
name is imported or called but what torch allows, and what numpy needs for plain arrays."""

from __future__ import annotations

import io
import pickle
import re
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import _weights_only_unpickler

from portus.client.state.pickling import PickledState, pickle_state
from portus.client.state.walk import leaves
from portus.errors import CorruptionError, UsageError

_NUMPY: Final[list[Any]] = [
    *(np.ndarray, np.dtype, np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0]),
    *{type(np.dtype(each)) for each in "?bhilqBHILQefdgFDGSUVMm"},
]
_ALLOWING: Final = threading.RLock()
"""What torch allows is one set for the process. A signal handler may load, too."""

_GLOBALS: Final = re.compile(rb"c([\w.]+\n[\w.]+)\n")
"""What may be the name of a class or function in a pickle; text may look like one."""
_LONG: Final = re.compile(rb"\x8b...\0", re.DOTALL)
"""What may be an integer of more than 255 bytes, which torch does not load."""


def unpickled(data: bytes | memoryview, storages: Sequence[torch.UntypedStorage]) -> Any:
    """The state that was pickled; its tensors use the memory of ``storages``, in their order.

    Raises ``UsageError`` for what torch does not allow (``torch.serialization.add_safe_globals``),
    ``CorruptionError`` for what is no pickle of a state.
    """

    def stored(said: Any) -> object:
        kind, number = said[1], int(said[2])
        if not 0 <= number < len(storages):
            raise CorruptionError(f"no storage {number} in a state of {len(storages)}")
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        return torch.storage.TypedStorage(
            wrap_storage=storages[number], dtype=dtype, _internal=True
        )

    unpickler = _weights_only_unpickler.Unpickler(io.BytesIO(data), encoding="utf-8")
    unpickler.persistent_load = stored  # type: ignore[method-assign]
    try:
        with (
            _ALLOWING,
            torch.serialization.safe_globals(_NUMPY),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            state = unpickler.load()
            torch._utils._validate_loaded_sparse_tensors()
    except (CorruptionError, MemoryError):
        raise
    except pickle.UnpicklingError as error:
        raise UsageError(f"torch.load(weights_only=True) does not allow it: {error}") from error
    except Exception as error:
        raise CorruptionError(f"not the pickle of a state: {error!r:.200}") from error
    return state


class Loadable:
    """Whether states can be loaded again. Tried once for those that hold objects of the same
    classes."""

    def __init__(self) -> None:
        self._known: frozenset[bytes] | None = None

    def check(self, state: object, pickled: PickledState) -> None:
        """Raise ``UsageError``, with the key path, for a state that could not be loaded again."""
        names = frozenset(_GLOBALS.findall(pickled.pickle))
        known = self._known is not None and names <= self._known
        if known and not _LONG.search(pickled.pickle):
            return
        try:
            unpickled(pickled.pickle, pickled.storages)
        except (UsageError, CorruptionError) as error:
            raise UsageError(f"{_place(state) or 'the state'}: {error}") from error
        self._known = names | (self._known or frozenset())


def _place(state: object) -> str:
    """The key path of the first leaf that alone cannot be loaded again either."""
    for path, value in leaves(state):
        try:
            alone = pickle_state(value)
            unpickled(alone.pickle, alone.storages)
        except (UsageError, CorruptionError):
            return path
    return ""
