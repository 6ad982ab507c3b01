"""Values that are neither tensors nor containers, as tagged JSON.

A node is what JSON has (None, bool, int of 64 bits, finite float, str, list, dict) or a dict with
one key that begins with ``$``, the tag. ``KINDS`` is the table of the tags here; tree.py
names the others. Reading checks everything and calls nothing that a file names.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import datetime
import enum
import functools
import io
import math
import pathlib
import struct
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import torch

from portus.client.state import classes
from portus.errors import CorruptionError
from portus.format import arrays
from portus.format.text import is_text

Write = Callable[[object], object]
"""Turns a value inside a leaf into a node."""
Read = Callable[[object], object]
"""Turns such a node back."""

INT_MIN: Final = -(1 << 63)
INT_MAX: Final = (1 << 64) - 1
PLAIN: Final = frozenset({type(None), bool, int, float, str})
CONTAINERS: Final[frozenset[type]] = frozenset(
    {
        *(dict, list, tuple, deque, OrderedDict, defaultdict, Counter, np.ndarray),
        *(bytes, bytearray, io.BytesIO, argparse.Namespace, types.SimpleNamespace),
    }
)
"""Types whose values, of exactly that type, a tree holds with what is in them."""

_INFINITIES: Final = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


@dataclass(frozen=True, slots=True)
class LeafKind:
    """How one type is written and read. ``read`` may raise anything in ``tree.FOREIGN``."""

    tag: str
    write: Callable[[Any, Write], object]
    read: Callable[[object, Read], object]

    def node(self, value: object, write: Write) -> dict[str, object]:
        """``value`` with its tag."""
        return {self.tag: self.write(value, write)}


def plain_node(value: object) -> object:
    """The node of a None, bool, int, float or str (of exactly that type)."""
    kind = type(value)
    if kind is str:
        return value if is_text(value) else {"$str": _write_str(value)}  # type: ignore[arg-type]
    if kind is int and not INT_MIN <= value <= INT_MAX:  # type: ignore[operator]
        return {"$int": hex(value)}  # type: ignore[arg-type]
    if kind is float and not math.isfinite(value):  # type: ignore[arg-type]
        return {"$float": _write_float(value)}  # type: ignore[arg-type]
    return value


def kind_of(value: object) -> LeafKind | None:
    """How to write ``value``, or None if it is no leaf that can be saved."""
    kind = _BY_TYPE.get(type(value))
    if kind is not None:
        return kind
    return next((kind for family, kind in _FAMILIES if isinstance(value, family)), None)


def unpack(node: object, count: int) -> list[Any]:
    """A list of exactly ``count`` nodes. Raises ``CorruptionError``."""
    if not isinstance(node, list) or len(node) != count:
        raise CorruptionError(f"expected {count} items, found {node!r:.80}")
    return node


def text(node: object) -> str:
    """A string. Raises ``CorruptionError``."""
    if not isinstance(node, str):
        raise CorruptionError(f"expected a string, found {node!r:.80}")
    return node


def name(node: object) -> classes.Name:
    """The name of a class or function. Raises ``CorruptionError``."""
    module, qualname = unpack(node, 2)
    return classes.Name(text(module), text(qualname))


def name_node(found: classes.Name) -> list[str]:
    """The opposite of ``name``."""
    return [found.module, found.qualname]


def named_values(items: object) -> dict[str, object]:
    """``items``, a dict with names of attributes for keys. Raises ``CorruptionError``."""
    if not isinstance(items, dict) or not all(isinstance(key, str) for key in items):
        raise CorruptionError(f"expected names and values, found {items!r:.80}")
    return items


def base64_text(data: bytes | bytearray | memoryview) -> str:
    """Bytes as text."""
    return base64.b64encode(data).decode("ascii")


def base64_bytes(node: object) -> bytes:
    """The opposite of ``base64_text``. Raises ``CorruptionError``."""
    try:
        return base64.b64decode(text(node), validate=True)
    except binascii.Error as error:
        raise CorruptionError(f"not base64: {error}") from error


def _integers(node: object, count: int) -> list[int]:
    items = unpack(node, count)
    if any(type(item) is not int for item in items):
        raise CorruptionError(f"expected {count} integers, found {node!r:.80}")
    return items


def _write_float(value: float) -> str:
    word = repr(value)
    bits = struct.pack(">d", value)
    return word if bits == struct.pack(">d", _INFINITIES[word]) else bits.hex()


def _read_float(node: object, _: Read) -> object:
    word = text(node)
    if word in _INFINITIES:
        return _INFINITIES[word]
    bits = bytes.fromhex(word)
    if len(bits) != 8:
        raise CorruptionError(f"not the bits of a float: {word:.40}")
    value: float = struct.unpack(">d", bits)[0]
    return value


def _read_int(node: object, _: Read) -> object:
    return int(text(node), 16)  # hexadecimal: linear in time, unlike decimal


def _write_str(value: str) -> str:
    return base64_text(value.encode("utf-8", "surrogatepass"))


def _read_str(node: object, _: Read) -> object:
    return base64_bytes(node).decode("utf-8", "surrogatepass")


def _read_complex(node: object, read: Read) -> object:
    real, imaginary = (read(part) for part in unpack(node, 2))
    if not (isinstance(real, float) and isinstance(imaginary, float)):
        raise CorruptionError(f"not a complex number: {node!r:.80}")
    return complex(real, imaginary)


def _read_torch(kind: type) -> Callable[[object, Read], object]:
    """A reader of names such as ``float32`` for objects of ``kind`` that torch holds."""
    named = {
        str(value).removeprefix("torch."): value
        for value in vars(torch).values()
        if isinstance(value, kind)
    }

    def read(node: object, _: Read) -> object:
        if text(node) not in named:
            raise CorruptionError(f"this torch has no {kind.__name__} {node!r:.80}")
        return named[text(node)]

    return read


def _torch_kind(kind: type) -> LeafKind:
    tag = f"${kind.__name__}"
    return LeafKind(tag, lambda value, _: str(value).removeprefix("torch."), _read_torch(kind))


def _path_kind(tag: str, make: Callable[[str], pathlib.PurePath]) -> LeafKind:
    return LeafKind(
        tag, lambda value, write: write(str(value)), lambda node, read: make(text(read(node)))
    )


def _read_zone(node: object, read: Read) -> datetime.tzinfo | None:
    zone = read(node)
    if zone is not None and not isinstance(zone, datetime.timezone):
        raise CorruptionError(f"not a time zone: {node!r:.80}")
    return zone


def _write_timezone(value: datetime.timezone, write: Write) -> object:
    delta, *label = value.__getinitargs__()  # type: ignore[attr-defined]
    return [write(delta), *map(write, label)]


def _read_timezone(node: object, read: Read) -> object:
    if not isinstance(node, list) or not 1 <= len(node) <= 2:
        raise CorruptionError(f"not a time zone: {node!r:.80}")
    return datetime.timezone(*map(read, node))  # type: ignore[arg-type]


def _write_time(value: datetime.time | datetime.datetime, write: Write) -> list[object]:
    clock: list[object] = [value.hour, value.minute, value.second, value.microsecond, value.fold]
    return [*clock, write(value.tzinfo)]


def _write_datetime(value: datetime.datetime, write: Write) -> object:
    return [value.year, value.month, value.day, *_write_time(value, write)]


def _read_datetime(node: object, read: Read) -> object:
    *numbers, zone = unpack(node, 9)
    *clock, fold = _integers(numbers, 8)
    return datetime.datetime(*clock, tzinfo=_read_zone(zone, read), fold=fold)  # type: ignore[misc,arg-type]


def _read_time(node: object, read: Read) -> object:
    *numbers, zone = unpack(node, 6)
    *clock, fold = _integers(numbers, 5)
    return datetime.time(*clock, tzinfo=_read_zone(zone, read), fold=fold)  # type: ignore[misc,arg-type]


def _read_size(node: object, _: Read) -> object:
    sizes = _integers(node, len(node) if isinstance(node, list) else 0)
    if any(not INT_MIN <= size < -INT_MIN for size in sizes):
        raise CorruptionError(f"size out of range: {node!r:.80}")
    return torch.Size(sizes)


def _range(start: Any, stop: Any, step: Any) -> range:
    return range(start, stop, step)


def _write_set(value: set[object] | frozenset[object], write: Write) -> object:
    # Sorted, so that equal sets give equal bytes in every process.
    return sorted(map(write, value), key=msgspec.json.encode)


def _set_items(node: object, read: Read) -> list[object]:
    if not isinstance(node, list):
        raise CorruptionError(f"not a set: {node!r:.80}")
    return [read(item) for item in node]


def _write_scalar(value: np.generic, write: Write) -> object:
    if isinstance(value, np.str_):  # numpy's own ways drop zeros at its end
        return ["str_", write(str.__str__(value))]
    if isinstance(value, np.bytes_):
        return ["bytes_", write(bytes(value))]
    return [arrays.dtype_node(value.dtype), base64_text(arrays.scalar_bytes(value))]


def _read_scalar(node: object, read: Read) -> object:
    dtype, data = unpack(node, 2)
    if dtype == "str_":
        return np.str_(text(read(data)))
    if dtype == "bytes_":
        inner = read(data)
        if not isinstance(inner, bytes):
            raise CorruptionError(f"not the bytes of a numpy scalar: {node!r:.80}")
        return np.bytes_(inner)
    return arrays.read_scalar(arrays.read_dtype(dtype), base64_bytes(data))


def _write_enum(value: enum.Enum, _: Write) -> object:
    return [name_node(classes.name_of(type(value))), *classes.member_names(value)]


def _read_enum(node: object, _: Read) -> object:
    if not isinstance(node, list) or not node:
        raise CorruptionError(f"not a member of an enum: {node!r:.80}")
    owner, *members = node
    return classes.find_member(classes.find(name(owner)), map(text, members))


def _write_callable(value: object, _: Write) -> object:
    return name_node(classes.callable_name(value))


def _read_callable(node: object, _: Read) -> object:
    return classes.find_callable(name(node))


def _write_partial(value: functools.partial[object], write: Write) -> object:
    return [name_node(classes.partial_name(value)), write(value.args), write(value.keywords)]


def _read_partial(node: object, read: Read) -> object:
    owner, positional, keywords = unpack(node, 3)
    args, options = read(positional), named_values(read(keywords))
    if not isinstance(args, tuple):
        raise CorruptionError(f"not a partial: {node!r:.80}")
    return functools.partial(classes.find_partial(name(owner)), *args, **options)


_CALLABLE: Final = LeafKind("$name", _write_callable, _read_callable)

_BY_TYPE: Final[Mapping[type, LeafKind]] = {
    int: LeafKind("$int", lambda value, _: hex(value), _read_int),
    float: LeafKind("$float", lambda value, _: _write_float(value), _read_float),
    str: LeafKind("$str", lambda value, _: _write_str(value), _read_str),
    complex: LeafKind(
        "$complex", lambda value, write: [write(value.real), write(value.imag)], _read_complex
    ),
    set: LeafKind("$set", _write_set, lambda node, read: set(_set_items(node, read))),
    frozenset: LeafKind(
        "$frozenset", _write_set, lambda node, read: frozenset(_set_items(node, read))
    ),
    range: LeafKind(
        "$range",
        lambda value, write: [write(value.start), write(value.stop), write(value.step)],
        lambda node, read: _range(*map(read, unpack(node, 3))),
    ),
    slice: LeafKind(
        "$slice",
        lambda value, write: [write(value.start), write(value.stop), write(value.step)],
        lambda node, read: slice(*map(read, unpack(node, 3))),
    ),
    torch.Size: LeafKind(
        "$Size",
        lambda value, _: list(value),
        _read_size,
    ),
    torch.dtype: _torch_kind(torch.dtype),
    torch.layout: _torch_kind(torch.layout),
    torch.memory_format: _torch_kind(torch.memory_format),
    torch.device: LeafKind(
        "$device", lambda value, _: str(value), lambda node, _: torch.device(text(node))
    ),
    type(pathlib.Path()): _path_kind("$path", pathlib.Path),
    pathlib.PurePosixPath: _path_kind("$pure_posix_path", pathlib.PurePosixPath),
    pathlib.PureWindowsPath: _path_kind("$pure_windows_path", pathlib.PureWindowsPath),
    datetime.timedelta: LeafKind(
        "$timedelta",
        lambda value, _: [value.days, value.seconds, value.microseconds],
        lambda node, _: datetime.timedelta(*_integers(node, 3)),
    ),
    datetime.timezone: LeafKind("$timezone", _write_timezone, _read_timezone),
    datetime.datetime: LeafKind("$datetime", _write_datetime, _read_datetime),
    datetime.date: LeafKind(
        "$date",
        lambda value, _: [value.year, value.month, value.day],
        lambda node, _: datetime.date(*_integers(node, 3)),
    ),
    datetime.time: LeafKind("$time", _write_time, _read_time),
    functools.partial: LeafKind("$partial", _write_partial, _read_partial),
}

_FAMILIES: Final[tuple[tuple[type | tuple[type, ...], LeafKind], ...]] = (
    (enum.Enum, LeafKind("$enum", _write_enum, _read_enum)),
    (np.generic, LeafKind("$numpy_scalar", _write_scalar, _read_scalar)),
    (
        np.dtype,
        LeafKind(
            "$numpy_dtype",
            lambda value, _: arrays.dtype_node(value),
            lambda node, _: arrays.read_dtype(node),
        ),
    ),
    ((type, *classes.FUNCTIONS), _CALLABLE),
)

TYPES: Final = PLAIN | _BY_TYPE.keys()
"""Values of exactly these types are leaves."""

KINDS: Final[Mapping[str, LeafKind]] = {
    kind.tag: kind for kind in (*_BY_TYPE.values(), *(kind for _, kind in _FAMILIES))
}
"""Every tag of a leaf that is written without storage."""
