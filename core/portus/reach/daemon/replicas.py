"""The other host of a storage host: ``portus serve POOL --replica portus://other``.

The first host copies each model to the pool of the same tenant at the other host, and leads it
while its clients save it (``leader``). The other host knows who leads (``leads``): itself, once a
client claims a model there that a first host has led. While a client has that claim, no other host
may lead the model, or copy to it. Any host is the second one of who asks it to lead.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Set
from typing import Final

from portus.engine.copying.segments import Stop
from portus.errors import (
    BusyError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
    printable,
)
from portus.reach.daemon.copies import Copies
from portus.reach.daemon.events import tell
from portus.reach.daemon.leader import NOBODY, Leader, OtherHost, TenantThere
from portus.reach.daemon.leads import Leads
from portus.reach.index.pool import PoolWriter
from portus.reach.mirror.background_copier import who
from portus.reach.protocol import messages as said


class Replica(Copies[Leader]):
    """The models of one tenant that this host leads at the other host, and those that other hosts
    lead here. Thread-safe."""

    def __init__(
        self, tenant: str, writer: PoolWriter, leads: Leads, other: OtherHost | None
    ) -> None:
        """leads: of the models that are copied here. other: the host to which saves here are
        copied, the versions that the pool already has included; None: none.

        Fetches the models that the pool lacks, and that the other host has from a host before this
        one. Raises what fetching raises, but ``TransportError``."""
        super().__init__(tenant, writer)
        self._leads: Final = leads
        self._other: Final = other
        self._locks: Final = weakref.WeakValueDictionary[str, threading.Lock]()
        """The lock of each model while a thread uses it: clients choose the names."""
        self._claims: Final[Counter[str]] = Counter()
        if other is not None:
            own = set(writer.catalogue().models)
            self._fetch(other, own)
            for model in own:
                if not leads.of(model).term:
                    self._follow(Leader(other, tenant, model, writer), model)

    def claim(self, model: str) -> None:
        """Count one more connection that is about to save a model. For the first one, take the lead
        of the model, if two hosts keep it. Blocks while versions are fetched. Raises as
        ``Leader.lead``."""
        with self._lock_of(model):
            if not self._claims[model]:
                # Once for all connections of the client that has the claim.
                self._lead(model)
            self._claims[model] += 1

    def release(self, model: str) -> None:
        """Count one connection less."""
        with self._lock_of(model):
            self._claims[model] -= 1
            if not self._claims[model]:
                del self._claims[model]

    def answer(self, message: said.Lead) -> said.Led:
        """Return who leads a model; the pool of another host from now on, if it may. Raise
        ``BusyError`` while a client of this host saves the model, ``UsageError`` for a copy of the
        pool of this host: nothing would tell the two apart."""
        model = message.model
        if message.pool == self._writer.uuid:
            raise UsageError(
                "the pool of the first host is a copy of the second one's pool, or the other way "
                "round: start one of the two with an empty pool, and all is copied to it"
            )
        if message.who:  # a client, which asks each of its two hosts, has no name
            self._leads.check()
        with self._lock_of(model):
            lead, listed = self._leads.of(model), self._writer.catalogue().models.get(model)
            newest = listed[-1].info.token if listed else NOBODY
            granted = False
            if message.pool != NOBODY:
                if self._claims[model]:
                    raise BusyError(errno.EBUSY, f"a client saves model {model!r} here")
                granted = (lead.term, newest) == (message.term, message.newest)
            if granted:
                who_asks = printable(message.who)
                lead = self._leads.take(model, message.pool, message.commit, who_asks)
        return said.Led(granted, lead.pool, lead.commit, lead.who, lead.term, newest)

    def require_led(self, model: str) -> None:
        """Raise ``TransportError`` if no first host has led a model here: then only that one knows
        the version to continue from."""
        if not self._leads.of(model).term:
            raise TransportError(
                f"this host keeps no replica of model {model!r}: is the first host served with "
                "--replica?"
            )

    def require(self, model: str, term: int = 0) -> None:
        """Raise ``StaleError`` if what a client commits here does not count any more; or what
        another host copies here, which leads in ``term``."""
        if term:
            lead = self._leads.of(model)
            if lead.term != term or self._claims[model]:
                raise StaleError(f"model {model!r} is led by {lead.who}, in term {lead.term}")
        elif (leader := self._copiers.get(model)) is not None:
            leader.require()

    @contextlib.contextmanager
    def committing(self, model: str, term: int, commit: int = 0) -> Iterator[None]:
        """Require as ``require`` does, and let nobody else take the lead within a copy of another
        host. commit: that of the copied version in its pool."""
        # A client that claims the model here finds the copy, or has it refused (decision 0156).
        with self._lock_of(model) if term else contextlib.nullcontext():
            self.require(model, term)
            yield
            if term:
                # Not before: a version of that commit that is not here would look like one of
                # another history.
                self._leads.reach(model, commit)

    def settle(self, model: str, token: bytes, stop: Stop) -> None:
        """Return once both hosts have a version, as far as two can have it: see
        ``Leader.wait_until_copied``. Raise ``UsageError`` if this host alone has the model."""
        leader = self._copiers.get(model)
        if leader is not None:
            leader.wait_until_copied(token, stop)
        elif not self._leads.of(model).term:
            raise UsageError(
                f"model {model!r} is on this host alone: durable=2 takes one that is served with "
                "--replica"
            )

    @property
    def name(self) -> str:
        """The address to which saves are copied; empty if there is none."""
        return "" if self._other is None else self._other.name(self._tenant)

    def close(self, wait_s: float = 0.0) -> None:
        """Copy what is missing after the last commit, ``wait_s`` seconds at most, and end."""
        for leader in self._finish(wait_s):
            leader.close()
        self._writer.yields.remove(self._yield_space)

    def _lead(self, model: str) -> None:
        before = self._copiers.pop(model, None)
        if before is not None:
            before.close()
        lead, own = self._leads.of(model), self._writer.uuid
        if lead.term:
            if lead.pool != own:
                self._leads.take(model, own, self._writer.catalogue().root.sequence, who())
            if self._other is not None:
                self._tell_away(
                    f"model {model!r} is saved here alone, WITHOUT {self.name}: another host led "
                    f"it, and this is its second one. Serve an empty pool with --replica and the "
                    "address of this host, and name that host first",
                    model=model,
                )
        elif self._other is not None:
            led = 0 if before is None else before.term
            leader = Leader(self._other, self._tenant, model, self._writer, led)
            why_not = leader.lead()
            self._follow(leader, model)
            if why_not:
                self._tell_away(
                    f"model {model!r} is saved here WITHOUT its replica, and what is committed may "
                    f"be superseded there: {why_not}",
                    model=model,
                )

    def _fetch(self, other: OtherHost, own: Set[str]) -> None:
        try:
            with contextlib.closing(TenantThere(other, self._tenant)) as there:
                lacking = there.pool.catalogue().models.keys() - own
            for model in lacking:
                Leader(other, self._tenant, model, self._writer).fetch()
        except PortusError as error:
            self._tell_away(f"nothing is fetched from {self.name} before a claim: {error}")

    def _tell_away(self, text: str, **fields: str) -> None:
        tenant = self._tenant
        tell(logging.ERROR, "replica_away", f"{tenant}: {text}", tenant=tenant, **fields)

    def _follow(self, leader: Leader, model: str) -> None:
        """Copy the commits of a model from now on. Not while its leader takes the lead, nor if that
        failed."""
        with self._guard:
            self._copiers[model] = leader
        leader.wake()

    def _lock_of(self, model: str) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(model, threading.Lock())
