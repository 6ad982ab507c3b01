"""The framework's own saves: when to leave saves to it, and the messages about that; and its
functions, replaced by functions that call the stock ones."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from portus.errors import UsageError

_VARIABLE: Final = "PORTUS_DISABLE"

_said: Final[set[tuple[str, str]]] = set()


def say_once(log: logging.Logger, message: str) -> None:
    """Log a warning that this process has not logged yet."""
    if (log.name, message) not in _said:
        _said.add((log.name, message))
        log.warning("%s", message)


def is_disabled() -> bool:
    """Return True if the environment turns adapters off: ``$PORTUS_DISABLE``."""
    return os.environ.get(_VARIABLE, "") not in ("", "0")


class Framework:
    """A framework, as its adapter sees it: it can save itself, too.

    name: its name for users. log: the adapter's log.
    """

    def __init__(self, name: str, log: logging.Logger) -> None:
        self._name: Final = name
        self._log: Final = log

    def say_once(self, message: str) -> None:
        """Log a warning that this process has not logged yet."""
        say_once(self._log, message)

    def saves_itself(self) -> bool:
        """Return True if all saves are left to the framework: ``$PORTUS_DISABLE``, not on Linux."""
        if is_disabled():
            return True
        if sys.platform != "linux":
            self.say_once(
                f"Portus saves on Linux only; on {sys.platform} {self._name} itself saves, and "
                "loading works"
            )
            return True
        return False

    def say_it_saves(self, error: UsageError) -> None:
        """Warn that the framework saves a state that no pool can store, and why."""
        self.say_once(
            f"Portus cannot store this checkpoint, {self._name} saves it instead: {error}"
        )

    @staticmethod
    def require_format(what: str, found: object, known: int) -> None:
        """Raise ``UsageError`` if ``what`` of a checkpoint has another format than ``known``: a
        newer Portus saved it."""
        if found != known:
            raise UsageError(
                f"the {what} of this checkpoint have format {found!r}, and this Portus knows "
                f"{known}: a newer one saved it. Upgrade Portus here, or set PORTUS_DISABLE=1, and "
                f"the run continues with other {what}"
            )


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
