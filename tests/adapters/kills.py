"""A process that kills itself at a change of a name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any


class Kills:
    """At the call of this number that changes a name: before it, or after it."""

    def __init__(self, number: int) -> None:
        self.left = number
        if number:
            for name in ("rename", "replace", "unlink", "remove", "symlink", "link"):
                setattr(os, name, self._around(getattr(os, name)))

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            self._count()
            try:
                return call(*arguments, **named)
            finally:
                self._count()

        return called

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
