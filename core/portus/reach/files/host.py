"""Saves to a storage host: its pool, and drafts of versions there."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from portus.engine.copying.local import best_engine
from portus.engine.copying.segments import Crcs, Digests, Sources, Stop, cut, owners, ranges
from portus.engine.format.checksum import DIGEST_SIZE, unit_counts
from portus.engine.pipeline.draft import Labels
from portus.engine.pipeline.plan import Column, Feed, Flags, Previous, Snapshot
from portus.engine.spec import VersionInfo
from portus.errors import (
    CorruptionError,
    MediumError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
)
from portus.reach.index.catalogue import Catalogue, newest_catalogue
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionRecord, decode_version
from portus.reach.index.roots import Superblock, read_superblock
from portus.reach.mirror.commit_numbers import REPLICA
from portus.reach.mirror.objects import LOG, prefix_of
from portus.reach.protocol import messages as said
from portus.reach.protocol.address import parse
from portus.reach.protocol.messages import (
    Said,
    digest_rows,
    pack_column,
    pack_map,
    pack_pairs,
    sum_rows,
)
from portus.reach.protocol.vocabulary import Phase
from portus.reach.transport.dial import Credentials, error_of, expect
from portus.reach.transport.host import ROOM_S, HostLocks, HostMedium, Links, patience_s
from portus.reach.transport.regions import (
    HERE,
    ClientLane,
    Parts,
    Regions,
    RegisteredRegion,
    StagedError,
    gather,
)
from portus.reach.transport.stream import Link, give
from portus.reach.transport.verbs import RegisterError
from portus.reach.versions.parts import share

_log: Final = logging.getLogger("portus")

_OUTCOME_S: Final = 5.0
"""The longest that a save asks for its outcome after its connection broke at the commit."""

_ASK_AGAIN_S: Final = 0.1
_ABANDON_S: Final = 5.0


class HostPool(PoolReader):
    """A tenant's pool on a storage host. It is read as any pool is; drafts make its versions."""

    def __init__(
        self,
        address: str,
        model: str | None = None,
        *,
        claim_s: float | None = None,
        durable: int = 1,
    ) -> None:
        """model: the one to save, as the only client; None: to look at the pool. claim_s: the
        longest wait for another client to release the model; None: the host's. durable: 2 if a
        commit counts only once the replica of the host has it, too. Raises ``TransportError`` if no
        host answers, ``UsageError`` for a wrong secret, ``BusyError``."""
        self.links: Final = Links(
            parse(address),
            Credentials.from_environment(),
            model=model,
            claim_s=claim_s,
            log="" if model is None else f"{REPLICA}/{prefix_of(model)}{LOG}",
            durable=durable,
        )
        self.durable: Final = durable
        self._untold = ""
        self._known: tuple[bytes, Catalogue | None] = b"", None
        self.newest: tuple[bytes, int] = b"", 0
        """The identity of the pool, and its newest commit, as they were seen last."""
        self._committed: tuple[bytes, bytes] = b"", b""
        try:
            pins = HostLocks(self.links)
            super().__init__(HostMedium(self.links, pins), pins)
        except BaseException:
            self.links.close()
            raise

    @property
    def superblock(self) -> Superblock:
        """The superblock of the host's pool, which a restart replaces if it is in memory."""
        if self._superblock.uuid != self.links.welcome.uuid:
            self._superblock = read_superblock(self.medium)
        return self._superblock

    def catalogue(self) -> Catalogue:
        """Return the present catalogue. Fetches no unchanged part again."""
        while True:  # ends: in each turn but the last the host was restarted
            before, uuid = self.newest, self.superblock.uuid
            known = self._known[1] if self._known[0] == uuid else None
            try:
                found = newest_catalogue(self.medium, uuid, known)
            except CorruptionError:
                if self.superblock.uuid == uuid:
                    raise
                continue  # it has another pool now, in its memory
            self._known = uuid, found
            self.heed(before, uuid, found.root.sequence)
            return found

    def note_commit(self, info: VersionInfo) -> None:
        """Note that the host reported a commit."""
        self.newest = self.links.welcome.uuid, info.commit
        self._committed = self.links.welcome.uuid, info.token

    def has_committed(self, token: bytes) -> bool:
        """Return whether the host's present pool reported the commit of that version last: in
        another pool the version's parts may be elsewhere."""
        return self._committed == (self.links.welcome.uuid, token)

    def heed(self, before: tuple[bytes, int], uuid: bytes, commit: int) -> None:
        """Log an error if the host has another pool than ``before``, or an older history of it."""
        self.newest = uuid, commit
        where = f"{self.links.address}"
        if self.links.address.second is not None:
            return  # the second of two hosts has another pool, and that was logged
        if before[0] not in (b"", uuid):
            _log.error(
                "%s serves a different pool than before: %s, not %s. It lacks the versions "
                "saved until now; was the pool of the host replaced, or its memory lost?",
                *(where, uuid.hex(), before[0].hex()),
            )
        elif commit < before[1]:
            _log.error(
                "%s has an older copy of its pool: its newest commit is %d, and it had "
                "reported %d. It lacks the versions saved since; was it replaced by a backup?",
                *(where, commit, before[1]),
            )

    def let_go(self, tokens: Collection[bytes]) -> None:
        """Remove versions, by their tokens, and ignore missing ones."""
        _let_go(self.links, tokens)

    def standing(self) -> said.Standing:
        """Return the state of the pool, in bytes."""
        return self.links.ask(said.Status(), said.Standing)

    def give_back(self) -> int:
        """Have the host give unused space back to its file system; return the number of bytes.
        Trainers may continue to save."""
        before = self.standing().taken
        self.links.ask(said.GiveBack(), said.Done, ROOM_S)
        return max(0, before - self.standing().taken)

    def kept_bytes(self, but: Collection[int] = ()) -> int:
        """Return the kept bytes without ``but``, as the host counts them; running saves count."""
        now = self.standing()
        kept = now.size - now.free - now.holes
        return kept - (super().kept_bytes() - super().kept_bytes(but)) if but else kept

    def note_failure(self, text: str) -> None:
        """Have the host record which save failed: now, or once it answers again. Raises nothing."""
        self._untold = text[: said.TEXT_SIZE_MAX]
        self.tell()

    def tell(self) -> None:
        """Send the host the failure that it has not recorded yet. Raises nothing."""
        if self._untold:
            with contextlib.suppress(PortusError):
                self.links.ask(said.Note(self._untold), said.Done)
                self._untold = ""

    def draft(self, snapshot: Snapshot) -> HostDraft:
        """Return the draft for a save of ``snapshot``."""
        return HostDraft(self, snapshot)

    def record_of(self, token: bytes) -> VersionRecord | None:
        """Return the record of the version of that token; None if it is not committed."""
        entry = self.catalogue().of_token(token)
        if entry is None:
            return None
        with self.pin(entry.info.id) as current:
            return self.record(current)


def let_go_at(address: str, tokens: Collection[bytes]) -> None:
    """Remove versions from the storage host at an address, as ``HostPool.let_go`` does."""
    with contextlib.closing(Links(parse(address), Credentials.from_environment())) as links:
        _let_go(links, tokens)


def _let_go(links: Links, tokens: Collection[bytes]) -> None:
    if tokens:
        links.ask(said.Retire(b"".join(tokens)), said.Done, links.silence_s)


class HostDraft:
    """A version in the making on a storage host, over a connection of its own.

    The host pulls, and reports the digests of the bytes that arrived. The draft compares them with
    its own, of the same bytes on their way out. The confirmation carries these: the host compares
    too.

    With verbs the host reads the storages itself, and the draft hashes them meanwhile. Bytes that
    others may write in between go over the socket, which hashes each piece as it is sent. A save
    that ends before its commit first revokes the host's access: it closes the queue pair, and then
    tells the host.
    """

    def __init__(self, pool: HostPool, snapshot: Snapshot) -> None:
        self._pool: Final = pool
        self._lengths: Final = snapshot.length
        self._late: Final = snapshot.late
        self._snapshot: Snapshot | None = snapshot
        self._stored: Final[list[tuple[Column, Digests]]] = []
        self._guard: Final = threading.Lock()
        self._link: Link | None = None
        self._reached: _HostAccess | None = None
        self._bounced = 0
        self._over = False

    @property
    def name(self) -> str:
        return str(self._pool.links.address)

    @property
    def bounced_bytes(self) -> int:
        return self._bounced

    @property
    def kept_bytes(self) -> int:
        """Return 0: equal storages are shared."""
        return 0

    def copy(
        self, indices: Column, address: Column, stop: Stop, crcs: Crcs | None = None
    ) -> Digests:
        """See ``Draft``. crcs: a row for each unit, filled with the CRC32 of the stored bytes."""
        moved = Sources.in_memory(address, self._lengths[indices])

        def send(link: Link) -> Digests:
            segments, digests = cut(moved)
            give(link, segments, digests, stop)
            return digests

        reached = self._reach_all(indices, stop)
        parts = None
        if reached is not None:
            parts = Parts.of(moved, reached.gathered[indices], reached.address[indices])
        return self._offer(indices, send, stop, crcs, parts)

    def copy_fed(
        self, indices: Column, feeds: Sequence[Feed], stop: Stop, crcs: Crcs | None = None
    ) -> Digests:
        """Copy storages that have no addresses, likewise."""

        def send(link: Link) -> Digests:
            found = []
            for feed in feeds:
                with feed.units() as units:
                    for address, length in units:
                        segments, digests = cut(
                            Sources.in_memory(np.array([address]), np.array([length]))
                        )
                        give(link, segments, digests, stop)
                        found.append(digests)
            return np.concatenate(found)

        reached = self._reach_all(indices, stop)
        parts = None
        if reached is not None:
            gathered, place = reached.gathered[indices], reached.address[indices]
            parts = _DeviceParts(feeds, self._lengths[indices], gathered, place)
        return self._offer(indices, send, stop, crcs, parts)

    def share(self, before: Previous, indices: Column, address: Column, stop: Stop) -> bool:
        link = self._ready(stop)
        assert isinstance(before, VersionRecord), "a pool shares with its own versions"
        token = before.info.token
        message = said.Share(token, pack_column(indices))
        with link.under(stop):
            answer = expect(self._pool.links.ask_for_work(link, message), said.Shared)
        if answer.same:
            self._stored.append((indices, share(before, indices).digests))
        return answer.same

    def read_back(self, storage: Column, offset: Column, length: Column) -> None:
        """Do nothing: the host has them."""

    def commit(self, labels: Labels) -> VersionRecord:
        link = self._ready(Stop())
        confirm = said.Confirm(
            digests=self._digests().tobytes(),
            contents=labels.contents,
            keep=pack_map(asdict(labels.keep) if labels.keep else {}),
            inexact=labels.inexact,
            metrics=pack_map(labels.metrics),
        )
        # Noted first: after a break the connection may be to another pool.
        uuid = asked = self._pool.links.uuid_of(link)
        newest = self._pool.newest
        try:
            answer = self._pool.links.ask_for_work(link, confirm)
        except TransportError as error:
            # It may have broken before the commit or after it; only the pool shows which.
            record = self._outcome(labels.token, error)
            uuid = self._pool.links.welcome.uuid  # a replica has it in its own pool
        else:
            record = decode_version(memoryview(expect(answer, said.Committed).record))
            self._pool.heed(newest, uuid, record.info.commit - 1)
        # Frames have digests; the host's memory, where it makes the record, has none (V4).
        self._refuse_other(record, labels, confirm)
        if self._pool.durable > 1 and uuid == asked:
            self._tell_replica(link, labels)
        self._pool.note_commit(record.info)
        self.release()
        self._pool.tell()
        return record

    def _tell_replica(self, link: Link, labels: Labels) -> None:
        """Return when the replica has the version too; else raise: the save counts as failed."""
        try:
            settle = said.Settle(labels.model, labels.token)
            expect(self._pool.links.ask_for_work(link, settle), said.Done)
        except PortusError as error:
            raise TransportError(
                f"{self.name}: step {labels.step} of model {labels.model!r} is on one host, and "
                f"with durable=2 that counts as failed: {error}"
            ) from error

    def release(self) -> None:
        with self._guard:
            link, self._link, self._over = self._link, None, True
            reached, self._reached, self._snapshot = self._reached, None, None
        if link is None:
            return
        if link.connection.state is Phase.SAVING and not link.closed:
            if reached is not None:
                # The queue pair first: only closing it ends the access of the host's card
                # (decision 0023).
                reached.lane.close()
            if not self._pool.links.hangs:  # else the next save would wait for the answer, too
                with contextlib.suppress(PortusError):
                    link.ask(said.Abandon(), _ABANDON_S)
        self._pool.links.give_back(link)  # in other states it is closed: that abandons, too
        if reached is not None:
            reached.regions.give_back(reached.taken)

    def _ready(self, stop: Stop) -> Link:
        """Return the connection, with a save begun on it."""
        if self._link is not None:
            return self._link
        snapshot = self._snapshot
        if self._over or snapshot is None:
            raise TransportError(f"{self.name}: this save has ended")
        if len(self._lengths) > said.STORAGES_MAX:
            # Raised here: the host would end the connection, and each later save would try again.
            raise UsageError(
                f"{self.name}: step {snapshot.step} of model {snapshot.model!r} has "
                f"{len(self._lengths)} storages; a version on a storage host has "
                f"{said.STORAGES_MAX} at most"
            )
        links = self._pool.links
        link, reached = links.borrow(), None
        try:
            with link.under(stop):
                reached = _reach(links, link, snapshot)
                begin = said.Begin(
                    model=snapshot.model,
                    step=snapshot.step,
                    token=snapshot.token,
                    lengths=pack_column(snapshot.length),
                    handles=b"" if reached is None else pack_pairs(reached.address, reached.key),
                )
                expect(link.ask(begin, links.answer_s), said.Done)
        except BaseException:
            links.revoke(link)
            if reached is not None:
                reached.regions.give_back(reached.taken)
            raise
        self._link, self._reached, self._snapshot = link, reached, None
        return link

    def _reach_all(self, indices: Column, stop: Stop) -> _HostAccess | None:
        """Return the host's access to these storages; None if it cannot reach all that have
        bytes."""
        self._ready(stop)
        reached = self._reached
        if reached is None or ((reached.key[indices] == 0) & (self._lengths[indices] > 0)).any():
            return None
        return reached

    def _offer(
        self,
        indices: Column,
        send: Callable[[Link], Digests],
        stop: Stop,
        crcs: Crcs | None,
        parts: Parts | _DeviceParts | None,
    ) -> Digests:
        """Have the host pull storages: by ``send``, or (``parts``) by its own reads."""
        link = self._ready(stop)
        size = int(self._lengths[indices].sum())
        try:
            with link.under(stop):
                digests, answer = self._pull(link, indices, send, stop, parts)
                wrong = None if isinstance(answer, said.Full) else self._wrong(answer, digests)
                if wrong is not None and isinstance(parts, _DeviceParts):
                    self._distrust(parts, wrong)
                elif isinstance(answer, said.Hashed) and parts is not None:
                    self._avoid(indices, digests, digest_rows(answer.digests, "pulled"))
                if wrong is not None:
                    raise wrong
        except BaseException:
            if parts is not None:
                self._revoke(link)
            raise
        answer = expect(answer, said.Hashed)  # full: it may be offered again
        if crcs is not None:
            crcs[:] = sum_rows(answer.crcs, len(crcs))
        small = 0 if parts is None else parts.gathered_bytes
        self._bounced += min(size, answer.bounced + small)
        self._stored.append((indices, digests))
        return digests

    def _pull(
        self,
        link: Link,
        indices: Column,
        send: Callable[[Link], Digests],
        stop: Stop,
        parts: Parts | _DeviceParts | None,
    ) -> tuple[Digests, Said]:
        """Return the digests of the bytes here, and the last answer."""
        offer = said.Offer(pack_column(indices))
        lengths = self._lengths[indices]
        if parts is None:
            answer = link.ask(offer)
        else:
            parts.gather(stop)
            link.send(offer)
            # Hashed here while the card of the host reads the same bytes.
            parts.hash_big(stop)
            answer = link.hear(patience_s(int(lengths.sum())))
        if isinstance(answer, said.Pull):
            digests = send(link)
            answer = link.hear()
        elif parts is not None:
            digests = parts.digests
        else:
            digests = cut(Sources.in_memory(np.zeros(len(indices), np.int64), lengths))[1]
        return digests, answer

    def _wrong(self, answer: Said, digests: Digests) -> PortusError | None:
        """Return the error of an unexpected answer; None for a good one."""
        if not isinstance(answer, said.Hashed):
            return error_of(answer)
        if np.array_equal(digest_rows(answer.digests, "pulled"), digests):
            return None
        return TransportError(
            f"{self.name}: the bytes that arrived are not those that were sent; this transfer "
            "is discarded"
        )

    def _distrust(self, parts: _DeviceParts, wrong: PortusError) -> None:
        """Have the next save avoid a path that delivers wrong bytes, or none."""
        if self._reached is not None and isinstance(wrong, TransportError | UsageError):
            self._reached.regions.distrust(parts.devices, str(wrong))

    def _avoid(self, indices: Column, sent: Digests, arrived: Digests) -> None:
        """Send storages over the socket from the next save on, if no fence guards them and they
        changed between the pull and the hash."""
        reached = self._reached
        if reached is not None and sent.shape == arrived.shape:
            changed = np.any(sent != arrived, axis=1)
            storages = indices[np.unique(owners(self._lengths[indices])[changed])]
            reached.regions.avoid(reached.address[storages[~self._late[storages]]].tolist())

    def _revoke(self, link: Link) -> None:
        """End all access of the host, and keep no registered memory for later saves."""
        self._pool.links.revoke(link)
        reached = self._reached
        if reached is not None:
            reached.regions.forget()

    def _digests(self) -> Digests:
        """Return the digests of the units of all storages, in order."""
        counts = unit_counts(self._lengths)
        first = np.cumsum(counts) - counts
        units = np.zeros((int(counts.sum()), 16), np.uint8)
        for indices, digests in self._stored:
            units[ranges(first[indices], counts[indices])] = digests
        return units

    def _refuse_other(self, record: VersionRecord, labels: Labels, confirm: said.Confirm) -> None:
        """Remove the version that the host committed, and raise ``CorruptionError``, if it differs
        from this one: it would count as the newest."""
        info = record.info
        compared = {
            "model": (labels.model, info.model),
            "step": (labels.step, info.step),
            "token": (labels.token, info.token),
            "inexact": (labels.inexact, info.inexact),
            "lengths": (self._lengths.tolist(), record.length.tolist()),
            "digests": (confirm.digests, record.units.tobytes()),
            "metrics": (labels.metrics, info.metrics),
            "contents": (labels.contents, record.contents),
        }
        wrong = [what for what, (meant, found) in compared.items() if meant != found]
        if not wrong:
            return
        with contextlib.suppress(PortusError):
            self._pool.let_go([info.token])
        meant, found = compared[wrong[0]]
        raise CorruptionError(
            f"{self.name}: the storage host committed another {wrong[0]} for model "
            f"{labels.model!r} step {labels.step}: expected {meant!r:.80}, found "
            f"{found!r:.80}; that version does not count, and was removed. Bytes changed "
            "between this machine and the host: save again, and check the memory of both "
            "machines"
        )

    def _outcome(self, token: bytes, cause: TransportError) -> VersionRecord:
        """Return the record of a version if its commit, where the connection broke, took place."""
        until_s = time.monotonic() + _OUTCOME_S
        while time.monotonic() < until_s:
            try:
                # Asked first: a commit between the two is found.
                has_ended = not self._pool.locks.has_writer()
                record = self._pool.record_of(token)
                if record is not None:
                    return record
                if has_ended:
                    break
            except (TransportError, StaleError, CorruptionError, MediumError):
                pass  # the host may be restarting
            time.sleep(_ASK_AGAIN_S)
        raise TransportError(
            f"{cause}: the connection broke while the version was committed. It may exist: "
            f"check with `portus ls {self.name}`"
        ) from cause


@dataclass(frozen=True, slots=True)
class _HostAccess:
    """The host's access to the storages of a save: a row for each. ``gathered``: its address is in
    the memory of the lane."""

    lane: ClientLane
    regions: Regions
    taken: Sequence[RegisteredRegion]
    gathered: Flags
    address: Column
    key: Column


def _reach(links: Links, link: Link, snapshot: Snapshot) -> _HostAccess | None:
    """Register the storages of a save; None: they go over the socket. Raises ``TransportError``."""
    lane, regions = links.lane(link), links.verbs
    if lane is None or regions is None or not len(snapshot.owners):
        return None
    while True:
        try:
            return _register(snapshot, lane, regions)
        except StagedError:
            continue  # without that device
        except RegisterError as error:
            links.do_without(error)
            return None


def _register(snapshot: Snapshot, lane: ClientLane, regions: Regions) -> _HostAccess:
    """Register all storages but staged ones, and those that others may write meanwhile. Raises
    ``RegisterError``."""
    owners, place = list(snapshot.owners), snapshot.address.copy()
    lasting, device = snapshot.late.copy(), np.full(len(owners), HERE)
    for index, feed in snapshot.feeds.items():
        there = feed.there
        lasting[index] &= there.owner is owners[index]  # else it is a copy, for this save
        owners[index], place[index], device[index] = there.owner, there.address, there.device
    found = (place > 0) & ~np.isin(device, regions.staged_devices())
    # These changed between pull and hash before; the socket hashes the sent bytes.
    found &= ~np.isin(place, regions.unsteady())
    # Another process may write these between the pull and the hash.
    found[snapshot.exposed] = False
    small, offsets, size = gather(snapshot.length, found, snapshot.late)
    big = np.flatnonzero(found & ~small)
    address, key = np.zeros(len(found), np.int64), np.zeros(len(found), np.int64)
    if size:
        room = lane.room(size)
        address[small], key[small] = room.start + offsets[small], room.remote_key
    taken = regions.take(
        [owners[index] for index in big.tolist()],
        place[big],
        snapshot.length[big],
        lasting[big],
        device[big],
    )
    address[big] = [known.region.start for known in taken]
    key[big] = [known.region.remote_key for known in taken]
    return _HostAccess(lane, regions, taken, small, address, key)


class _DeviceParts:
    """Parts of storages on devices, like ``Parts``. Fetches them, to gather the small ones, and to
    hash the large ones, which the host reads itself."""

    def __init__(
        self, feeds: Sequence[Feed], lengths: Column, is_small: Flags, place: Column
    ) -> None:
        self.devices: Final = {feed.there.device for feed in feeds}
        self.gathered_bytes: Final = int(lengths[is_small].sum())
        self.digests: Final[Digests] = np.zeros(
            (int(unit_counts(lengths).sum()), DIGEST_SIZE), np.uint8
        )
        self._first: Final = np.cumsum(unit_counts(lengths)) - unit_counts(lengths)
        self._feeds: Final = feeds
        self._is_small: Final = is_small
        self._place: Final = place

    def gather(self, stop: Stop) -> None:
        """Copy the small storages to their places, and note their digests. At the return the host
        can read all of them."""
        for feed in self._feeds:
            feed.await_device()
        for number in np.flatnonzero(self._is_small).tolist():
            self._fetch(number, self._place[number : number + 1], stop)

    def hash_big(self, stop: Stop) -> None:
        """Note the digests of the large storages."""
        for number in np.flatnonzero(~self._is_small).tolist():
            self._fetch(number, None, stop)

    def _fetch(self, number: int, place: Column | None, stop: Stop) -> None:
        with self._feeds[number].units() as units:
            for row, (address, length) in enumerate(units, int(self._first[number])):
                segments, digests = cut(Sources.in_memory(np.array([address]), np.array([length])))
                best_engine().move(segments, place, digests, stop)
                self.digests[row : row + 1] = digests
