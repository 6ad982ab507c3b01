"""Waits of a thread that may be interrupted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from portus.engine.copying.thread import DEAF_S_MAX

Result = TypeVar("Result")


class InterruptibleCondition(threading.Condition):
    """A condition for which the main thread may wait: Ctrl-C always ends that wait."""

    def wait_for(self, predicate: Callable[[], Result], timeout: float | None = None) -> Result:
        """See ``threading.Condition``."""
        if threading.current_thread() is not threading.main_thread():
            # Python runs signal handlers in the main thread only.
            return super().wait_for(predicate, timeout)
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = DEAF_S_MAX if until is None else until - time.monotonic()
            result = super().wait_for(predicate, min(left, DEAF_S_MAX))
            if result or left < DEAF_S_MAX:
                return result
