"""The caller's handle on one save, and its cost."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, Protocol

from portus.engine.media import calls
from portus.engine.spec import VersionInfo
from portus.errors import PortusError, UsageError


@dataclass(slots=True)
class SaveStats:
    """The cost of one save. Times are in seconds, sizes in bytes.

    ``call_s``: the duration of the call of save, including the wait for a place in the queue
    (``queue_s``). ``fence_s``: how long optimizers and other writers waited for the copy; threads
    that wait at the same time each count. ``copy_s``: hashing and copying, in whichever thread.
    ``commit_s``: persists and index. ``total_s``: from the start of the call to the commit; 0 until
    then. ``state_bytes``: all storages; of these, ``copied_bytes`` were written and
    ``shared_bytes`` found in an older version, or in the removed file whose space is used again.
    ``hashed_bytes``: hashed before the copy, to find unchanged storages. ``bounced_bytes``: of the
    bytes copied to a storage host, those that went through a buffer or a socket, not straight from
    memory to pool. ``guard``: what verified that late copies are the state at the call: the
    "kernel" or a "hash", which are exact, or a "probe"; "" if nothing was copied late.
    ``inexact_bytes``: storages that another process wrote during the copy; the version has the
    copied bytes. ``mirror_lag_s``: at the commit, the age of the newest mirrored version; None
    without a mirror, and before it has any version.
    """

    call_s: float = 0.0
    queue_s: float = 0.0
    fence_s: float = 0.0
    copy_s: float = 0.0
    commit_s: float = 0.0
    total_s: float = 0.0
    state_bytes: int = 0
    copied_bytes: int = 0
    shared_bytes: int = 0
    hashed_bytes: int = 0
    bounced_bytes: int = 0
    inexact_bytes: int = 0
    guard: str = ""
    mirror_lag_s: float | None = None

    @property
    def blocked_s(self) -> float:
        """The time that training waited: ``call_s`` plus ``fence_s``.

        This is less than ``total_s``, unless several threads wait at the fence, or a synchronous
        call also makes room for the next save after its commit. It does not include the processor
        time of copying in the background.
        """
        return self.call_s + self.fence_s

    def metrics(self) -> dict[str, float]:
        """Return the numbers that loggers and trackers receive for one save, by name;
        ``docs/statistics.md`` explains each."""
        lag = {} if self.mirror_lag_s is None else {"portus/mirror_lag_s": self.mirror_lag_s}
        return {
            **lag,
            "portus/blocked_ms": self.blocked_s * 1e3,
            "portus/fence_ms": self.fence_s * 1e3,
            "portus/total_ms": self.total_s * 1e3,
            "portus/save_gb_per_s": self.state_bytes / 1e9 / self.total_s if self.total_s else 0.0,
            "portus/copied_gb": self.copied_bytes / 1e9,
            "portus/shared_gb": self.shared_bytes / 1e9,
        }


class SavePending(Protocol):
    """The part of a save that a handle uses."""

    @property
    def stats(self) -> SaveStats: ...

    @property
    def over(self) -> bool: ...

    @property
    def error(self) -> PortusError | None: ...

    def result(self, timeout_s: float | None) -> VersionInfo: ...

    def join(self) -> None: ...


class EndedSave:
    """A save that no thread works on: one that never began, with the error, or one that was written
    within its call."""

    over: Final = True

    def __init__(self, outcome: VersionInfo | PortusError, stats: SaveStats) -> None:
        self.error: Final = outcome if isinstance(outcome, PortusError) else None
        self.stats: Final = stats
        self.reported = False
        self._outcome: Final = outcome

    def join(self) -> None:
        """Return at once: it has ended."""

    def result(self, timeout_s: float | None) -> VersionInfo:
        """Return the version, or raise the error, at once."""
        if isinstance(self._outcome, PortusError):
            self.reported = True
            raise self._outcome
        return self._outcome


_newest: VersionInfo | None = None


def note_newest(version: VersionInfo) -> None:
    """Note that a save of this process was committed, at any place."""
    global _newest
    _newest = version


def newest() -> VersionInfo | None:
    """Return the newest commit of this process; None if there is none."""
    return _newest


class SaveHandle:
    """One save, from its call on."""

    def __init__(self, save: SavePending) -> None:
        self.of: Final = save
        """The save. For Portus itself."""
        self._process: Final = os.getpid()

    def _wait_nested(self, timeout: float | None = None) -> VersionInfo:
        if not self.of.over:
            raise calls.refusal("wait for a save")
        return self.of.result(0)

    @calls.entry_or(_wait_nested)
    def wait(self, timeout: float | None = None) -> VersionInfo:
        """Block until the version is durable, and return it.

        timeout: seconds; None waits for ever. Raises ``TimeoutError`` when it runs out, and the
        error of a failed save: ``MediumError``, ``AbandonedError`` and others; older versions stay
        loadable. In a signal handler that interrupted Portus, raises ``UsageError`` if the save
        has not ended; so does every such call in a child that was forked before the end.
        """
        self._refuse_in_child()
        return self.of.result(timeout)

    def _join_nested(self) -> None:
        """Return at once: within a signal handler nothing can be waited for."""

    @calls.entry_or(_join_nested)
    def join(self) -> None:
        """Block until the save has ended. Raises nothing; ``committed`` tells its result, and a
        failure will still be reported. In a signal handler that interrupted Portus, returns at
        once."""
        self._refuse_in_child()
        self.of.join()

    @property
    def done(self) -> bool:
        """True when the save has ended: committed, failed or given up."""
        self._refuse_in_child()
        return self.of.over

    @property
    def committed(self) -> bool:
        """True when the version is durable."""
        self._refuse_in_child()
        return self.of.over and self.of.error is None

    @property
    def stats(self) -> SaveStats:
        """The cost of the save so far."""
        return self.of.stats

    def _refuse_in_child(self) -> None:
        # A thread of the parent ends it, so a caller here would poll for ever.
        if not self.of.over and self._process != os.getpid():
            raise UsageError(
                f"a save of process {self._process}, asked for in process {os.getpid()}: the "
                "parent's process saves it; wait for it there"
            )
