"""Memory that the clients of a host make it hold. One budget has a limit for each connection, for
the connections of each tenant together, and for all.

Memory is *passing* (the body of a message while it arrives, and the work on it) or *staying* (pins,
a save under way). A client waits for passing memory piece by piece, so it never has more than it
sent bytes for. It gets staying memory at once, or is refused. The connection that has had passing
memory for longest always gets more, up to the limit of a connection, which is kept free for it: so
at least one always finishes. While others wait, a connection has to make good use of its memory
(``ConnectionBudget.is_wanted``).
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

from portus.errors import TransportError, UsageError

UNLIMITED: Final = 1 << 62
"""Bytes of the budget for a side without a limit: a client trusts its host."""

FREE: Final = 64 << 10
"""Bytes of each connection that are not counted: of a body, of the work on it, and of staying
memory."""


class Budget:
    """``size`` bytes, of which a connection may have ``connection_max`` and a tenant
    ``tenant_max``. Thread-safe."""

    def __init__(self, size: int) -> None:
        self.size: Final = size
        self.connection_max: Final = size // 2
        self.tenant_max: Final = size - size // 4
        self._changed: Final = threading.Condition()
        self._passing: Final[dict[ConnectionBudget, None]] = {}
        self._tenants: Final[Counter[str]] = Counter()
        self._waiting = 0

    @property
    def taken_bytes(self) -> int:
        """Bytes that connections have now."""
        with self._changed:
            return self._tenants.total()

    def account(self) -> ConnectionBudget:
        """Return the budget of one more connection."""
        return ConnectionBudget(self)

    def fits(self, account: ConnectionBudget, size: int, *, passes: bool) -> bool:
        """Return True if ``account`` may have ``size`` more bytes now. The caller holds the
        guard."""
        oldest = next(iter(self._passing), account)
        # The half that ``room`` leaves out is kept for the oldest, so one always finishes.
        if passes and account is oldest:
            return True
        beside = Counter({oldest.tenant: oldest.passing})
        room = self.size - self.connection_max - (self._tenants.total() - beside.total())
        tenant = account.tenant
        left = self.tenant_max - self.connection_max - (self._tenants[tenant] - beside[tenant])
        return size <= min(room, left)


class ConnectionBudget:
    """The memory of one connection: ``passing`` and ``staying`` bytes. ``tenant``: its tenant, set
    once it is known, and before any memory is taken."""

    def __init__(self, budget: Budget) -> None:
        self.tenant = ""
        self.passing = 0
        self.staying = 0
        self._budget: Final = budget

    @property
    def is_wanted(self) -> bool:
        """True if this connection has passing memory, and others wait for some."""
        return self.passing > 0 and self._budget._waiting > 0

    def excess(self, size: int) -> UsageError | None:
        """Return the error if ``size`` more passing bytes are more than a connection may have, else
        None."""
        budget, wanted = self._budget, self._charge(self.staying) + self.passing + size
        if wanted <= budget.connection_max:
            return None
        return UsageError(
            f"this needs {wanted} bytes of the host's memory, of which a connection may "
            f"have {budget.connection_max} at most: raise `portus serve --memory`"
        )

    def take(self, size: int, timeout_s: float) -> bool:
        """Take ``size`` more passing bytes; return False if they were not free within
        ``timeout_s``."""
        budget = self._budget
        with budget._changed:
            if not budget.fits(self, size, passes=True):
                budget._waiting += 1
                try:
                    if not budget._changed.wait_for(
                        lambda: budget.fits(self, size, passes=True), timeout_s
                    ):
                        return False
                finally:
                    budget._waiting -= 1
            self.passing += size
            # In the order in which they began to take: the first is the oldest.
            budget._passing[self] = None
            budget._tenants[self.tenant] += size
            return True

    def keep(self, size: int) -> None:
        """Take ``size`` more staying bytes, or give some back if it is negative. Raises
        ``TransportError``, and then nothing has changed."""
        budget = self._budget
        with budget._changed:
            more = self._charge(self.staying + size) - self._charge(self.staying)
            if more > 0 and not budget.fits(self, more, passes=False):
                raise self.busy(more)
            self.staying += size
            budget._tenants[self.tenant] += more
            if more < 0:
                budget._changed.notify_all()

    def give_back(self) -> None:
        """Give the passing memory back."""
        budget = self._budget
        with budget._changed:
            if budget._passing.pop(self, self) is None:
                budget._tenants[self.tenant] -= self.passing
                self.passing = 0
                budget._changed.notify_all()

    def close(self) -> None:
        """Give all memory back."""
        self.give_back()
        self.keep(-self.staying)

    def busy(self, size: int) -> TransportError:
        """Return the error for a request of ``size`` bytes that are not free."""
        budget = self._budget
        with budget._changed:
            return TransportError(
                f"{size} bytes are not free in the host's memory for clients: of {budget.size} "
                f"they have {budget._tenants.total()}, those of this tenant "
                f"{budget._tenants[self.tenant]} of {budget.tenant_max} at most. Try again, or "
                "raise `portus serve --memory`",
            )

    @staticmethod
    def _charge(staying: int) -> int:
        return max(0, staying - FREE)
