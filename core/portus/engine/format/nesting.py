"""A limit for the nesting of JSON, checked before it is decoded.

Decoders recurse. Memory that is collected at the interpreter's limit of recursion runs finalizers
that fail there, and Python only prints that they did. So a sender of `[[[[...` could keep such a
finalizer from releasing its resources.
"""

from __future__ import annotations

import re
from typing import Final

DEPTH_MAX: Final = 400
"""Containers inside each other. Items of a shelf are nested 90 deep at most, each in up to four."""

_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_ALIKE: Final = bytes.maketrans(b"{}", b"[]")
_OTHERS: Final = bytes(sorted({*range(256)} - {*b"[]{}"}))


def refuse_deep(data: bytes | memoryview) -> None:
    """Raise ``ValueError`` if ``data`` has containers nested deeper than ``DEPTH_MAX``, or more
    than that many unclosed ones. The decoder refuses other bytes that are no JSON."""
    data = bytes(data)
    if data.count(b"[") + data.count(b"{") <= DEPTH_MAX:
        return
    brackets = _STRING.sub(b"", data).translate(_ALIKE, _OTHERS)
    for _ in range(DEPTH_MAX):
        before, brackets = brackets, brackets.replace(b"[]", b"")
        if len(brackets) == len(before):
            is_deep = len(brackets) > DEPTH_MAX
            break
    else:
        is_deep = bool(brackets)
    if is_deep:
        raise ValueError(f"nested deeper than {DEPTH_MAX}")
