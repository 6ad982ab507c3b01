"""Detects calls within calls of one thread: a signal handler that interrupted a call of ours.

Python runs handlers in the main thread, between two steps of the code that runs there. So the
interrupted call may hold any lock of ours, and the worker may wait for that lock: a handler that
takes a lock, or waits for the worker, waits for ever. A function that may hold locks, or waits, is
marked. It calls no foreign code that calls us. So foreign code on the stack between us and a marked
function is a signal handler.

The stack itself is the mark. So nothing has to be undone, whatever a handler raises, and whenever.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Final, ParamSpec, TypeVar

from portus.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

_marked: Final[set[int]] = set()
"""The code of marked functions, by identity; functions of modules are never freed."""


_OURS: Final = ("portus.", "contextlib")
"""Prefixes of the modules whose frames are no handler's."""


def is_nested() -> bool:
    """Return True in a signal handler that interrupted a marked call, and in the functions it
    calls: they must not wait, or take a lock that is held for long."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    while frame is not None:
        if id(frame.f_code) in _marked:
            return True
        frame = frame.f_back
    return False


def mark(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that may hold locks, or wait, when a signal comes."""
    _marked.add(id(function.__code__))
    return function


def entry(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that users call; where ``is_nested()`` it raises ``UsageError``."""

    def refuse(*arguments: P.args, **named: P.kwargs) -> R:
        raise refusal(function.__qualname__)

    return entry_or(refuse)(function)


def entry_or(nested: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a function that users call; where ``is_nested()``, ``nested`` is called in its place."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def enter(*arguments: P.args, **named: P.kwargs) -> R:
            return (nested if is_nested() else function)(*arguments, **named)

        mark(function)
        return enter

    return decorate


def refusal(what: str) -> UsageError:
    """Return the error that says why ``what`` cannot be done here."""
    return UsageError(
        f"{what}: this signal handler interrupted a call of Portus in the same thread, which "
        "continues when the handler returns, so the handler cannot wait for that call. Do "
        "this after the handler has returned"
    )
