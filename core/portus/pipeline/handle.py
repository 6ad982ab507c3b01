"""What the caller of save holds: a handle on one save, and what the save cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from portus.errors import PortusError
from portus.media import calls
from portus.spec import VersionInfo


@dataclass(slots=True)
class SaveStats:
    """What one save cost. Times in seconds, sizes in bytes.

    ``call_s``: inside the call of save, the wait for a free place in the queue (``queue_s``)
    included. ``fence_s``: what optimizers and other writers waited for it. ``copy_s``: hashing
    and copying, wherever it ran. ``commit_s``: persists and index. ``total_s``: from the call to
    the commit; 0 until then. ``state_bytes``: all storages; ``copied_bytes`` of them were
    written, ``shared_bytes`` were found in an older version. ``bounced_bytes``: of those copied to
    a storage host, what went through a buffer or a socket, not straight from memory to pool.
    ``guard``: how it was made sure that what was copied late is the state at the call: by the
    "kernel" or a "hash", which are exact, or by a "probe"; "" if nothing was. ``inexact_bytes``:
    of storages that another process wrote while they were copied; the version has what was copied.
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

    @property
    def blocked_s(self) -> float:
        """All that training felt."""
        return self.call_s + self.fence_s


class SavePending(Protocol):
    """What a handle needs of a save."""

    @property
    def stats(self) -> SaveStats: ...

    @property
    def over(self) -> bool: ...

    @property
    def error(self) -> PortusError | None: ...

    def result(self, timeout_s: float | None) -> VersionInfo: ...

    def join(self) -> None: ...


class RefusedSave:
    """A save that never began. ``error`` says why."""

    over: Final = True

    def __init__(self, error: PortusError, stats: SaveStats) -> None:
        self.error: Final = error
        self.stats: Final = stats
        self.reported = False

    def join(self) -> None:
        """It is over."""

    def result(self, timeout_s: float | None) -> VersionInfo:
        """Raises ``error``."""
        self.reported = True
        raise self.error


class SaveHandle:
    """One save, from the call on."""

    def __init__(self, save: SavePending) -> None:
        self._save = save

    @property
    def of(self) -> SavePending:
        """The save. For Portus itself."""
        return self._save

    def _wait_nested(self, timeout: float | None = None) -> VersionInfo:
        if not self._save.over:
            raise calls.refused("wait for a save")
        return self._save.result(0)

    @calls.entry_or(_wait_nested)
    def wait(self, timeout: float | None = None) -> VersionInfo:
        """Return when the version is durable; what it is.

        timeout: seconds; None waits for ever. Raises ``TimeoutError`` when it runs out, and what
        made the save fail: ``MediumError``, ``AbandonedError``...; older versions stay loadable.
        In a signal handler that interrupted Portus, ``UsageError`` if the save is not over.
        """
        return self._save.result(timeout)

    def join(self) -> None:
        """Return when the save is over. Raises nothing, and a failure is still to be reported:
        ``committed`` says how it ended."""
        self._save.join()

    @property
    def done(self) -> bool:
        """True when the save is over: committed, failed or given up."""
        return self._save.over

    @property
    def committed(self) -> bool:
        """True when the version is durable."""
        return self._save.over and self._save.error is None

    @property
    def stats(self) -> SaveStats:
        """What it cost so far."""
        return self._save.stats
