"""A real torch file of the newest checkpoint, renewed now and then, in a place that lasts."""

from __future__ import annotations

import concurrent.futures
import logging
import time
from typing import Final

import portus

_log: Final = logging.getLogger("portus_lightning")


class Copies:
    """Renews the file ``target`` at most every ``every_s`` seconds, on a thread of its own.

    What goes wrong is logged; the file that was there stays.
    """

    def __init__(self, target: str, every_s: float) -> None:
        self._target: Final = target
        self._every_s: Final = every_s
        self._next_s = time.monotonic() + every_s
        self._under_way: concurrent.futures.Future[None] | None = None

    def offer(self, path: str) -> None:
        """Copy the checkpoint at ``path``, which may still be on its way, if it is time."""
        if time.monotonic() < self._next_s or (self._under_way and not self._under_way.done()):
            return
        self._next_s = time.monotonic() + self._every_s
        executor = concurrent.futures.ThreadPoolExecutor(1, "portus-copy")
        self._under_way = executor.submit(self._copy, path)
        executor.shutdown(wait=False)  # its thread ends with that; the exit of the process waits

    def finish(self, path: str | None) -> None:
        """Wait for what is under way, and copy the newest checkpoint, if there is one, now."""
        if self._under_way is not None:
            concurrent.futures.wait([self._under_way])
            self._under_way = None
        if path is not None:
            self._copy(path)

    def _copy(self, path: str) -> None:
        try:
            portus.materialize(path, to=self._target)
        except portus.PortusError as error:
            _log.warning("Portus: %s was not copied to %s: %s", path, self._target, error)
