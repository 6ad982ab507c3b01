"""Whole steps, and what may be asked for."""

from __future__ import annotations

import math
from typing import Final, Literal

from portus.engine.settings.numbers import is_number, parse_seconds
from portus.errors import UsageError

_EPSILON: Final = 1e-12
"""A quotient this little above a whole number is that number: 0.14 / (0.05 * 0.2) is 14."""


def round_up(steps: float) -> int:
    """The least number of whole steps that is not under ``steps``; at least 1."""
    return max(1, math.ceil(steps * (1 - _EPSILON)))


def share(name: str, value: object) -> float:
    """``value`` as a float. Raises ``UsageError`` unless it is over 0 and under 1."""
    if not is_number(value) or not 0 < value < 1:  # type: ignore[operator]
        raise UsageError(
            f"{name}: expected a share of the time without saves, over 0 and under 1, such as "
            f"0.035 for 3.5 %; found {value!r}"
        )
    return float(value)  # type: ignore[arg-type]


def parse_every(value: object) -> Literal["auto"] | int | float:
    """An interval as a user says it: "auto", steps (an int), or a time (seconds, as a float).
    Raises ``UsageError`` for all else."""
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str):
        return parse_seconds("every", value)
    raise UsageError(
        f"every: expected 'auto', a time such as '30s', or steps over 0, found {value!r}"
    )
