"""The rules of all stores for names of objects, and an error of all."""

from __future__ import annotations

import re
from typing import Final

from portus.errors import CorruptionError, UsageError

NAME_SIZE_MAX: Final = 900
"""Bytes. The smallest limit of a store is 1,024 (Google and S3); the rest is for the prefix."""

_SEGMENT: Final = "[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,254}"
"""At most 255 characters, as in file systems."""

_NAME: Final = re.compile(f"{_SEGMENT}(?:/{_SEGMENT})*")


def is_name(name: str) -> bool:
    """Return whether an object may have this name."""
    return len(name) <= NAME_SIZE_MAX and _NAME.fullmatch(name) is not None


def check_name(name: str, where: object) -> str:
    """Return ``name``, if an object may have it. Raise ``UsageError`` if not."""
    if is_name(name):
        return name
    raise UsageError(
        f"{where}: an object cannot be called {name!r:.100}; expected segments of ASCII letters, "
        f"digits and '-_.=', none with '.' in front or of more than 255, {NAME_SIZE_MAX} in all"
    )


def check_prefix(prefix: str, where: object) -> str:
    """Return ``prefix``, whole segments or "", without its last slash. Raise ``UsageError``."""
    if not prefix:
        return ""
    if not prefix.endswith("/"):
        raise UsageError(f"{where}: a list of {prefix!r:.100}; expected whole segments, as 'a/b/'")
    return check_name(prefix[:-1], where)


def short(what: str, start: int, expected: int, found: int) -> CorruptionError:
    """Return the error of an object that ends before the requested range does."""
    return CorruptionError(f"{what}: expected {expected} bytes from byte {start} on, found {found}")
