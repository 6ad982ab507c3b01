"""Scrubs of all pools of a host in the background: ``portus serve --scrub``."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from portus.engine.media.read_file import Pace
from portus.errors import CorruptionError, PortusError
from portus.reach.daemon.counters import Counters
from portus.reach.daemon.events import tell
from portus.reach.daemon.pools import Pools
from portus.reach.index.check import CheckOptions, Finding, Severity, check_pool
from portus.reach.index.place import Place
from portus.reach.index.reader import PoolReader

PAUSE_S: Final = 3600.0
"""Seconds between two passes over all pools."""

NAMED_MAX: Final = 100
"""Damaged places of a pool that one pass logs by name."""

_LEAVE_S: Final = 10.0


class _EndedError(Exception):
    """Raised in the scrub when the host ends."""


class Scrubber:
    """Reads every pool of a host, at a bounded pace, from ``start`` to ``stop``."""

    def __init__(self, pools: Pools, counters: Counters, bytes_per_s: int) -> None:
        self._pools: Final = pools
        self._counters: Final = counters
        self._bytes_per_s: Final = bytes_per_s
        self._ended: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, name="portus-scrub", daemon=True)

    def start(self) -> None:
        """Start scrubbing, on a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, before the pools are closed. Blocks until the current read has ended, ``_LEAVE_S``
        at most."""
        self._ended.set()
        self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        try:
            while True:
                self._pass()
                self._wait(PAUSE_S)
        except _EndedError:
            pass

    def _pass(self) -> None:
        try:
            found = self._pools.everywhere()
        except PortusError as error:
            self._not_scrubbed(None, error)
            return
        for tenant, pool in found:
            try:
                self._scrub(tenant, pool)
            except PortusError as error:
                self._not_scrubbed(tenant, error)

    def _scrub(self, tenant: str, pool: Place | PoolReader) -> None:
        start_s, size, damaged = time.monotonic(), 0, 0

        def advance(done: int, total: int) -> None:
            nonlocal size
            size = done

        def note(finding: Finding) -> None:
            nonlocal damaged
            if finding.severity is not Severity.ERROR:
                return
            damaged += 1
            # At once, and never lower within a pass: an alarm must not flicker.
            self._counters.rotten(tenant, max(damaged, self._counters.rot.get(tenant, 0)))
            if damaged <= NAMED_MAX:
                text, why = f"{tenant}: {finding}", str(finding)
                tell(logging.ERROR, "rot", text, tenant=tenant, place=finding.where, why=why)

        pace = Pace(self._bytes_per_s, self._wait)
        look = CheckOptions(progress=advance, tell=note, pace=pace)
        check_pool(pool.path if isinstance(pool, Place) else pool, look)
        self._counters.rotten(tenant, damaged)
        self._counters.add("scrubbed_bytes", size)
        tell(
            logging.INFO,
            "scrubbed",
            f"{tenant}: read again: {damaged} damaged places",
            tenant=tenant,
            bytes=size,
            damaged=damaged,
            seconds=time.monotonic() - start_s,
        )

    def _not_scrubbed(self, tenant: str | None, error: PortusError) -> None:
        level = logging.ERROR if isinstance(error, CorruptionError) else logging.WARNING
        text = f"{tenant or 'pools'}: cannot be scrubbed: {error}"
        tell(level, "not_scrubbed", text, tenant=tenant, why=str(error))

    def _wait(self, seconds: float) -> None:
        if self._ended.wait(seconds):
            raise _EndedError
