"""The test for text that can be stored."""

from __future__ import annotations


def is_text(value: str) -> bool:
    """True if ``value`` can be UTF-8, that is, holds no lone surrogate."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
