"""The values that a setting may have: declared by its type, once, and checked from there; and
checks of numbers and texts that a user gives."""

from __future__ import annotations

import functools
import math
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from portus.errors import UsageError

_UNITS: Final = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class Fits:
    """A further condition on the values of a type. ``expected``: the condition in words. ``check``:
    True for a value that meets it; it may raise ``UsageError`` itself."""

    expected: str
    check: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


Seconds = Annotated[float, Fits("seconds", lambda value: _is_number(value) and value >= 0)]
SomeSeconds = Annotated[
    float, Fits("seconds over 0", lambda value: _is_number(value) and value > 0)
]
SomeBytes = Annotated[int, Fits("bytes", lambda value: isinstance(value, int) and value > 0)]
Count = Annotated[int, Fits("a number, 0 or more", lambda value: type(value) is int and value >= 0)]


def refuse_misfits(declared: Any, values: Mapping[str, object]) -> None:
    """Raise ``UsageError`` for the first of ``values``, by name, that does not fit its type in
    ``declared``: a class with fields, or a function with arguments."""
    for name, fits in _limits(declared).items():
        if name in values and not fits.check(values[name]):
            raise UsageError(f"{name}: expected {fits.expected}, found {values[name]!r}")


@functools.cache
def _limits(declared: Any) -> Mapping[str, Fits]:
    """Return the conditions that the types in a declaration impose, by name."""
    hints = typing.get_type_hints(declared, include_extras=True)
    limits = {name: _limit(kind) for name, kind in hints.items()}
    return {name: limit for name, limit in limits.items() if limit is not None}


def _limit(kind: Any) -> Fits | None:
    choices = typing.get_args(kind)
    if kind is bool:
        return Fits("True or False", lambda value: isinstance(value, bool))
    if typing.get_origin(kind) is Literal:
        *first, last = map(repr, choices)
        return Fits(f"{', '.join(first)} or {last}", choices.__contains__)
    if len(choices) == 2 and choices[1] is type(None):
        limit = _limit(choices[0])
        return limit and Fits(
            f"{limit.expected}, or None", lambda value: value is None or limit.check(value)
        )
    return next((each for each in choices if isinstance(each, Fits)), None)


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


def is_text(value: str) -> bool:
    """Return True if ``value`` can be encoded as UTF-8, that is, has no lone surrogate."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
