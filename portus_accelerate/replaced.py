"""Functions of a framework, replaced by ones that call them; and which versions of it are known."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Change = tuple[Any, str, Any]
"""An owner, a name in it, and the value to set."""


def around(owner: Any, name: str, function: Callable[..., Any]) -> Change:
    """Return the change that replaces ``name`` by ``function``, which is called with the stock
    function before the arguments."""
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def replacement(*given: Any, **named: Any) -> Any:
        return function(stock, *given, **named)

    return owner, name, replacement


def is_known(version: str, oldest: tuple[int, ...], newest: tuple[int, ...]) -> bool:
    """Return whether ``version`` is between the two, both included, by their first numbers."""
    parts = version.split("+")[0].split(".")
    numbers = tuple(int(part) for part in parts if part.isdigit())
    return oldest <= numbers[: len(oldest)] <= newest


def spelled(oldest: tuple[int, ...], newest: tuple[int, ...]) -> str:
    """Return a range of versions as users write it."""
    return " to ".join(".".join(map(str, each)) for each in (oldest, newest))
