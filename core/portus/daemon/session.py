"""One connection, from the greeting to the end: what the host does for each message.

A save lives as long as its connection, and its only trace on the medium is the commit. Whatever
ends the connection before that (a client that was killed, a link that was cut, an abandonment)
gives the space back, and nothing else happened. The host believes nothing of what a client says
about places: it places the bytes itself, and hashes what arrived; the client's own digests must
be the same, or there is no version.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import numpy as np

from portus.daemon import regions
from portus.daemon.counters import Counters
from portus.daemon.events import Few, tell
from portus.daemon.fabric import Fabric, HostLane
from portus.daemon.places import ConnectionSlot, Places
from portus.daemon.pools import HASHERS, Hosted, Pools, free_bytes, hole_bytes, taken_bytes
from portus.daemon.regions import RegionTable
from portus.daemon.secrets import Secrets
from portus.errors import (
    BusyError,
    CorruptionError,
    MediumError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
)
from portus.format.layout import RecordKind
from portus.index.check_version import check_layout, check_tree, read_layout, read_tree
from portus.index.directory import note_failure
from portus.index.findings import Findings
from portus.index.keep import checked_metrics
from portus.index.records import Pointer, Rows, VersionEntry, decode_layout, encode_version
from portus.mirror.names import checked_name
from portus.mirror.store import MissingError
from portus.pipeline.draft import Labels, PoolDraft
from portus.pipeline.parts import StorageRows, sources
from portus.protocol import messages as said
from portus.protocol.address import checked_tenant
from portus.protocol.connection import Payload
from portus.protocol.messages import (
    MAGIC,
    NONCE_SIZE,
    VERSIONS,
    Fault,
    ProtocolError,
    Refused,
    Said,
    column,
    handles,
    ranges,
)
from portus.protocol.proof import proof_of_host
from portus.protocol.vocabulary import MessageKind
from portus.transport.base import Column, Digests, Sources, Stop, cut
from portus.transport.budget import Budget
from portus.transport.local import check
from portus.transport.onesided import Moved, Remote
from portus.transport.stream import (
    InterruptedByError,
    Link,
    UnreadError,
    drain,
    give_from,
    take_into,
)
from portus.transport.verbs import Endpoint, WorkError

GREETING_S: Final = 10.0
"""The longest that a stranger may take for each word of the greeting."""

MEMORY: Final = 1 << 30
"""Bytes that all clients together make a host hold, at most, if it is not told otherwise."""

REGIONS_MAX: Final = said.STORAGES_MAX
VALUES_MAX: Final = 1 << 24
"""Of a tree, at most: each takes a hundred bytes while it is looked at."""

PINS_MAX: Final = said.IDS_MAX
CLAIMS_MAX: Final = 64
"""Of one connection, each."""

# Bytes of memory that things take, at most; measured.
_DRAFT: Final = 4 << 10
_PART: Final = 4 << 10
"""Of a save, and of each request within it."""
_STORAGE: Final = 128
_STORAGE_MOVED: Final = 256
_STORAGE_COMMITTED: Final = 512
"""Of each storage: of a save, as long as it is under way; while it is moved or hashed; while it is
committed."""
_RANGE_MOVED: Final = 64
_PIN: Final = 256
_TURN_S: Final = 0.1
_TREE_VALUE: Final = 64
_TREE_DICT: Final = 384
_LAYOUT_VALUE: Final = 48
"""While they are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTimeouts:
    """The longest waits for a client, in seconds. ``idle_s``: between requests; ``silent_s``:
    within one, payload included. ``claim_s``: for a model that another client saves. ``claimed_s``:
    between requests, of who claimed one."""

    idle_s: float = 900.0
    claimed_s: float = 2 * 86400.0
    silent_s: float = 60.0
    claim_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """What all sessions of a host share."""

    pools: Pools
    secrets: Secrets
    counters: Counters
    patience: ClientTimeouts
    fabric: Fabric = field(default_factory=Fabric)
    strangers: Few = field(default_factory=Few)
    """Tells of those that were not let in."""
    budget: Budget = field(default_factory=lambda: Budget(MEMORY))
    places: Places = field(default_factory=Places)
    hashing: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(HASHERS))
    """Held while a pool is hashed for a client."""


def turned_away(house: House, peer: str, why: str, tenant: str | None = None) -> None:
    """Count and log a client that is not let in."""
    house.counters.add("refused")
    text = f"{peer}: turned away: {why}"
    house.strangers.tell(logging.WARNING, "turned_away", text, peer=peer, tenant=tenant, why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Of a connection. ``tenant``: None until it is let in. ``claims``: the models that it saves;
    ``pins``: how many versions it holds; ``saving``: MODEL@STEP, or empty."""

    peer: str
    tenant: str | None
    seconds: float
    claims: Sequence[str] = ()
    pins: int = 0
    saving: str = ""


class ServedConnection:
    """The host's end of one connection."""

    def __init__(self, link: Link, house: House, peer: str, place: ConnectionSlot) -> None:
        self._place: Final = place
        self._link: Final = link
        self._house: Final = house
        self._peer: Final = peer
        self._start_s: Final = time.perf_counter()
        self._tenant: str | None = None
        self._requests: _Requests | None = None
        self.hosted: Hosted | None = None
        """The pool that it uses; None until it is let in."""

    def facts(self) -> Facts:
        """As they are now. From any thread."""
        seconds = time.perf_counter() - self._start_s
        facts = Facts(peer=self._peer, tenant=self._tenant, seconds=seconds)
        return facts if self._requests is None else self._requests.added(facts)

    def run(self) -> None:
        """Talk until the end. What goes wrong with the connection is logged, and ends it."""
        try:
            hosted = self._greet()
            if hosted is not None:
                self._serve(hosted)
                self._ended("the client said goodbye")
        except (TransportError, UsageError) as error:  # UsageError: the host closed it, at its end
            self._ended(self._place.why or str(error))
        finally:
            self._link.close()

    def _ended(self, why: str) -> None:
        told = tell if self._tenant is not None else self._house.strangers.tell
        told(
            logging.INFO,
            "disconnected",
            f"{self._peer}: ended: {why}",
            peer=self._peer,
            tenant=self._tenant,
            why=why,
            seconds=time.perf_counter() - self._start_s,
        )

    # The greeting.

    def _greet(self) -> Hosted | None:
        link, house = self._link, self._house
        link.silence_s = GREETING_S
        hello = link.receive()
        assert isinstance(hello, said.Hello)
        refusal = _why_not(hello)
        if refusal:
            self._turn_away(refusal)
            return None
        nonce = os.urandom(NONCE_SIZE)
        link.send(said.Challenge(hello.version, nonce, house.secrets.wanted))
        given = link.receive()
        assert isinstance(given, said.ProofGiven)
        secret = house.secrets.proved(hello.tenant, given.proof, hello.nonce, nonce)
        if secret is None:
            why = f"wrong secret for tenant {hello.tenant!r}, or no such tenant"
            self._turn_away(why, hello.tenant)
            return None
        self._tenant = hello.tenant
        if link.account is not None:
            link.account.tenant = hello.tenant
        try:
            house.places.prove(self._place, hello.tenant)
            hosted = self.hosted = house.pools.of(hello.tenant)
            if house.pools.of(hello.tenant) is not hosted:
                raise BusyError(errno.EAGAIN, "the pool is being opened again; try again")
        except PortusError as error:
            text, why = f"{self._peer}: {error}", str(error)
            who = {"peer": self._peer, "tenant": hello.tenant}
            tell(logging.ERROR, "turned_away", text, **who, why=why)
            link.send(_refusal(error))
            return None
        proof = proof_of_host(secret, hello.tenant, hello.nonce, nonce) if secret else b""
        info = hosted.writer.medium.info
        uuid = hosted.writer.superblock.uuid
        verbs = not house.fabric.why_not(link)
        link.send(said.Welcome(proof, uuid, info.name, info.volatile, info.granularity, verbs))
        house.counters.add("connections")
        text = f"{self._peer}: tenant {hello.tenant}"
        who = {"peer": self._peer, "tenant": hello.tenant}
        tell(logging.INFO, "connected", text, **who, verbs=verbs, version=hello.version)
        return hosted

    def _turn_away(self, why: str, tenant: str | None = None) -> None:
        turned_away(self._house, self._peer, why, tenant)
        self._link.send(Refused(Fault.USAGE, 0, why))

    # Requests.

    def _serve(self, hosted: Hosted) -> None:
        requests = self._requests = _Requests(self._link, hosted, self._house)
        try:
            self._link.silence_s = self._house.patience.silent_s
            while True:
                self._link.passed()
                self._place.worked()
                try:
                    event = self._link.receive(requests.idle_s)
                except UnreadError as unread:
                    requests.refuse(unread.kind, unread.why)
                    continue
                self._place.works()
                if isinstance(event, Payload):
                    raise ProtocolError("payload where a request was expected")
                if isinstance(event, said.Bye):
                    requests.goodbye = True
                    return
                requests.answer(event)
                del event  # it may be big, and the next one may be long in coming
        finally:
            requests.end()


class _Requests:
    """The requests of one client that was let in."""

    def __init__(self, link: Link, hosted: Hosted, house: House) -> None:
        self._link: Final = link
        self._hosted: Final = hosted
        self._writer: Final = hosted.writer
        self._counters: Final = house.counters
        self._patience: Final = house.patience
        self._claimed: Final[list[str]] = []
        self._fabric: Final = house.fabric
        self._lane: HostLane | None = None
        self._regions: Final = RegionTable(REGIONS_MAX)
        self._pins: Final[Counter[int]] = Counter()
        self._draft: _Draft | None = None
        self._counted: tuple[Pointer, int] | None = None
        self.goodbye = False
        """True once the client said so."""
        self._turns: Final = house.hashing

    @property
    def idle_s(self) -> float:
        """The longest wait for a request. A client that has claimed a model may stay idle: a
        training may save once a day. Keepalive notices a client that vanished."""
        is_claimed = self._claimed and self._draft is None
        return self._patience.claimed_s if is_claimed else self._patience.idle_s

    def answer(self, message: Said) -> None:
        """Do what is asked, and say so; a refusal ends the save that it was part of."""
        try:
            answer = _ANSWERS[message.kind](self, message)
        except PortusError as error:
            if self._link.closed:
                raise
            self.refuse(message.kind, error)
            return
        self._link.send(answer)

    def refuse(self, kind: MessageKind, error: PortusError) -> None:
        """Say why not."""
        self._drop("refused")
        self._link.send(self._refused(kind, error))

    def _refused(self, kind: MessageKind, error: PortusError) -> Refused:
        refusal = _refusal(error)
        self._counters.failed(refusal.fault)
        failed_here = isinstance(error, MediumError | CorruptionError)
        self._tell(
            logging.ERROR if failed_here else logging.INFO,
            "refused",
            f"{kind.name} refused: {error}",
            request=kind.name.lower(),
            fault=refusal.fault.name.lower(),
            why=str(error),
        )
        return refusal

    def _tell(self, level: int, event: str, text: str, **fields: str | float | None) -> None:
        peer, tenant = self._link.name, self._hosted.tenant
        tell(level, event, f"{tenant}: {text}", peer=peer, tenant=tenant, **fields)

    def end(self) -> None:
        """The connection is over: nothing of it stays."""
        if self._lane is not None:
            self._lane.close()
        self._drop("the connection ended")
        for version, count in self._pins.items():
            for _ in range(count):
                self._writer.locks.unpin(version)
        self._pins.clear()
        was_last = False
        while self._claimed:
            model = self._claimed.pop()
            self._hosted.replica.disclaimed(model)
            was_last = self._hosted.disclaim(model, goodbye=self.goodbye)
        if was_last:
            self._give_back_at_the_end()

    def added(self, facts: Facts) -> Facts:
        """With what is known here. From any thread."""
        draft = self._draft
        saving = "" if draft is None else f"{draft.begin.model}@{draft.begin.step}"
        claims = tuple(self._claimed)
        return replace(facts, claims=claims, pins=len(self._pins), saving=saving)

    def _drop(self, why: str) -> None:
        draft, self._draft = self._draft, None
        if draft is not None:
            draft.pool.release()
            self._link.keep(-draft.size)
            self._hosted.ended()
            self._counters.add("abandoned")
            model, step = draft.begin.model, draft.begin.step
            self._tell(
                logging.INFO,
                "abandoned",
                f"model {model!r} step {step}: no version: {why}",
                model=model,
                step=step,
                why=why,
                bytes=int(draft.lengths.sum()),
                seconds=time.perf_counter() - draft.begun_s,
            )

    # Saves.

    def _claim(self, message: said.Claim) -> Said:
        if message.model in self._claimed:
            raise UsageError(f"model {message.model!r} is claimed here already")
        if len(self._claimed) >= CLAIMS_MAX:
            raise UsageError(f"more than {CLAIMS_MAX} models")
        with contextlib.ExitStack() as undo:
            self._hosted.claim(message.model, message.client, self._patience.claim_s)
            undo.callback(self._hosted.disclaim, message.model, goodbye=False)
            self._hosted.replica.claimed(message.model)
            undo.callback(self._hosted.replica.disclaimed, message.model)
            if self._hosted.mirror is not None:
                self._hosted.mirror.claimed(message.model)
            undo.pop_all()
        self._claimed.append(message.model)
        return said.Done()

    def _connect(self, message: said.Connect) -> Said:
        if self._lane is not None:
            self._lane.close()
        other = Endpoint(*msgspec.structs.astuple(message))
        self._lane = self._fabric.lane(self._link, self._hosted, other)
        return said.Connected(*self._lane.endpoint)

    def _register(self, message: said.Register) -> Said:
        lengths = column(message.lengths, "regions")
        addresses, keys = handles(message.handles, len(lengths), "regions")
        self._link.room(regions.WORK * (len(self._regions) + len(lengths)))
        with self._kept(regions.ROW * len(lengths)):
            self._regions.add(message.first, lengths, addresses, keys)
        return said.Done()

    def _forget(self, message: said.Forget) -> Said:
        numbers = column(message.regions, "regions")
        self._link.room(regions.WORK * (len(self._regions) + len(numbers)))
        self._regions.remove(numbers)
        self._link.keep(-regions.ROW * len(numbers))
        return said.Done()

    def _begin(self, message: said.Begin) -> Said:
        if message.model not in self._claimed:
            raise UsageError(f"model {message.model!r} is not claimed here")
        self._hosted.replica.require(message.model)
        lengths = column(message.lengths, "lengths")
        size_max = self._writer.max_bytes
        if size_max is not None and int(lengths.sum()) > size_max:
            raise MediumError(
                28, f"a version of {int(lengths.sum())} bytes: the quota is {size_max} bytes"
            )
        self._refuse_known(message.token)
        self._hosted.look()
        size = _DRAFT + _STORAGE * len(lengths)
        self._hosted.began()
        try:
            with self._kept(size):
                self._draft = _Draft(PoolDraft(self._writer, lengths), lengths, message, size)
        except BaseException:
            self._hosted.ended()
            raise
        return said.Begun()

    def _offer(self, message: said.Offer) -> Said:
        draft = self._drafted()
        self._grow(draft)
        indices = column(message.indices, "indices")
        self._link.room(_STORAGE_MOVED * len(indices))
        draft.claim(indices)
        lengths = draft.lengths[indices]
        registered, addresses, keys = self._regions.of(column(message.regions, "regions"))
        if not np.array_equal(registered, lengths):
            raise UsageError("offer: its regions are not registered, or have other lengths")
        remote, bounced = Remote(addresses, keys), 0

        def move(moved: Sources) -> Digests:
            nonlocal bounced
            lane = self._lane
            if lane is None or lane.closed or not _is_reached(remote, lengths):
                bounced = moved.size
                return self._pull(moved)
            start = time.perf_counter()
            try:
                done = self._moved(lane.pull, remote, moved)
            finally:
                self._pulled(time.perf_counter() - start)
            self._counters.add("pulled_bytes", moved.size)
            bounced = done.bounced
            return done.digests

        try:
            digests = draft.pool.place(indices, np.zeros(len(indices), np.int64), move)
        except InterruptedByError:  # by an abandonment: the table lets nothing else through
            self._drop("the client abandoned it")
            return said.Abandoned()
        return said.Pulled(digests.tobytes(), bounced)

    def _moved(self, move: _Move, remote: Remote, moved: Sources) -> Moved:
        """By verbs. The bytes, and the time on the wire, are counted."""
        try:
            done = move(remote, moved)
        except WorkError as error:
            if error.denied:
                raise UsageError(f"a region cannot be reached: {error}") from error
            raise
        self._counters.add("verbs_bytes", moved.size)
        self._counters.add("bounced_bytes", done.bounced)
        self._counters.add("wire_seconds", done.wire_s)
        return done

    def _pull(self, moved: Sources) -> Digests:
        """Fetch the bytes of an offer. If the medium fails, the rest is received all the same:
        only then can the client hear of it."""
        link, start, before = self._link, time.perf_counter(), self._link.taken
        hashed_s = link.hash_s
        segments, digests = cut(moved)
        if segments.size:
            link.send(said.Pull(segments.size))
        try:
            take_into(link, self._writer.medium, segments, digests)
        except (MediumError, CorruptionError):
            drain(link, segments.size - (link.taken - before))
            raise
        finally:
            self._counters.add("pulled_bytes", link.taken - before)
            self._counters.add("hash_seconds", link.hash_s - hashed_s)
            self._pulled(time.perf_counter() - start)
        return digests

    def _pulled(self, seconds: float) -> None:
        self._counters.add("pull_seconds", seconds)
        self._counters.took("pull", seconds)

    def _share(self, message: said.Share) -> Said:
        draft = self._drafted()
        self._grow(draft)
        entry = self._find(message.before)
        indices = column(message.indices, "indices")
        if entry is None:
            return said.Shared(False)
        self._link.room(_STORAGE_MOVED * len(draft.lengths))
        record = self._writer.record(entry)
        if len(record.storages) != len(draft.lengths) or not draft.may_claim(indices):
            raise UsageError("share: these are not storages of both versions")
        lengths = record.storages["length"][indices].astype(np.int64)
        if not np.array_equal(lengths, draft.lengths[indices]):
            raise UsageError("share: a storage has another length in that version")

        def same(group: StorageRows) -> bool:
            """The medium still holds what was saved. That the client has the same is seen when
            it confirms: its digests must be those of this version."""
            address = np.ones(len(indices), np.int64)
            medium = self._writer.medium
            with self._hashing() as stop:
                found = check(medium, sources(address, lengths, group.extents), stop)
            return bool(np.array_equal(found, group.digests))

        shared = draft.pool.reach(record, indices, same)
        if shared:
            draft.claim(indices)
            draft.shared_bytes += int(lengths.sum())
            self._counters.add("shared_bytes", int(lengths.sum()))
        return said.Shared(shared)

    def _confirm(self, message: said.Confirm) -> Said:
        draft, start = self._drafted(), time.perf_counter()
        self._grow(draft)
        self._link.room(_STORAGE_COMMITTED * len(draft.lengths))
        if not draft.claimed.all():
            missing = int((~draft.claimed).sum())
            raise UsageError(f"confirmation: {missing} storages were neither pulled nor shared")
        rows = draft.pool.rows()
        if rows[2].tobytes() != message.digests:
            raise CorruptionError(
                "confirmation: the client's digests are not those of what arrived here: bytes "
                "changed on the way, or while they were pulled; nothing was committed"
            )
        known = self._known(draft, message)
        if known is None:
            return said.Missing()
        begin = draft.begin
        labels = Labels(
            model=begin.model,
            step=begin.step,
            token=begin.token,
            layout=b"",
            tree=b"",
            inexact=message.inexact,
            metrics=draft.metrics,
        )
        retire = self._unpinned(message.retire)
        changed = {begin.model, *self._models_of(retire)}
        self._refuse_known(begin.token)
        self._refuse_nonsense(rows[0], *known)
        self._hosted.replica.require(begin.model)
        self._hosted.look()
        record = draft.pool.commit_rows(rows, labels, *known, retire)
        self._hosted.look()
        self._draft = None
        self._link.keep(-draft.size)
        self._hosted.ended()
        self._changed(changed)
        self._hosted.replica.committed(begin.model, begin.token)
        self._counters.add("saves")
        end = time.perf_counter()
        self._counters.add("commit_seconds", end - start)
        self._counters.took("commit", end - start)
        self._counters.took("save", end - draft.begun_s)
        info = record.info
        self._tell(
            logging.INFO,
            "committed",
            f"model {info.model!r} step {info.step}: version {info.id}",
            model=info.model,
            step=info.step,
            version=info.id,
            commit=info.commit,
            bytes=info.size,
            shared_bytes=draft.shared_bytes,
            retired=len(retire),
            seconds=end - draft.begun_s,
            commit_seconds=end - start,
        )
        return said.Committed(encode_version(record))

    def _metrics(self, message: said.Metrics) -> Said:
        self._drafted().metrics = checked_metrics(message.metrics)
        return said.Done()

    def _known(self, draft: _Draft, message: said.Confirm) -> _Known | None:
        """Layout and tree, as they are or by the version before; None if that is gone, or if its
        layout was not for storages as long as these."""
        layout, tree = message.layout, message.tree
        if layout is not None and tree is not None:
            return layout, tree
        entry = self._find(message.before)
        record = None if entry is None else self._writer.record(entry)
        if record is None:
            return None
        if layout is None and not np.array_equal(record.storages["length"], draft.lengths):
            return None
        old_layout = draft.pool.known(record, RecordKind.LAYOUT) if layout is None else layout
        old_tree = draft.pool.known(record, RecordKind.TREE) if tree is None else tree
        if old_layout is None or old_tree is None:
            return None
        return old_layout, old_tree

    def _refuse_nonsense(
        self, storages: Rows, layout: Pointer | bytes, tree: Pointer | bytes
    ) -> None:
        """Raise ``UsageError`` for a layout or a tree that `check` would call damaged. Two of one
        version before were looked at when that was committed."""
        if not isinstance(layout, bytes) and not isinstance(tree, bytes):
            return
        findings = Findings()
        count = self._count_tensors(findings, storages, layout)
        if not isinstance(tree, bytes):
            pointer, tree = tree, b""
            self._link.room(2 * pointer.length)
            tree = bytes(self._writer.payload(pointer, RecordKind.TREE))
        dicts, others = tree.count(b"{"), tree.count(b"[") + tree.count(b",")
        if dicts + others > VALUES_MAX:
            raise UsageError(f"confirmation: a tree of more than {VALUES_MAX} values")
        self._link.room(_TREE_DICT * dicts + _TREE_VALUE * others + len(tree))
        used = read_tree(findings, "tree", memoryview(tree))
        if used is not None and count is not None:
            check_tree(findings, "this version", used, count)
        if findings.all:
            raise UsageError(f"confirmation: {findings.all[0]}")

    def _count_tensors(
        self, findings: Findings, storages: Rows, layout: Pointer | bytes
    ) -> int | None:
        """How many a layout has; None if it is none."""
        if not isinstance(layout, bytes):
            return self._tensors_of(layout)
        self._link.room(_LAYOUT_VALUE * (layout.count(b"[") + layout.count(b",")) + len(layout))
        read = read_layout(findings, "layout", memoryview(layout))
        if read is None:
            return None
        check_layout(findings, "layout", read, storages)
        return len(read.tensors)

    def _tensors_of(self, layout: Pointer) -> int:
        """How many a layout has that is there; that of the last one is remembered."""
        if self._counted is None or self._counted[0] != layout:
            self._link.room(16 * layout.length)
            payload = self._writer.payload(layout, RecordKind.LAYOUT)
            self._counted = layout, len(decode_layout(payload))
        return self._counted[1]

    def _abandon(self, message: said.Abandon) -> Said:
        self._drop("the client abandoned it")
        return said.Abandoned()

    @contextlib.contextmanager
    def _hashing(self) -> Iterator[Stop]:
        """A turn in which the pool is hashed for this client, as long as it is there."""
        with contextlib.ExitStack() as turns, self._link.working() as stop:
            for turn in (self._hosted.hashing, self._turns):
                while not turn.acquire(timeout=_TURN_S):
                    stop.check()
                turns.callback(turn.release)
            yield stop

    @contextlib.contextmanager
    def _kept(self, size: int) -> Iterator[None]:
        """Memory that stays for what is made in here."""
        self._link.keep(size)
        try:
            yield
        except BaseException:
            self._link.keep(-size)
            raise

    def _grow(self, draft: _Draft) -> None:
        """One request more of a save: what it leaves behind stays until the end of the save."""
        self._link.keep(_PART)
        draft.size += _PART

    def _drafted(self) -> _Draft:
        assert self._draft is not None, "the table lets no such message through"
        return self._draft

    def _refuse_known(self, token: bytes) -> None:
        if self._find(token) is not None:
            raise UsageError(f"token {token.hex()} is that of a version that is there")

    def _find(self, token: bytes) -> VersionEntry | None:
        entries = self._writer.catalogue().entries()
        return next((entry for entry in entries if entry.info.token == token), None)

    # Reading.

    def _read(self, message: said.Read) -> Said:
        start = time.perf_counter()
        offsets, lengths = ranges(message.ranges, "ranges")
        self._inside(offsets, lengths)
        give_from(self._link, self._writer.medium, offsets, lengths)
        self._counters.add("read_bytes", int(lengths.sum()))
        self._counters.took("read", time.perf_counter() - start)
        return said.Done()

    def _check(self, message: said.Check) -> Said:
        lengths = column(message.lengths, "lengths")
        offsets, sizes = ranges(message.ranges, "ranges")
        self._inside(offsets, sizes)
        size = self._writer.medium.size
        if int(sizes.sum()) > size:
            raise UsageError(f"check: {int(sizes.sum())} bytes, of a pool of {size}")
        self._link.room(_STORAGE_MOVED * len(lengths) + _RANGE_MOVED * len(sizes))
        moved = Sources(
            address=np.ones(len(lengths), np.int64),
            length=lengths,
            extent_offset=offsets,
            extent_length=sizes,
        )
        with self._hashing() as stop:
            return said.Checked(check(self._writer.medium, moved, stop).tobytes())

    def _push(self, message: said.Push) -> Said:
        start = time.perf_counter()
        lengths = column(message.lengths, "lengths")
        offsets, sizes = ranges(message.ranges, "ranges")
        self._inside(offsets, sizes)
        self._link.room(_STORAGE_MOVED * len(lengths) + _RANGE_MOVED * len(sizes))
        remote = Remote(*handles(message.handles, len(lengths), "push"))
        lane = self._lane
        if lane is None or lane.closed or not _is_reached(remote, lengths):
            raise UsageError("push: not connected by verbs, or storages without a handle")
        moved = Sources(
            address=remote.address,
            length=lengths,
            extent_offset=offsets,
            extent_length=sizes,
        )
        done = self._moved(lane.push, remote, moved)
        self._counters.add("read_bytes", moved.size)
        self._counters.took("read", time.perf_counter() - start)
        return said.Pushed(done.digests.tobytes(), done.bounced)

    def _inside(self, offsets: Column, lengths: Column) -> None:
        size = self._writer.medium.size
        if len(offsets) and int((offsets + lengths).max()) > size:
            raise UsageError(f"ranges: the pool has {size} bytes")

    def _pin(self, message: said.Pin) -> Said:
        if len(self._pins) >= PINS_MAX:
            raise UsageError(f"more than {PINS_MAX} versions are pinned")
        with self._kept(_PIN if message.version not in self._pins else 0):
            self._writer.locks.pin(message.version)
            self._pins[message.version] += 1
        return said.Done()

    def _unpin(self, message: said.Unpin) -> Said:
        if not self._pins[message.version]:
            raise UsageError(f"version {message.version} is not pinned")
        self._writer.locks.unpin(message.version)
        self._pins[message.version] -= 1
        if not self._pins[message.version]:
            del self._pins[message.version]
            self._link.keep(-_PIN)
        return said.Done()

    # The pool.

    def _room(self, message: said.Room) -> Said:
        grown = self._writer.ensure(message.size)
        link = self._link  # who hangs up wants no more of it, however much was asked for
        self._writer.touch(grown, lambda: not (link.closed or link.hung_up))
        return said.Done()

    def _retire(self, message: said.Retire) -> Said:
        versions = self._unpinned(message.versions)
        self._hosted.refuse()
        self._hosted.look()
        changed = self._models_of(versions)
        self._writer.retire(versions)
        self._changed(changed)
        self._tell(logging.INFO, "retired", f"{len(versions)} versions", versions=len(versions))
        return said.Done()

    def _unpinned(self, ids: bytes) -> set[int]:
        """Versions to retire, by id, but for those that somebody pinned: the client may not know of
        that yet."""
        pinned, versions = self._hosted.holds.pinned(), set(column(ids, "versions").tolist())
        if pinned:
            entries = self._writer.catalogue().entries()
            versions -= {each.info.id for each in entries if each.info.token in pinned}
        return versions

    def _models_of(self, versions: Collection[int]) -> set[str]:
        if not versions:
            return set()
        entries = self._writer.catalogue().entries()
        return {each.info.model for each in entries if each.info.id in versions}

    def _changed(self, models: Collection[str]) -> None:
        """For the mirror and the replica to look at them."""
        self._hosted.replica.changed(models)
        if self._hosted.mirror is not None:
            self._hosted.mirror.changed(models)

    def _hold(self, message: said.Hold) -> Said:
        holds, name = self._hosted.holds, message.id.hex()
        before = holds.model_of(name)
        if message.reference:
            holds.keep(name, message.reference)
        else:
            holds.let_go(name)
        self._changed({each for each in (before, holds.model_of(name)) if each})
        return said.Done()

    def _holds(self, message: said.Holds) -> Said:
        self._link.room(4 * said.HELD_SIZE_MAX)
        found = self._hosted.holds.after(message.after.hex(), said.HELD_SIZE_MAX)
        return said.Held(said.packed_column([len(each) for each in found]), b"".join(found))

    def _settle(self, message: said.Settle) -> Said:
        if message.model not in self._claimed:
            raise UsageError(f"model {message.model!r} is not claimed here")
        self._hosted.replica.told(message.model, message.token)
        return said.Done()

    # What others mirror here.

    def _put(self, message: said.Put) -> Said:
        self._hosted.refuse()
        name = checked_name(message.name, self._hosted.tenant)
        made = self._hosted.replica.put(name, message.data, fresh=message.fresh)
        self._counters.add("object_bytes", len(message.data) if made else 0)
        return said.Placed(made)

    def _get(self, message: said.Get) -> Said:
        store = self._hosted.objects.store
        self._link.room(message.length or said.OBJECT_SIZE_MAX)
        try:
            if not message.length:
                return said.Object(store.get(message.name))
            room = bytearray(message.length)
            store.get_range(message.name, message.start, memoryview(room))
            return said.Object(bytes(room))
        except MissingError as error:
            raise StaleError(str(error)) from error

    def _list(self, message: said.List) -> Said:
        found = self._hosted.objects.store.list(message.prefix, message.after)
        some = list(itertools.islice(found, said.LISTED_MAX))
        return said.Listed(
            [each.name for each in some],
            said.packed_column([each.size for each in some]),
            said.packed_column([int(each.modified * 1e6) for each in some]),
        )

    def _delete(self, message: said.Delete) -> Said:
        self._hosted.refuse()
        for name in message.names:
            checked_name(name, self._hosted.tenant)
        self._hosted.objects.delete(message.names)
        return said.Done()

    def _give_back(self, message: said.GiveBack) -> Said:
        freed = self._fabric.give_back(self._hosted)
        self._tell(logging.INFO, "gave_back", f"{freed} bytes given back", bytes=freed)
        return said.Done()

    def _note(self, message: said.Note) -> Said:
        self._hosted.look()  # or it would be noted in another pool
        note_failure(self._writer, message.text, self._hosted.path)
        return said.Done()

    def _give_back_at_the_end(self) -> None:
        """The last trainer ended as it should: until another one comes nobody needs the space."""
        try:
            self._give_back(said.GiveBack())
        except PortusError as error:
            self._tell(logging.WARNING, "log", f"its free space could not be returned: {error}")

    def _status(self, message: said.Status) -> Said:
        hosted, size = self._hosted, self._writer.medium.size
        free, holes, taken = free_bytes(hosted), hole_bytes(hosted), taken_bytes(hosted)
        return said.Standing(size, free, hosted.saves, holes, taken)


_ANSWERS: Final[Mapping[MessageKind, Callable[[_Requests, Said], Said]]] = said.MESSAGES.handlers(
    _Requests
)
"""What answers each request. One that no method answers fails here, when a host starts."""

_Known = tuple[Pointer | bytes, Pointer | bytes]
_Move = Callable[[Remote, Sources], Moved]


def _is_reached(remote: Remote, lengths: Column) -> bool:
    """True if each storage that has bytes has a handle."""
    has_one = (remote.address > 0) | (remote.key > 0)  # a dmabuf begins at the address 0
    return bool((has_one | (lengths == 0)).all())


class _Draft:
    """A save under way: the version that is made, and which of its storages have a place."""

    def __init__(self, pool: PoolDraft, lengths: Column, begin: said.Begin, size: int) -> None:
        """size: bytes of memory that are kept for it."""
        self.size = size
        self.pool: Final = pool
        self.lengths: Final = lengths
        self.begin: Final = begin
        self.claimed: Final = np.zeros(len(lengths), np.bool_)
        self.shared_bytes = 0
        self.metrics: Mapping[str, float] = {}
        self.begun_s: Final = time.perf_counter()

    def may_claim(self, indices: Column) -> bool:
        """True if these are storages of the version, each once, that have no place yet."""
        if len(indices) and int(indices.max()) >= len(self.lengths):
            return False
        return len(np.unique(indices)) == len(indices) and not self.claimed[indices].any()

    def claim(self, indices: Column) -> Column:
        """They have a place now. Raises ``UsageError`` if they may not."""
        if not self.may_claim(indices):
            raise UsageError("storages that are not there, come twice, or have a place already")
        self.claimed[indices] = True
        return indices


def _why_not(hello: said.Hello) -> str:
    if hello.magic != MAGIC:
        return f"this is a Portus storage host; {hello.magic!r} is not spoken here"
    if hello.version not in VERSIONS:
        spoken = " and ".join(map(str, VERSIONS))
        return f"protocol version {hello.version}: this host speaks {spoken}; upgrade the older"
    try:
        checked_tenant(hello.tenant)
    except UsageError as error:
        return str(error)
    return ""


def _refusal(error: PortusError) -> Refused:
    faults: tuple[tuple[type[PortusError], Fault], ...] = (
        (BusyError, Fault.BUSY),
        (MediumError, Fault.MEDIUM),
        (UsageError, Fault.USAGE),
        (StaleError, Fault.STALE),
        (CorruptionError, Fault.CORRUPTION),
    )
    fault = next((fault for kind, fault in faults if isinstance(error, kind)), Fault.TRANSPORT)
    number = error.errno if isinstance(error, OSError) else None
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return Refused(fault, number or 0, text[: said.TEXT_SIZE_MAX // 4])
