"""The lead of a model that two storage hosts keep, on the first of them.

The second host has all versions that count in its own pool, and knows who leads the model
(``leads``). Before the first host grants a claim, it brings its own pool up to what counts there,
and takes the lead, in a new term. Then it copies each commit there, as a client saves it. The
second host refuses copies of an earlier term.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from portus.engine.copying.segments import Stop
from portus.engine.pipeline.plan import Snapshot
from portus.engine.spec import VersionInfo
from portus.errors import (
    BusyError,
    CorruptionError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
)
from portus.reach.daemon.events import tell
from portus.reach.daemon.secrets import Secrets
from portus.reach.index.file_table import decode_table
from portus.reach.index.pool import PoolWriter
from portus.reach.index.records import VersionRecord
from portus.reach.mirror.background_copier import ElsewhereError, who
from portus.reach.mirror.copier import PoolCopier
from portus.reach.mirror.mirror import NotMirroredError
from portus.reach.protocol import messages as said
from portus.reach.protocol.address import TENANT, Address
from portus.reach.transport.dial import AUTHORITY_VARIABLE, Credentials
from portus.reach.transport.host import Links
from portus.reach.versions.copy_version import copy_version
from portus.reach.versions.host import HostDraft, HostPool
from portus.reach.versions.pool_draft import PoolDraft

_log: Final = logging.getLogger("portus")

PAUSE_MAX_S: Final = 2.0
"""Seconds between two tries, at most, if the other host does not answer."""

TOLD_S: Final = 300.0
"""The longest that a commit waits for its copy while no try fails."""

ANSWER_S: Final = 10.0
"""Seconds that the other host may stay silent: a client waits for its claim meanwhile."""

_POLL_S: Final = 0.2
"""Seconds between two looks whether the client that waits is still there."""

_ABREAST: Final = 4
"""Models that are copied at the same time."""

NOBODY: Final = bytes(16)
"""No pool, or no version."""


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

    def open(self, tenant: str) -> HostPool:
        """Return the pool of a tenant there. Raises as ``HostPool``."""
        authority = os.environ.get(AUTHORITY_VARIABLE) or None
        credentials = Credentials(self._secrets.first_of(tenant), authority)
        address = replace(self.address, tenant=tenant)
        links = Links(address, credentials, silence_s=ANSWER_S)
        return HostPool(str(address), links=links)

    def check(self, tenant: str) -> None:
        """Raise ``UsageError`` if the other host cannot keep the models of a tenant: it refuses the
        secret, is too old, or has no place for leads. Log it if the host does not answer."""
        try:
            with contextlib.closing(TenantThere(self, tenant)) as there:
                there.ask(tenant)
        except TransportError as error:
            text = f"{tenant}: --replica {self.address} does not answer, and is tried again: "
            tell(logging.ERROR, "replica_away", f"{text}{error}", tenant=tenant)
        except PortusError as error:
            raise UsageError(f"--replica {self.address}, tenant {tenant!r}: {error}") from error


class TenantThere:
    """The pool of a tenant at the other host. One thread at a time, but for ``close``."""

    def __init__(self, other: OtherHost, tenant: str) -> None:
        """Ask no host yet."""
        self._other: Final = other
        self._tenant: Final = tenant
        self._guard: Final = threading.Lock()
        self._pool: HostPool | None = None
        self._closed = False

    @property
    def pool(self) -> HostPool:
        """The pool, opened at the first use. Raises as ``HostPool``."""
        pool = self._pool or self._other.open(self._tenant)
        with self._guard:
            self._pool = pool
            if self._closed:
                pool.links.cut()
                raise TransportError(f"{pool.links.address}: closed")
        return pool

    def ask(self, model: str) -> said.Led:
        """Return who leads a model."""
        return self.pool.links.ask(said.Lead(model, NOBODY, 0, who(), 0, NOBODY), said.Led)

    def infos(self, model: str) -> list[VersionInfo]:
        """Return the versions of a model, oldest commit first."""
        return [each.info for each in self.pool.catalogue().models.get(model, ())]

    def close(self) -> None:
        """Close the connections, and end running requests."""
        with self._guard:
            self._closed = True
            if self._pool is not None:
                self._pool.links.cut()


class Leader(PoolCopier):
    """Copies one model to the other host, for as long as this host leads it. Thread-safe.

    Made for one claim, or, without ``lead``, to copy the rest of what this pool led before.
    """

    def __init__(
        self, other: OtherHost, tenant: str, model: str, writer: PoolWriter, led: int = 0
    ) -> None:
        """Ask no host yet. writer: of the pool to copy from. led: the last term in which this
        process led the model; 0: in none."""
        self._there: Final = TenantThere(other, tenant)
        address = other.name(tenant)
        super().__init__(self._there, address, model, writer, other.turns, PAUSE_MAX_S)
        self.why_over = ""
        """The reason why no commit here counts any more; empty while commits may count."""
        self._is_wanted = False
        self._led = led
        self.term = 0
        """The term in which this host leads; 0: it does not."""
        self._known: Collection[bytes] = ()
        """The tokens of the versions that the other host had when it was asked last."""
        self._last: VersionRecord | None = None
        """The record there of the version that was copied last."""
        self._tries = 0

    def lead(self) -> str:
        """Take the lead before the claim is granted. Return "" if it is taken; else why the other
        host cannot be asked: the pool has versions, and the lead is taken once it answers. Nothing
        is copied before ``wake``. If this raises, the leader is closed.

        Raises ``StaleError`` if the model continued elsewhere, and this pool has versions that do
        not count; ``TransportError`` if the other host cannot be asked and the pool is empty, or is
        known to be behind; ``BusyError`` if another client saves the model there.
        """
        self._is_wanted = True
        with contextlib.ExitStack() as undo:
            undo.callback(self._there.close)
            why_not = ""
            try:
                lead = self._there.ask(self._model)
            except TransportError as error:
                if not self._infos():
                    raise
                why_not = str(error)
            else:
                self._take(lead, may_fetch=True)
            undo.pop_all()
            return why_not

    def fetch(self) -> None:
        """Fetch all that a host before this one led into a pool that has nothing of the model, and
        close. What the other host leads waits for a claim: what that lets go of would not count
        here."""
        with contextlib.closing(self._there) as there:
            if there.ask(self._model).pool not in (NOBODY, there.pool.uuid):
                self._fetch(there.infos(self._model))

    def wait_until_copied(self, token: bytes, stop: Stop) -> None:
        """Return when the other host has the version of that token; for 16 zeros, when this host
        leads. Raises ``StaleError`` if it never will, ``TransportError`` after a failed try, or if
        it took too long, ``StoppedError``."""

        def is_told() -> bool:
            return bool(self.term) if token == NOBODY else token in self._known

        def is_over() -> bool:
            # One failed try after this began ends it.
            has_failed = self._tries != tries or bool(self.why_over)
            return is_told() or has_failed or self._ended or token in self._skipped

        tries, until_s = self._tries, time.monotonic() + TOLD_S
        with self._changed:
            while not self._changed.wait_for(is_over, _POLL_S) and time.monotonic() < until_s:
                stop.check()
        if not is_told():
            self.require()
            raise TransportError(f"it is not at {self.address} yet. {self.failure}")

    def require(self) -> None:
        """Raise ``StaleError`` if the model continued elsewhere."""
        if self.why_over:
            raise StaleError(self.why_over)

    def _take(self, lead: said.Led, *, may_fetch: bool) -> None:
        """Take the lead from ``lead``, or from who has it by then."""
        own = self._writer.uuid
        if lead.term and lead.pool != own and not self._is_wanted:
            raise ElsewhereError(
                f"model {self._model!r} was saved last by {lead.who}; it is copied from here once "
                "a client claims it here"
            )
        if not lead.term and not self._led:
            self._require_older(StaleError if may_fetch else ElsewhereError)
        if self._is_behind(lead):
            there = self._there.infos(self._model)
            tokens = {each.token for each in there}
            foreign = [info for info in self._infos() if info.token not in tokens]
            if foreign or not may_fetch:
                kind = StaleError if may_fetch else ElsewhereError
                raise kind(self._went_on(lead, there, foreign))
            self._fetch(there)
        commits = {info.token: info.commit for info in self._infos()}
        commit = commits.get(lead.newest, lead.commit if lead.pool == own else 0)
        message = said.Lead(self._model, own, commit, who(), lead.term, lead.newest)
        try:
            answer = self._there.pool.links.ask(message, said.Led)
        except BusyError as error:
            raise BusyError(
                errno.EBUSY,
                f"another client saves model {self._model!r} at {self.address}: it continues there",
            ) from error
        if not answer.granted:  # another host led, or committed, in between: look again
            self._take(answer, may_fetch=may_fetch)
            return
        with self._changed:
            self.term = answer.term
            self._changed.notify_all()

    def _require_older(self, kind: type[PortusError]) -> None:
        """Raise ``kind`` if the other host, where nobody led the model, has versions that this pool
        lacks, older than one of both: they would be removed there, as if they had been removed
        here."""
        there, own = self._there.infos(self._model), {info.token for info in self._infos()}
        older = there[: self._count_known(there)]
        if lacking := [str(info.step) for info in older if info.token not in own]:
            raise kind(
                f"model {self._model!r}: steps {', '.join(lacking)} at {self.address} are of no "
                "first host, and this one lacks them: start it with an empty pool, and it fetches "
                "all; or remove them there, once they are not needed"
            )

    def _count_known(self, there: Sequence[VersionInfo]) -> int:
        """Return how many versions of the other host are there up to the newest of both pools."""
        own = {info.token for info in self._infos()}
        return max((n for n, info in enumerate(there, 1) if info.token in own), default=0)

    def _is_behind(self, lead: said.Led) -> bool:
        """Return whether the other host has the newer history. What this pool had while it led, and
        lacks now, was removed here. Only if this process led, is that sure: an earlier one may have
        led with a newer copy of the pool. Then all that this pool alone has must be newer than what
        was copied from it."""
        own = self._infos()
        if lead.newest == NOBODY or any(info.token == lead.newest for info in own):
            return False
        if lead.pool != self._writer.uuid:
            return True
        if lead.term == self._led:
            return False
        there = {info.token for info in self._there.infos(self._model)}
        alone = [info.commit for info in own if info.token not in there]
        return not alone or min(alone) <= lead.commit

    def _went_on(
        self, lead: said.Led, there: Sequence[VersionInfo], foreign: Collection[VersionInfo]
    ) -> str:
        newest = f"step {there[-1].step}" if there else "none"
        text = (
            f"model {self._model!r} continued elsewhere: the newest that counts is {newest}, in "
            f"term {lead.term}, at {self.address}, by {lead.who}."
        )
        if not foreign:
            return f"{text} What is committed here does not count any more"
        steps = ", ".join(str(info.step) for info in foreign)
        return (
            f"{text} Steps {steps} here do not count, and keep it from continuing here: once they "
            f"are not needed, `portus rm {self._model}@STEP --force` each"
        )

    def _fetch(self, there: Sequence[VersionInfo]) -> None:
        """Fetch the versions after the newest of both pools, oldest first. Skip a damaged one, with
        an error in the log; raise ``CorruptionError`` for the newest."""
        # Older ones were removed here: fetched, they would be newer than those that are here.
        lacking = there[self._count_known(there) :]
        if lacking:
            self._tell_fetch([info.size for info in lacking])
        before: VersionRecord | None = None
        for info in lacking:
            with self._there.pool.pin(info.id) as entry:
                record = self._there.pool.record(entry)
                draft = PoolDraft(self._writer, record.length)
                try:
                    pool = self._there.pool
                    labels = copy_version(pool, record, draft, Stop(), before)
                    before = draft.commit(labels)
                except CorruptionError as error:
                    if info is lacking[-1]:
                        raise
                    self._unread.add(info.token)
                    _log.error("portus: step %d is not fetched: %s", info.step, error)
                finally:
                    draft.release()

    # The thread.

    def _copy_all(self) -> None:
        lead = self._there.ask(self._model)
        if (lead.term, lead.pool) != (self.term, self._writer.uuid):
            if self.term and lead.term >= self.term:
                raise ElsewhereError(self._went_on(lead, self._there.infos(self._model), ()))
            # The other host has lost its memory, or its disk.
            self._led, self.term = self.term or self._led, 0
            self._take(lead, may_fetch=False)
        while True:  # ends: each turn but the last copies something
            there = self._there.infos(self._model)
            self._note({info.token for info in there})
            own = self._infos()
            kept = {info.token for info in own} | self._unread
            gone = [info.token for info in there if info.token not in kept]
            # Oldest first: a pool is ordered by its commits.
            missing = [info for info in self.backlog() if info.token not in self._skipped]
            if missing:
                self._copy(missing[0], there, gone)
            elif gone and not (own and own[-1].token in self._skipped):  # else it would have none
                self._there.pool.let_go(gone, self._model, self.term)
            else:
                return

    def _copy(
        self, info: VersionInfo, there: Sequence[VersionInfo], gone: Collection[bytes]
    ) -> None:
        pool = self._there.pool
        with self._uploading() as stop, self._writer.pin(info.id) as entry:
            try:
                record = self._writer.record(entry)
                if decode_table(record.contents) is None:
                    raise NotMirroredError("a version without files (a shelf, or tables)")
            except (CorruptionError, NotMirroredError) as error:
                self._skip(info, error)
                return
            blank = np.zeros(len(record.length), np.int64)
            is_late = np.zeros(len(blank), np.bool_)
            snapshot = Snapshot(
                model=info.model,
                step=info.step,
                token=info.token,
                address=blank,
                length=record.length,
                late=is_late,
                steady=is_late,
            )
            draft = HostDraft(pool, snapshot, term=self.term, commit=info.commit)
            try:
                before = self._newest_there(there)
                try:
                    labels = copy_version(self._writer, record, draft, stop, before)
                except CorruptionError as error:
                    self._skip(info, error)
                    return
                self._last = draft.commit(labels, gone)
            finally:
                draft.release()
        self._note_copied(info)
        self._note({*self._known, info.token} - set(gone))

    def _newest_there(self, there: Sequence[VersionInfo]) -> VersionRecord | None:
        """Return the record of the newest version at the other host, or None."""
        if not there:
            return None
        if self._last is None or self._last.info.token != there[-1].token:
            self._last = self._there.pool.record_of(there[-1].token)
        return self._last

    def _tokens_there(self) -> Collection[bytes]:
        own = [info.token for info in self._infos()]
        last = max((n for n, token in enumerate(own) if token in self._known), default=-1)
        # An older one was removed there: copied again, it would be the newest.
        return {*self._known, *own[: last + 1]}

    def _note(self, known: Collection[bytes]) -> None:
        with self._changed:
            self._known = known
            self._changed.notify_all()

    def _say(self, error: Exception) -> None:
        super()._say(error)
        with self._changed:
            self._tries += 1
            self._changed.notify_all()

    def _fail(self, error: PortusError) -> None:
        self.why_over = str(error)
        super()._fail(error)
        with self._changed:
            self._changed.notify_all()
