"""The values that a setting may have: declared by its type, once, and checked from there."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from portus.errors import UsageError


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
