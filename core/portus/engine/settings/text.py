"""The test for text that can be stored."""

from __future__ import annotations


def is_text(value: str) -> bool:
    """Return True if ``value`` can be encoded as UTF-8, that is, has no lone surrogate."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
