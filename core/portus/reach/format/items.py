"""The decoder of a shelf's contents: its containers and values, and the places of its arrays. They
are plain JSON. A value that JSON lacks is an object with one key, the tag: see ``docs/format.md``.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np

from portus.engine.format.dtypes import ITEM_SIZES
from portus.engine.format.nesting import refuse_deep
from portus.errors import CorruptionError, PortusError, UsageError
from portus.reach.format.arrays import read_shape, read_sizes

DEPTH_MAX: Final = 90
"""Containers inside each other, at most."""


class StoredArray(msgspec.Struct, frozen=True):
    """A tensor or an array of a shelf: all of a storage, in row-major order.

    ``name``: its key path, for messages. ``dtype``: torch's name of a tensor's, without the
    ``torch.``; numpy's of an array.
    """

    name: str
    storage: int
    sizes: tuple[int, ...]
    dtype: str | np.dtype[Any]

    @property
    def size(self) -> int:
        """Bytes of the array."""
        return item_size(self.dtype) * math.prod(self.sizes)


def item_size(dtype: str | np.dtype[Any]) -> int:
    """Return the bytes of an element of a tensor or an array."""
    return ITEM_SIZES[dtype] if isinstance(dtype, str) else dtype.itemsize


Make = Callable[[StoredArray], object]
"""A function that makes the object for a tensor or an array."""

_FLOATS: Final = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def decode(contents: bytes | memoryview, make: Make = lambda array: array) -> dict[str, Any]:
    """Return the items of a shelf by their names. Raise ``CorruptionError`` for contents that are
    not those of a shelf, ``UsageError`` for those of a newer Portus."""
    try:
        refuse_deep(contents)
        items = _item(msgspec.json.decode(contents), make, "", 0)
    except PortusError:
        raise
    except (msgspec.DecodeError, TypeError, ValueError, LookupError) as error:
        raise CorruptionError(f"not the contents of a shelf: {error}") from error
    if not isinstance(items, dict):
        raise CorruptionError("not the contents of a shelf: no dict")
    return items


def _item(node: Any, make: Make, path: str, depth: int) -> Any:
    if depth > DEPTH_MAX + 1:
        raise CorruptionError(f"a shelf nested deeper than {DEPTH_MAX}")
    if isinstance(node, list):
        return [_item(each, make, f"{path}.{i}", depth + 1) for i, each in enumerate(node)]
    if not isinstance(node, dict):
        return node
    tag = next((key for key in node if key.startswith("$")), None)
    if tag is None:
        return _dict(node.items(), make, path, depth)
    [content] = node.values()
    if tag in ("$tensor", "$array"):
        return make(_array(path, *content, is_tensor=tag == "$tensor"))
    if tag == "$dict":
        return _dict(content, make, path, depth)
    if tag == "$tuple":
        return tuple(_item(content[0], make, path, depth))
    return _value(tag, content)


def _dict(items: Any, make: Make, path: str, depth: int) -> dict[Any, Any]:
    dot = "." if path else ""
    return {key: _item(each, make, f"{path}{dot}{key}", depth + 1) for key, each in items}


def _array(name: str, storage: Any, dtype: Any, sizes: Any, *, is_tensor: bool) -> StoredArray:
    if type(storage) is not int:
        raise CorruptionError(f"{name}: not a storage: {storage!r:.80}")
    if not is_tensor:
        read, shape = read_shape(dtype, sizes)
        return StoredArray(name, storage, shape, read)
    if dtype not in ITEM_SIZES:
        raise UsageError(f"{name}: unknown dtype {dtype!r:.40}: a newer Portus wrote it")
    return StoredArray(name, storage, read_sizes(sizes), dtype)


def _value(tag: str, content: Any) -> object:
    if tag == "$int":
        return int(content, 16)
    if tag == "$float":
        return _FLOATS[content]
    if tag == "$bytes":
        try:
            return base64.b64decode(content[0], validate=True)
        except binascii.Error as error:
            raise CorruptionError(f"not base64: {error}") from error
    raise UsageError(
        f"unknown tag {tag!r:.40}: expected a shelf; what a newer Portus wrote is not read"
    )
