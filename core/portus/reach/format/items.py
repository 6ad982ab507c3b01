"""The tree of a shelf, read: its containers and values, and where its arrays are. Plain JSON, in
which what JSON lacks is an object with one key, the tag: see ``docs/format.md``.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable
from typing import Any, Final

import msgspec

from portus.engine.format.nesting import refuse_deep
from portus.errors import CorruptionError, PortusError, UsageError
from portus.reach.format.arrays import ArrayShape, read_shape

DEPTH_MAX: Final = 90
"""Containers inside each other."""

Make = Callable[[int, ArrayShape | None], object]
"""Makes what stands for a tensor of the layout; for an array of numpy it gets its shape."""

_FLOATS: Final = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def decode(tree: bytes | memoryview, make: Make) -> dict[str, Any]:
    """The items of a shelf by their names. Raises ``CorruptionError`` for a tree that is no
    shelf's, ``UsageError`` for one of a newer Portus."""
    try:
        refuse_deep(tree)
        items = _item(msgspec.json.decode(tree), make, 0)
    except PortusError:
        raise
    except (msgspec.DecodeError, TypeError, ValueError, LookupError) as error:
        raise CorruptionError(f"not the tree of a shelf: {error}") from error
    if not isinstance(items, dict):
        raise CorruptionError("not the tree of a shelf: it is not a dict")
    return items


def _item(node: Any, make: Make, depth: int) -> Any:
    if depth > DEPTH_MAX + 1:
        raise CorruptionError(f"a shelf nested deeper than {DEPTH_MAX}")
    if isinstance(node, list):
        return [_item(each, make, depth + 1) for each in node]
    if not isinstance(node, dict):
        return node
    tag = next((key for key in node if key.startswith("$")), None)
    if tag is None:
        return {key: _item(value, make, depth + 1) for key, value in node.items()}
    [content] = node.values()
    if tag == "$tensor":
        return make(int(content), None)
    if tag == "$array":
        data, dtype, sizes, fortran = content
        return make(int(data["$tensor"]), read_shape(dtype, sizes, fortran))
    if tag == "$dict":
        return {key: _item(value, make, depth + 1) for key, value in content}
    if tag == "$tuple":
        return tuple(_item(each, make, depth + 1) for each in content[0])
    return _value(tag, content)


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
        f"unknown tag {tag!r:.40}: expected a shelf; protected tables of 0.1.0, and what a newer "
        "Portus wrote, are not read"
    )
