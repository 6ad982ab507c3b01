"""A pool on a storage host, as a medium and its locks; reads work as on any other pool.

``Links`` are the connections of one client to one host. A broken connection is replaced when one is
needed. While the host does not answer, calls fail at once between two attempts, so a host that is
down never delays training. A host that hangs is asked in the background: after one wait in vain no
other call waits until it answers. A connection that moves tensors gets a queue pair, where verbs
are available.

With a replica, the client asks the first host. It asks the second if the first does not answer, or
says that the model has moved there. A client that has claimed a model at the second host stays with
it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from portus.engine.copying.local import BATCH, best_engine
from portus.engine.copying.segments import Digests, Segments, Sources, Stop, cut, owners
from portus.engine.media.base import MediumInfo, MediumKind, ReadOnlyMedium
from portus.errors import (
    MediumError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
)
from portus.reach.protocol import messages as said
from portus.reach.protocol.address import Address, Transport
from portus.reach.protocol.messages import (
    Expected,
    Said,
    Welcome,
    digest_rows,
    expect,
    pack_column,
    pack_pairs,
)
from portus.reach.protocol.vocabulary import Phase
from portus.reach.transport.dial import (
    TRANSPORT_VARIABLE,
    Credentials,
    dial,
)
from portus.reach.transport.regions import SMALL, Regions
from portus.reach.transport.stream import Link, SilentError, take
from portus.reach.transport.verbs import Domain, Endpoint, QueuePair, Region, port_for

_log: Final = logging.getLogger("portus")

STORAGE_HOST: Final = MediumKind("storage host")

ANSWER_S: Final = 5.0
"""The longest wait for an answer that needs no work. Each save begins with such a question, so a
host that hangs delays training by no more than this."""

SILENCE_S: Final = 30.0
"""The longest silence of a host in the middle of a request."""

WORK_S: Final = 600.0
"""The longest that a host may work on an answer: persist, or hash. Meanwhile the client asks it
whether it is alive: one thread of the host works, and others answer. Keepalive notices a host that
vanished."""

ROOM_S: Final = 60.0
"""The same for a request for room: training may be waiting."""

_PAUSE_MIN_S: Final = 0.5
_PAUSE_MAX_S: Final = 10.0
_BYTES_S_MIN: Final = 10e6

_OWN_MAX: Final = 1000
"""Versions of a client that it knows as its own, at most."""

_IDLE_MAX: Final = 4
"""Unused connections that are kept open."""


class Links:
    """The connections of a client to one storage host. Thread-safe."""

    def __init__(
        self,
        address: Address,
        credentials: Credentials,
        *,
        model: str | None = None,
        durable: int = 1,
        silence_s: float | None = None,
    ) -> None:
        """Connect. model: the model that this client saves, and no other client. durable: 2 for a
        host that has a replica, and leads. silence_s: of a first host, the longest silence of its
        replica, which it reaches by the socket alone; None: this is no host.

        Raises ``TransportError`` if no host answers, and a refusal of the host as an error.
        """
        self.address: Final = address
        self._hosts: Final = address.each
        self._at = 0
        """The number of the host that is asked first."""
        self._of: Final = weakref.WeakKeyDictionary[Link, tuple[int, Welcome]]()
        """The number of each connection's host, and the host's welcome."""
        self._durable: Final = durable
        self.answer_s = ANSWER_S
        self.silence_s: Final = SILENCE_S if silence_s is None else silence_s
        self.verbs: Regions | None = None
        """The regions registered for the host; None: the host cannot reach memory here."""
        wish = os.environ.get(TRANSPORT_VARIABLE, "")
        self._wish: Final = Transport.of(wish, TRANSPORT_VARIABLE)
        self._settled = self._wish is Transport.TCP or silence_s is not None
        self._lanes: Final[weakref.WeakKeyDictionary[Link, QueuePair]] = weakref.WeakKeyDictionary()
        self._claim: Final = None if model is None else said.Claim(model, os.urandom(16))
        self._own: Final = deque[bytes](maxlen=_OWN_MAX)
        """The tokens of versions that are the newest of the model while no other client saves."""
        self._credentials = credentials
        self._guard: Final = threading.Lock()
        self._idle: list[Link] = []
        self._over: Final = threading.Event()
        self._asking: threading.Thread | None = None
        self._was_in = False
        self._pause_s = 0.0
        self._again_s = 0.0
        self._why: TransportError | None = None
        self.welcome: Welcome
        self.give_back(self._dial())
        if self._wish is Transport.VERBS:
            try:
                with self.lend() as link:
                    self.lane(link)
            except BaseException:
                self.close()
                raise

    def borrow(self) -> Link:
        """Return a connection that is ready, for one thread. Raises as the constructor.

        While the host is down this fails at once, except for an attempt now and then.
        """
        while True:
            with self._guard:
                link = self._idle.pop() if self._idle else None
            if link is None:
                return self._dial()
            # A restarted host has closed it, and a save must not fail for that.
            if link.is_alive() and self._leads(link):
                return link
            link.close()

    def give_back(self, link: Link) -> None:
        """Keep a connection for the next request, or close it if it cannot serve one."""
        whole = not link.closed and link.connection.state is Phase.READY
        with self._guard:
            if (
                whole
                and self._leads(link)
                and self._why is None
                and not self._over.is_set()
                and len(self._idle) < _IDLE_MAX
            ):
                self._idle.append(link)
                return
        self.revoke(link)

    def lane(self, link: Link) -> QueuePair | None:
        """Return the queue pair by which the host reaches registered memory, as long as the
        connection lives; None if bytes go over the socket. Raises ``UsageError`` if only verbs are
        wanted."""
        if self._settled:
            return None
        lane = self._lanes.get(link)
        if lane is not None and not lane.closed:
            return lane
        try:
            self._lanes[link] = lane = self._connect_lane(link)
        except TransportError as error:
            if link.closed:
                raise
            # The connection works, so the fault is with verbs, and lasts.
            self.do_without(error)
        return lane

    def do_without(self, why: TransportError) -> None:
        """Use no verbs from now on. Raise ``UsageError`` if the user asked for verbs."""
        if self._wish is Transport.VERBS:
            raise UsageError(
                f"{self.address}: {TRANSPORT_VARIABLE}=verbs, but verbs cannot be used: {why}"
            ) from why
        self._settled = True
        _log.log(
            logging.WARNING if self.welcome.verbs else logging.INFO,
            "%s: saves and loads go over the socket: %s",
            self.address,
            why,
        )

    def revoke(self, link: Link) -> None:
        """Close a connection; when this returns, the host reaches no memory through it. If it was
        broken, close the idle ones too, so that the next one is greeted first."""
        broke = link.closed
        lane = self._lanes.pop(link, None)
        if lane is not None:
            lane.close()
        link.close()
        if broke:
            for each in self._taken_idle():
                each.close()
        if link.silence is not None:
            self._hangs(link.silence)

    def _leads(self, link: Link) -> bool:
        """Return False for a connection to the host that the client has left."""
        return self._of[link][0] == self._at

    def uuid_of(self, link: Link) -> bytes:
        """Return the identity of a connection's pool, also after the client has left the host."""
        return self._of[link][1].uuid

    def _taken_idle(self) -> list[Link]:
        with self._guard:
            idle, self._idle = self._idle, []
        return idle

    @contextlib.contextmanager
    def lend(self) -> Iterator[Link]:
        """Yield a connection for a few requests."""
        link = self.borrow()
        try:
            yield link
        finally:
            self.give_back(link)

    def ask(self, message: Said, kind: type[Expected], silence_s: float | None = None) -> Expected:
        """Send one request on any connection, and return its answer, of that kind. silence_s: a
        longer wait, for an answer that needs work. Raises a refusal as an error."""
        with self.lend() as link:
            return expect(link.ask(message, silence_s or self.answer_s), kind)

    def ask_for_work(self, link: Link, message: Said) -> Said:
        """Return the answer to a request that may take long. The client waits ``WORK_S`` at most,
        as long as the host answers a question over another connection now and then. Raises
        ``TransportError``."""
        link.send(message)
        for _ in range(max(1, int(WORK_S / self.silence_s))):
            if not link.is_silent(self.silence_s):
                break
            # Over another connection: the host's thread for this one is at work.
            self.ask(said.Status(), said.Standing)
            if not self._leads(link):  # then another host has answered
                raise SilentError(f"{link.name}: no answer, and it is {self._hosts[self._at]} now")
        return link.hear()

    def close(self) -> None:
        """Close all idle connections, and the RDMA device. A second call does nothing."""
        self._over.set()
        with self._guard:
            verbs, self.verbs = self.verbs, None
        for link in self._taken_idle():
            with contextlib.suppress(TransportError):
                link.send(said.Bye())
            self.revoke(link)
        if verbs is not None:
            for lane in list(self._lanes.values()):
                lane.close()
            with contextlib.suppress(TransportError):
                verbs.domain.close()

    def cut(self) -> None:
        """Close all connections, also those that other threads use: their requests fail."""
        self._over.set()
        for each in self._of.keyrefs():
            link = each()
            if link is not None:
                link.close()

    def _connect_lane(self, link: Link) -> QueuePair:
        if not self.welcome.verbs:
            raise TransportError("the storage host offers no verbs on this connection")
        with self._guard:
            if self.verbs is None:
                self.verbs = Regions(Domain(port_for(link.host)))
            domain = self.verbs.domain
        pair = domain.queue_pair()
        try:
            answer = expect(link.ask(said.Connect(*pair.endpoint)), said.Connected)
            pair.connect(Endpoint(*msgspec.structs.astuple(answer)), remote=True)
        except BaseException:
            pair.close()
            raise
        return pair

    def _dial(self) -> Link:
        if self._over.is_set():
            raise MediumError(errno.EBADF, f"{self.address}: used after it was closed")
        why, now_s = self._why, time.monotonic()
        if why is not None:
            # One call has waited in vain; each further wait would delay training for seconds.
            if self.hangs:
                raise TransportError(f"{why} (retrying in the background until it answers)")
            if now_s < self._again_s:
                raise TransportError(f"{why} (next try in {self._again_s - now_s:.1f} s)") from why
        try:
            return self._try_hosts()
        except TransportError as error:
            if self._was_in and _is_silence(error):
                self._hangs(error)
            raise

    @property
    def hangs(self) -> bool:
        """True from a wait in vain until the host has answered the background thread."""
        asking = self._asking  # in a forked child it is not alive
        return asking is not None and asking.is_alive()

    def _hangs(self, why: TransportError) -> None:
        """Stop all waits for the host, until it answers a background thread."""
        with self._guard:
            if self._over.is_set() or self.hangs:
                return
            self._why = why
            self._asking = threading.Thread(target=self._ask_on, name="portus-probe", daemon=True)
            self._asking.start()

    def _ask_on(self) -> None:
        while not self._over.is_set():
            try:
                self.give_back(self._try_hosts())
                return
            except PortusError as error:
                if not _is_silence(error):
                    return  # it is down, or refuses: the next call that needs it learns so at once
            self._over.wait(self._pause_s)

    def _try_hosts(self) -> Link:
        why = self._why
        try:
            link = self._reach()
        except TransportError as error:
            # At most ``_PAUSE_MAX_S``, to find a host soon after it is back.
            self._pause_s = min(_PAUSE_MAX_S, max(_PAUSE_MIN_S, 2 * self._pause_s))
            self._why, self._again_s = error, time.monotonic() + self._pause_s
            raise
        except PortusError as error:
            if not self._was_in:
                raise
            # It accepted us before, so the call is right, and the host has changed.
            raise TransportError(f"{self.address} refuses us now: {error}") from error
        with self._guard:
            leads = self._leads(link)
            if leads:
                self.welcome = self._of[link][1]
        if not leads:  # another thread moved to the other host during this greeting
            link.close()
            return self._try_hosts()
        self._was_in = True
        if why is not None:
            _log.warning("%s: connected again", self.address)
        self._why, self._pause_s = None, 0.0
        return link

    def _reach(self) -> Link:
        """Return a connection that is greeted and has the claim. It is to the other host if this
        one does not answer, or lacks the newest version."""
        try:
            return self._claim_at(self._at)
        except (TransportError, StaleError) as error:
            other = 1 - self._at
            if len(self._hosts) == 1 or (self._claim is not None and self._at == 1):
                raise
            try:
                found = self._claim_at(other)
            except (TransportError, StaleError) as second:
                raise TransportError(f"{error}; {second}") from error
            _log.log(
                logging.WARNING if self._claim is None else logging.ERROR,
                "%s: %s. From now on it is %s",
                self._hosts[self._at],
                error,
                self._hosts[other],
            )
            with self._guard:
                self._at = other
            for each in self._taken_idle():  # the host that was left may come back
                each.close()
            return found

    def _claim_at(self, at: int) -> Link:
        """Return a connection to a host that is greeted and has the claim. Raises
        ``TransportError`` too if the host lacks the model's newest version."""
        link, welcome = self._let_in(self._hosts[at])
        self._of[link] = (at, welcome)
        try:
            if self._claim is not None:
                # Before the claim too: it would end the saves of a client of the other host.
                self._require_alone(link, self._claim.model)
                claim = msgspec.structs.replace(self._claim, second=at == 1)
                expect(link.ask(claim), said.Done)
                self._require_alone(link, self._claim.model)
                if self._durable > 1 and not self._was_in:
                    # A host that does not lead the model may lack its newest version, and its
                    # commits would not count.
                    settle = said.Settle(self._claim.model, bytes(16))
                    expect(link.ask(settle, SILENCE_S), said.Done)
        except BaseException:
            link.close()
            raise
        return link

    def note_save(self, token: bytes) -> None:
        """Note the token of a version that was there, or that this client begins to save."""
        self._own.append(token)

    def _require_alone(self, link: Link, model: str) -> None:
        """Raise ``StaleError`` if another client saved the model, of two hosts, while this one was
        cut off: both would go on from different versions."""
        if len(self._hosts) == 1:
            return  # one host refuses the second client
        newest = expect(link.ask(said.Lead(model, bytes(16), 0, "", 0, bytes(16))), said.Led).newest
        if not self._was_in:
            self._own.append(newest)
        elif any(newest) and newest not in self._own:
            raise StaleError(
                f"{link.name}: another client has saved model {model!r} while this one was cut "
                "off, or versions that this one knew are gone there. Nothing that it saves would "
                "count: if another one runs, stop one of the two; else start this one again"
            )

    def _let_in(self, address: Address) -> tuple[Link, Welcome]:
        """Return a connection that is greeted. After a refusal the secret is read again, since it
        may be old."""
        try:
            return dial(address, self._credentials, self.silence_s)
        except UsageError:
            fresh = self._credentials.again()
            if fresh == self._credentials:
                raise
        dialled = dial(address, fresh, self.silence_s)
        self._credentials = fresh
        _log.info("%s: accepted with the new secret in %s", address, fresh.secret_path)
        return dialled


class HostMedium(ReadOnlyMedium):
    """The pool of a tenant on a storage host: this medium loads, and only saves store."""

    def __init__(self, links: Links, pins: HostLocks) -> None:
        self._links: Final = links
        self._pins: Final = pins

    @property
    def info(self) -> MediumInfo:
        """The facts of the medium; its name is the host's address."""
        welcome, name = self._links.welcome, str(self._links.address)
        granularity = welcome.granularity
        return MediumInfo(STORAGE_HOST, name, granularity, welcome.volatile, writable=False)

    @property
    def size(self) -> int:
        """The size of the pool, requested each time: other clients make it grow."""
        return self._links.ask(said.Status(), said.Standing).size

    def load(self, offset: int, target: memoryview) -> None:
        if not target.nbytes:
            return
        with self._links.lend() as link:
            usual_s, link.silence_s = link.silence_s, self._links.answer_s
            try:
                with _reading(link, [offset], [target.nbytes]):
                    link.fill(target.cast("B"))
            finally:
                link.silence_s = usual_s

    def fetch(self, targets: Sources, stop: Stop) -> Digests:
        """Fetch straight into the targets, and return the digests of what arrived."""
        self._pins.check()
        segments, digests = cut(targets)
        if not len(segments):
            return digests
        with self._links.lend() as link, link.under(stop):
            lane = self._links.lane(link)
            by_verbs = np.zeros(len(segments), np.bool_)
            if lane is not None:
                by_verbs = (targets.length >= SMALL)[owners(targets.length)[segments.row]]
            if lane is not None and by_verbs.any():
                try:
                    self._push(link, lane, targets, segments.part(by_verbs), digests, stop)
                finally:
                    if link.connection.state is not Phase.READY:
                        self._links.revoke(link)
            rest = segments.part(~by_verbs)
            if len(rest):
                with _reading(link, rest.offset, rest.length):
                    take(link, rest, digests, stop)
        # The pin may have been lost meanwhile, and the bytes may be another version's (V4).
        self._pins.check()
        return digests

    def _push(
        self,
        link: Link,
        lane: QueuePair,
        targets: Sources,
        segments: Segments,
        digests: Digests,
        stop: Stop,
    ) -> None:
        """Have the host write the targets that are not small, cut into ``segments``. Note the
        digests of what arrived, after comparing them with those of what was sent."""
        big = targets.length >= SMALL
        address, length = targets.address[big], targets.length[big]
        regions: list[Region] = []
        try:
            for start, size in zip(address.tolist(), length.tolist(), strict=True):
                regions.append(lane.domain.register(start, size, remote=True, writable=True))
            handles = pack_pairs(address, [region.remote_key for region in regions])
            ranges = pack_pairs(segments.offset, segments.length)
            message = said.Push(pack_column(length), ranges, handles)
            answer = expect(link.ask(message, patience_s(segments.size)), said.Hashed)
        except BaseException:
            lane.close()
            raise
        finally:
            for region in regions:
                with contextlib.suppress(TransportError):
                    region.close()
        for batch in segments.batches(BATCH):
            best_engine().move(batch, None, digests, stop)
        sent = digest_rows(answer.digests, "pushed")
        if not np.array_equal(sent, digests[np.unique(segments.row)]):
            raise TransportError(
                f"{link.name}: the bytes that arrived are not those that were sent; load again"
            )

    def check(self, sources: Sources, stop: Stop) -> Digests:
        """Return the digests that the host computes; only digests travel."""
        self._pins.check()
        ranges = pack_pairs(sources.extent_offset, sources.extent_length)
        with self._links.lend() as link, link.under(stop):
            message = said.Check(pack_column(sources.length), ranges)
            answer = expect(self._links.ask_for_work(link, message), said.Hashed)
        stop.add(sources.size)
        self._pins.check()
        return digest_rows(answer.digests, "checked")

    def close(self) -> None:
        self._links.close()

    def _refusal(self) -> MediumError:
        name = self._links.address
        return MediumError(errno.EROFS, f"{name}: only saves store to a storage host")


class HostLocks:
    """Pins on a storage host. They live as long as one connection, kept for them alone. When it
    breaks the pins are lost, and a read under them raises an error that may be tried again."""

    def __init__(self, links: Links) -> None:
        self._links: Final = links
        self._guard: Final = threading.RLock()
        self._link: Link | None = None
        self._held: Counter[int] = Counter()

    def acquire_writer(self, timeout_s: float) -> None:
        """Do nothing: the host is the writer."""

    def pin(self, version: int) -> None:
        with self._guard:
            self._say(said.Pin(version))
            self._held[version] += 1

    def unpin(self, version: int) -> None:
        with self._guard:
            self._held[version] -= 1
            if self._held[version] <= 0:
                del self._held[version]
            # A broken connection holds nothing.
            if self._link is not None and not self._link.closed:
                with contextlib.suppress(TransportError):
                    self._say(said.Unpin(version))
            if not self._held and self._link is not None:
                link, self._link = self._link, None
                self._links.give_back(link)

    def pins(self) -> set[int]:
        """Return the versions that this client pins."""
        with self._guard:
            return {version for version, count in self._held.items() if count}

    def check(self) -> None:
        """Raise ``TransportError`` if pins were lost: the bytes may belong to other versions by
        now."""
        with self._guard:
            if self._held and (self._link is None or not self._link.is_alive()):
                if self._link is not None:
                    self._link.close()  # it does not come back
                raise TransportError(
                    f"{self._links.address}: the connection broke while a version was read; load "
                    "again"
                )

    def close(self) -> None:
        with self._guard:
            if self._link is not None:
                self._link.close()
                self._link = None
            self._held.clear()

    def _say(self, message: Said) -> None:
        if self._link is None or self._link.closed:
            if self._held:  # until no reader is left under the lost pins
                raise TransportError(f"{self._links.address}: the connection broke; load again")
            self._link = self._links.borrow()
        try:
            expect(self._link.ask(message), said.Done)
        finally:
            if self._link.closed:
                self._links.revoke(self._link)


def _is_silence(error: BaseException | None) -> bool:
    """Return True if a call waited in vain for an answer."""
    while error is not None:
        if isinstance(error, SilentError | TimeoutError | socket.gaierror):
            return True
        if isinstance(error, OSError) and error.errno == errno.EHOSTUNREACH:
            return True
        error = error.__cause__
    return False


def patience_s(size: int) -> float:
    """Return the seconds in which a host moves ``size`` bytes by verbs, unless it hangs."""
    return SILENCE_S + size / _BYTES_S_MIN


@contextlib.contextmanager
def _reading(link: Link, offsets: npt.ArrayLike, lengths: npt.ArrayLike) -> Iterator[None]:
    """Request bytes of the pool, which the block receives. Raise a refusal as an error."""
    link.send(said.Read(pack_pairs(offsets, lengths)))
    yield
    expect(link.hear(), said.Done)
