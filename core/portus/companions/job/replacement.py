"""Functions of a framework, replaced by functions that call the stock ones."""

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
