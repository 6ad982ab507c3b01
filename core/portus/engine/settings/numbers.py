"""Checks of numbers that a user gives, and of texts that stand for them."""

from __future__ import annotations

import math
import re
from typing import Final

from portus.errors import UsageError

_UNITS: Final = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def over_zero(name: str, value: object, unit: str) -> float:
    """Return ``value`` as a float. Raise ``UsageError`` unless it is a finite number over 0."""
    if not is_number(value) or not value > 0:  # type: ignore[operator]
        raise UsageError(f"{name}: expected {unit} over 0, found {value!r}")
    return float(value)  # type: ignore[arg-type]


def is_number(value: object) -> bool:
    """Return True for an int or float that is finite, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def parse_seconds(name: str, value: object) -> float:
    """Return the seconds of a number, or of a text such as "30s", "5min", "1.5h" or "7d"; over 0.
    Raises ``UsageError`` for any other value."""
    if isinstance(value, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)", value.strip())
        if found is None:
            raise UsageError(
                f"{name}: expected a time such as '30s', '5min' or '1.5h', found {value!r}"
            )
        value = float(found[1]) * _UNITS[found[2]]
    return over_zero(name, value, "seconds")
