"""Names of files that are derived from other names."""

from __future__ import annotations

import hashlib
import os
from typing import Final

NAME_MAX: Final = 255
"""Bytes of a name, at most, on file systems of Linux."""

_DIGEST: Final = 16
"""Hex digits of the digest in a shortened name."""


def fitting(name: str, room: int) -> str:
    """Return ``name`` if it has at most ``room`` bytes; else its beginning, in whole characters,
    and a digest of all of it. Equal names give equal results, different names different ones."""
    data = os.fsencode(name)
    if len(data) <= room:
        return name
    # In bytes, as file systems count: a Chinese character has three.
    end = room - _DIGEST - 1
    while data[end] & 0xC0 == 0x80 and end:
        end -= 1  # within a character of UTF-8
    return f"{os.fsdecode(data[:end])}-{hashlib.sha256(data).hexdigest()[:_DIGEST]}"


def hidden_name(name: str, end: str) -> str:
    """Return the name of a hidden file beside the one called ``name``; it ends in ``end``."""
    return f".{fitting(name, NAME_MAX - 1 - len(os.fsencode(end)))}{end}"
