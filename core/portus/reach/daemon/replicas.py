"""The other host of a storage host: ``portus serve POOL --replica portus://other``.

Each model has one log, among the objects that the other host, its home, keeps for the tenant
(``REPLICA``). The first host copies commits there. The host that grants a claim leads the model
(``reach.mirror.commit_numbers``): the first host by requests, like any mirror; the home directly,
when a client claims a model there that has a log. While a client has a claim at the home, the home
lets no other host append to the log of the model. Any host is the home of what is copied to it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Final

from portus.engine.spec import VersionInfo
from portus.errors import BusyError, PortusError, TransportError, UsageError
from portus.reach.daemon.copies import Copies
from portus.reach.daemon.events import tell
from portus.reach.daemon.objects import Objects
from portus.reach.daemon.secrets import Secrets
from portus.reach.index.pool import PoolWriter
from portus.reach.mirror.commit_numbers import REPLICA, Leader
from portus.reach.mirror.host_store import HostStore
from portus.reach.mirror.objects import LOG, entry_number, prefix_of
from portus.reach.mirror.store import MissingError, Store
from portus.reach.protocol.address import TENANT, Address
from portus.reach.transport.dial import AUTHORITY_VARIABLE, Credentials

_ANSWER_S: Final = 10.0
"""Seconds that the other host may stay silent: a client waits for its claim meanwhile."""

_ABREAST: Final = 4
"""Models that are copied at the same time."""


class OtherHost:
    """The host to which a first host copies all its tenants, by the secrets that they have here."""

    def __init__(self, address: Address, secrets: Secrets) -> None:
        """Keep the address. Raise ``UsageError`` if it has a tenant, or two hosts."""
        if address.tenant != TENANT or address.second is not None:
            raise UsageError(
                f"--replica {address}: expected one host, portus://host:7117, without a tenant: "
                "each tenant is copied to the tenant of its name there"
            )
        self.address: Final = address
        self._secrets: Final = secrets
        self.turns: Final = threading.BoundedSemaphore(_ABREAST)
        """One is taken while a model is copied."""

    def name(self, tenant: str) -> str:
        """Return the address of ``tenant`` at the other host, as text."""
        return str(replace(self.address, tenant=tenant))

    def store(self, tenant: str) -> Store:
        """Return the store of a tenant's logs there, which the caller closes. Asks no host yet."""
        credentials = Credentials(
            self._secrets.first_of(tenant), os.environ.get(AUTHORITY_VARIABLE) or None
        )
        return HostStore(self.name(tenant), REPLICA, credentials, _ANSWER_S)

    def check(self, tenant: str) -> None:
        """Raise ``UsageError`` if the other host cannot keep the logs of a tenant: it refuses the
        secret, is too old, or has no place for objects. Log it if the host does not answer."""
        with contextlib.closing(self.store(tenant)) as store:
            try:
                next(iter(store.list("")), None)
            except TransportError as error:
                text = f"{tenant}: --replica {self.address} does not answer, and is tried again: "
                tell(logging.ERROR, "replica_away", f"{text}{error}", tenant=tenant)
            except PortusError as error:
                raise UsageError(f"--replica {self.address}, tenant {tenant!r}: {error}") from error


class Replica(Copies[Leader]):
    """The logs of one tenant's models: those that this host leads, and those that it keeps.
    Thread-safe."""

    def __init__(
        self, tenant: str, writer: PoolWriter, objects: Objects, other: OtherHost | None
    ) -> None:
        """objects: what others mirror here. other: the host to which saves here are copied, the
        versions that the pool already has included; None: none, except for models whose logs are
        here."""
        super().__init__(tenant, writer)
        self._objects: Final = objects
        self._other: Final = other
        self._locks: Final[dict[str, threading.Lock]] = {}
        self._claims: Final[Counter[str]] = Counter()
        # So that no entry of another host is placed once this host leads the model.
        self._placing: Final = threading.Lock()
        self._led: Final[set[str]] = set()
        """Prefixes of the models to whose logs, kept here, only this host appends."""
        if other is not None:
            for model in writer.catalogue().models:
                if not self._has_log(model):
                    self._follow(self._make_leader(model), model)

    def claim(self, model: str) -> None:
        """Count one more connection that is about to save a model. For the first one, bring the
        pool up to the log of the model, if it has or is to have one, and take the term. Blocks
        while versions are fetched. Raises as ``Leader.lead``."""
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
                self._let_append(model)

    def require(self, model: str) -> None:
        """Raise ``StaleError`` if what this host commits of a model does not count any more."""
        leader = self._copiers.get(model)
        if leader is not None:
            leader.require()

    def note_commit(self, model: str, token: bytes) -> None:
        """Report a committed version. Where the log is here, return once the log has it: a version
        outside of the log does not count if another host leads later. Raises as
        ``wait_until_logged``."""
        leader = self._copiers.get(model)
        if leader is not None and leader.is_home:
            leader.wait_until_logged(token)

    def wait_until_logged(self, model: str, token: bytes) -> None:
        """Wait as ``Leader.wait_until_logged``. Raise ``UsageError`` if the model has no log."""
        leader = self._copiers.get(model)
        if leader is None:
            raise UsageError(
                f"model {model!r} is on this host alone: durable=2 takes one that is served with "
                "--replica"
            )
        leader.wait_until_logged(token)

    def put(self, name: str, data: bytes, *, fresh: bool) -> bool:
        """Write an object from another host, see ``Objects.put``. Raise ``BusyError`` for the next
        entry of a log while a client of this host saves the model."""
        objects, prefix = self._objects, _prefix_of_entry(name)
        if prefix is None:
            return objects.put(name, data, fresh=fresh)
        with self._placing:
            # While a client saves here, no other host appends to the log of the model
            # (decision 0156).
            if prefix not in self._led:
                return objects.put(name, data, fresh=fresh)
            with contextlib.suppress(MissingError):
                objects.store.get(name)
                return False
        raise BusyError(errno.EBUSY, "a client saves this model at the replica: it continues there")

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
        if self._has_log(model):
            with self._placing:
                self._led.add(prefix_of(model))
        elif self._other is None:
            return
        leader = self._make_leader(model)
        try:
            why_not = leader.lead()
        except BaseException:
            # The lead was not taken, so the other host may append again.
            self._let_append(model)
            raise
        self._follow(leader, model)
        if why_not:
            text = (
                f"{self._tenant}: model {model!r} is saved here WITHOUT its replica, and "
                f"what is committed may be superseded there: {why_not}"
            )
            tell(logging.ERROR, "replica_away", text, tenant=self._tenant, model=model)

    def _make_leader(self, model: str) -> Leader:
        make = partial(Leader, shed=partial(self._shed, model))
        if self._other is None or self._has_log(model):
            store, name = self._objects.below(REPLICA), "the log on this host"
            return make(store, name, model, self._writer, contextlib.nullcontext(), is_home=True)
        store, turns = self._other.store(self._tenant), self._other.turns
        return make(store, self.name, model, self._writer, turns, is_home=False)

    def _shed(self, model: str, versions: Collection[VersionInfo]) -> None:
        """Remove versions that do not count any more."""
        steps = ", ".join(str(info.step) for info in versions)
        text = f"{self._tenant}: model {model!r}: steps {steps} do not count any more"
        tell(logging.WARNING, "retired", f"{text}: it continued elsewhere meanwhile")
        self._writer.retire({info.id for info in versions})

    def _follow(self, leader: Leader, model: str) -> None:
        """Copy the commits of a model from now on. Not while its leader takes the lead, nor if that
        failed."""
        with self._guard:
            self._copiers[model] = leader
        leader.wake()

    def _has_log(self, model: str) -> bool:
        try:
            store = self._objects.store
        except UsageError:
            return False  # a device: nothing is kept here
        below = f"{REPLICA}/{prefix_of(model)}{LOG}"
        return next(iter(store.list(below)), None) is not None

    def _let_append(self, model: str) -> None:
        with self._placing:
            self._led.discard(prefix_of(model))

    def _lock_of(self, model: str) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(model, threading.Lock())


def _prefix_of_entry(name: str) -> str | None:
    """Return the prefix of the model whose log the object is an entry of, or None if it is none."""
    first, _, rest = name.partition("/")
    prefix, slash, entry = rest.partition("/")
    is_entry = first == REPLICA and entry_number(entry) is not None
    return prefix + slash if is_entry else None
