"""Calls within calls of one thread: what a signal handler finds that interrupted one of ours.

Python runs handlers in the main thread, between two steps of whatever is being done there. So the
call below may hold any lock of ours, and the worker may be waiting for that: who takes a lock then,
or waits for the worker, waits for ever. A function that may hold locks, or waits, is marked. It
calls nothing of others that calls us: so if code of others stands on the stack between us and a
marked function, that is a signal handler.

The stack itself is the mark. So there is nothing to put back, whatever a handler raises, and
whenever.
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
"""The code of marked functions, by identity; functions of modules are never let go of."""


_OURS: Final = ("portus.", "contextlib")
"""How the names of modules begin whose frames are no handler's."""


def is_nested() -> bool:
    """True in a signal handler that interrupted a marked call, and in what it calls: nothing may
    be waited for, and no lock taken that is held for long."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    while frame is not None:
        if id(frame.f_code) in _marked:
            return True
        frame = frame.f_back
    return False


def mark(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that may hold locks, or waits, when a signal comes."""
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
    """Why ``what`` cannot be done here."""
    return UsageError(
        f"{what}: this signal handler interrupted a call of Portus in the same thread, which "
        "continues when the handler returns, so the handler cannot wait for that call. Do "
        "this after the handler has returned"
    )
