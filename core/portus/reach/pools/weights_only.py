"""Pickles of states in pools, by the rules of ``torch.load(weights_only=True)``: loading imports
and calls only what torch allows, and the functions here that make plain numpy arrays. Arrays are
pickled as dtypes in JSON and bytes, so the result is the same for each numpy, and has no
objects."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import pickle
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from portus.engine.state.pickling import PickledState, Reducers, pickle_state
from portus.engine.state.walk import leaves
from portus.errors import CorruptionError, PortusError, UsageError
from portus.reach.format.arrays import array_over, dtype_node, read_dtype, read_shape

_GLOBALS: Final = re.compile(rb"c([\w.]{1,60}\n[\w.]{1,60})\n")
"""Matches what may be the name of a class or function in a pickle; text may look like one. Bounded,
since the search covers all bytes of arrays."""
_LONG: Final = re.compile(rb"\x8b...\0", re.DOTALL)
"""Matches what may be an integer of more than 255 bytes, which torch does not load."""


def array_of(
    node: object, shape: Sequence[object], fortran: object, data: bytes | torch.Tensor
) -> Any:
    """Return the array that was pickled; one over the memory of a tensor of its bytes, as those of
    a shelf; of a tensor without memory that itself. Raises ``CorruptionError``."""
    if not isinstance(fortran, bool):
        raise CorruptionError(f"not the order of an array: {fortran!r:.20}")
    if isinstance(data, torch.Tensor) and data.is_meta:
        return data
    over = data.numpy().data if isinstance(data, torch.Tensor) else bytearray(data)
    return array_over(*read_shape(node, shape), over, "F" if fortran else "C")


def scalar_of(node: object, data: bytes) -> Any:
    """Return the numpy number that was pickled. Raises ``CorruptionError``."""
    dtype = read_dtype(node)
    if len(data) != dtype.itemsize:
        raise CorruptionError(f"a {dtype} needs {dtype.itemsize} bytes, found {len(data)}")
    return np.frombuffer(data, dtype)[0] if data else np.zeros((), dtype)[()]


def no_bytes() -> bytes:
    """Return ``b""``. Its pickle is a call of ``bytes``, for which this function stands."""
    return b""


def _reduce_array(array: np.ndarray[Any, Any]) -> Any:
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    data = array.tobytes("F" if fortran else "C")
    return array_of, (dtype_node(array.dtype), list(array.shape), fortran, data)


def _reduce_scalar(scalar: np.generic) -> Any:
    return scalar_of, (dtype_node(scalar.dtype), scalar.tobytes())


_REDUCERS: Final[Reducers] = {
    np.ndarray: _reduce_array,
    **{np.dtype(each).type: _reduce_scalar for each in "?bhilqBHILQefdgFDGSUVMm"},
}

_ALLOWED: Final[set[Any]] = {
    *(array_of, scalar_of, no_bytes),
    *((no_bytes, "builtins.bytes"), (no_bytes, "__builtin__.bytes")),
}


def _own_unpickler() -> Any:
    """Return a second copy of torch's module: each copy has one set of allowed names, and the set
    of torch's own belongs to the user."""
    spec = importlib.util.find_spec("torch._weights_only_unpickler")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_OWN: Final = _own_unpickler()


def pickle_for_pool(state: object) -> PickledState:
    """Return the pickle of ``state`` for a pool. Raises ``UsageError``, with the key path, for
    values that torch refuses, and for arrays of objects."""
    try:
        return pickle_state(state, _REDUCERS)
    except UsageError as error:
        raise UsageError(f"{_place(state) or 'the state'}: {error}") from error


def unpickle(data: bytes | memoryview, storages: Sequence[torch.UntypedStorage]) -> Any:
    """Return the state that was pickled; its tensors use the memory of ``storages``, in their
    order.

    Raises ``UsageError`` for classes that torch does not allow
    (``torch.serialization.add_safe_globals``), ``CorruptionError`` for bytes that are not the
    pickle of a state.
    """

    def load_storage(said: Any) -> object:
        kind, number = said[1], int(said[2])
        if not 0 <= number < len(storages):
            raise CorruptionError(f"no storage {number} in a state of {len(storages)}")
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        return torch.storage.TypedStorage(
            wrap_storage=storages[number], dtype=dtype, _internal=True
        )

    with torch.inference_mode(False), torch.no_grad(), refusing():
        unpickler = torch_settings()["pickle_module"].Unpickler(io.BytesIO(data), encoding="utf-8")
        unpickler.persistent_load = load_storage
        state = unpickler.load()
        torch._utils._validate_loaded_sparse_tensors()
    return state


def torch_settings() -> dict[str, Any]:
    """Return the settings with which ``torch.load`` allows what ``unpickle`` does."""
    _OWN._marked_safe_globals_set = {*torch.serialization.get_safe_globals(), *_ALLOWED}
    # With weights_only torch would take its own module, which is like this one.
    return {"map_location": "cpu", "pickle_module": _OWN, "weights_only": False}


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Raise ``UsageError`` for what torch does not allow, and ``CorruptionError`` for all else that
    an unpickler may raise."""
    try:
        yield
    except (PortusError, MemoryError):
        raise
    except pickle.UnpicklingError as error:
        raise UsageError(f"torch.load(weights_only=True) does not allow it: {error}") from error
    except Exception as error:
        raise CorruptionError(f"not the pickle of a state: {error!r:.200}") from error


class LoadCheck:
    """Checks that states can be loaded again; once for those with objects of the same classes."""

    def __init__(self) -> None:
        self._known: frozenset[bytes] | None = None

    def check(self, state: object, pickled: PickledState) -> None:
        """Raise ``UsageError``, with the key path, for a state that could not be loaded again."""
        names = frozenset(_GLOBALS.findall(pickled.pickle))
        known = self._known is not None and names <= self._known
        if known and not _LONG.search(pickled.pickle):
            return
        try:
            unpickle(pickled.pickle, pickled.storages)
        except (UsageError, CorruptionError) as error:
            raise UsageError(f"{_place(state) or 'the state'}: {error}") from error
        self._known = names | (self._known or frozenset())


def _place(state: object) -> str:
    """Return the key path of the first leaf that cannot be saved and loaded again on its own; else
    ""."""
    for path, value in leaves(state):
        try:
            alone = pickle_state(value, _REDUCERS)
            unpickle(alone.pickle, alone.storages)
        except (UsageError, CorruptionError):
            return path
    return ""
