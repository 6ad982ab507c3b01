"""numpy dtypes, arrays and scalars as JSON and bytes. No object arrays, so nothing to unpickle."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np

from portus.errors import CorruptionError, UsageError

_PLAIN: Final = re.compile(r"[<>|][biufcSUVmM]\d{1,10}(\[\d{0,9}[A-Za-z]{1,7}\])?")
_NAMES_DEPTH_MAX: Final = 16


def array_over(
    dtype: np.dtype[Any],
    sizes: Sequence[int],
    data: bytearray | memoryview,
    order: Literal["C", "F"] = "C",
) -> np.ndarray[Any, Any]:
    """Return the array over ``data``, in numpy's ``order``. Raise ``CorruptionError`` if its size
    is wrong."""
    size = dtype.itemsize * math.prod(sizes)
    if len(data) != size:
        raise CorruptionError(f"array needs {size} bytes, found {len(data)}")
    over: np.ndarray[Any, Any] = np.ndarray(tuple(sizes), dtype, buffer=data, order=order)
    return over


def dtype_node(dtype: np.dtype[Any]) -> object:
    """Return ``dtype`` as JSON: a string, or a list of fields. Raise ``UsageError``."""
    if dtype.hasobject:
        raise UsageError(
            "numpy arrays of Python objects cannot be saved; convert it to a list or to a "
            "plain dtype"
        )
    if dtype.metadata is None:
        node = _lists(np.lib.format.dtype_to_descr(dtype))
        try:
            back = read_dtype(node)
        except CorruptionError:
            back = None
        if back is not None and back == dtype and back.type is dtype.type:
            return node
    raise UsageError(f"numpy dtype {dtype} cannot be saved; use a plain one")


def read_dtype(node: object) -> np.dtype[Any]:
    """Return the dtype of JSON from ``dtype_node``. Raise ``CorruptionError`` if it is none."""
    try:
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(_description(node, 0))
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise CorruptionError(f"not a numpy dtype: {node!r:.80} ({error})") from error
    if isinstance(node, str) and dtype.str != node:  # numpy 1 lets sizes wrap around
        raise CorruptionError(f"not a numpy dtype: {node!r:.80}, which is read as {dtype.str!r}")
    if dtype.hasobject:
        raise CorruptionError(f"numpy dtype of Python objects: {node!r:.80}")
    return dtype


def _lists(description: object) -> object:
    if isinstance(description, (list, tuple)):
        return [_lists(item) for item in description]
    return description


def _description(node: object, depth: int) -> Any:
    """Return a description for numpy. Only strings of the plain kind reach its parser."""
    if isinstance(node, str) and _PLAIN.fullmatch(node):
        return node
    if isinstance(node, list) and depth < _NAMES_DEPTH_MAX:
        return [_field(field, depth) for field in node]
    raise CorruptionError(f"not a numpy dtype: {node!r:.80}")


def _field(node: object, depth: int) -> tuple[Any, ...]:
    if not (isinstance(node, list) and 2 <= len(node) <= 3 and isinstance(node[0], str)):
        raise CorruptionError(f"not a field of a numpy dtype: {node!r:.80}")
    return (node[0], _description(node[1], depth + 1), *map(tuple, node[2:]))


def read_sizes(node: Sequence[object]) -> tuple[int, ...]:
    """Return the sizes of a tensor or an array from JSON. Raise ``CorruptionError``."""
    sizes = tuple(size for size in node if type(size) is int and 0 <= size < 1 << 63)
    if len(sizes) != len(node):
        raise CorruptionError(f"not the sizes of a tensor or an array: {node!r:.80}")
    return sizes


def read_shape(dtype: object, shape: Sequence[object]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return dtype and sizes of an array from JSON. Raise ``CorruptionError``."""
    sizes, read = read_sizes(shape), read_dtype(dtype)
    if len(sizes) > 32:
        raise CorruptionError(f"not the shape of an array: {shape!r:.80}")
    if read.itemsize == 0 and 0 not in sizes:
        raise CorruptionError(f"array of {sizes} elements without bytes")
    return read, sizes
