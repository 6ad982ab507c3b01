"""Examples of every message, made from its declaration: the least that its fields may be, and much.

What a declaration allows is tried, so a message that is added is tried as well.
"""

from __future__ import annotations

import enum
import struct
import typing
from collections.abc import Iterator
from typing import Any

from portus.reach.protocol import messages as said
from portus.reach.protocol.connection import HEADER, _check
from portus.reach.protocol.messages import Said, pack_column
from portus.reach.protocol.vocabulary import MessageKind

TOKEN = bytes(range(16))

BYTES = pack_column([5, 1 << 40, 3, 4096])
"""Two ranges, a column of four numbers, two digests, two handles, a proof."""


def header(length: int, number: int) -> bytes:
    """A header with the right check, of a length or a kind that nobody may say."""
    start = struct.pack("<IB", length, number)
    return HEADER.pack(length, number, _check(start))


def example(kind: MessageKind, *, least: bool) -> Said:
    """A message of that kind."""
    assert kind.type is not None
    hints = typing.get_type_hints(kind.type, include_extras=True)
    values = {name: _value(hints[name], least) for name in kind.type.__struct_fields__}
    made: Said = kind.type(**values)
    return made


def _value(hint: Any, least: bool) -> object:
    """A value of a field: zero, nothing or the shortest; else the largest number, or some."""
    metas = getattr(hint, "__metadata__", ())
    kind = hint.__origin__ if metas else hint
    limits = {
        name: limit
        for meta in metas
        for name in ("ge", "le", "lt", "min_length", "max_length")
        if (limit := getattr(meta, name)) is not None
    }
    choices = typing.get_args(kind)
    if type(None) in choices:
        return None if least else _value(choices[0], least)
    if kind is bool:
        return not least
    if kind is int:
        largest = limits.get("le", limits.get("lt", said.SIZE_MAX + 1) - 1)
        return limits.get("ge", 0) if least else largest
    if kind in (bytes, str):
        size = limits.get("min_length", 0)
        some = BYTES if kind is bytes else "net@40: no space"
        if not least:
            size = max(size, min(len(some), limits.get("max_length", len(some))))
        return (some * (size // len(some) + 1))[:size]
    if isinstance(kind, enum.EnumMeta):
        return list(kind)[0 if least else -1]
    if typing.get_origin(kind) is list:
        return [] if least else [_value(choices[0], least)]
    if typing.get_origin(kind) is dict:
        return {} if least else {"val_loss": 0.25}
    raise AssertionError(f"{hint}: say what an example of it is")


def every(*, least: bool) -> Iterator[tuple[MessageKind, Said]]:
    """Each message that is no plain bytes, and an example of it."""
    for kind in said.MESSAGES:
        if not kind.is_payload:
            yield kind, example(kind, least=least)


NEXT = {(before, kind): after for kind in said.MESSAGES for before, after in kind.moves.items()}
"""The state after each state and message."""

LEAST = dict(every(least=True))
EXAMPLES = dict(every(least=False))
