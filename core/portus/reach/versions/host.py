"""Saves to a storage host: its pool, and drafts of versions there."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

import numpy as np

from portus.engine.copying.local import BATCH, best_engine
from portus.engine.copying.segments import Crcs, Digests, Sources, Stop, cut, owners, ranges
from portus.engine.format.checksum import DIGEST_SIZE, unit_counts
from portus.engine.pipeline.draft import Labels
from portus.engine.pipeline.plan import Column, Feed, Flags, Previous, Snapshot
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
from portus.reach.protocol import messages as said
from portus.reach.protocol.address import parse
from portus.reach.protocol.messages import (
    Said,
    digest_rows,
    error_of,
    expect,
    pack_column,
    pack_map,
    pack_pairs,
    sum_rows,
)
from portus.reach.protocol.vocabulary import Phase
from portus.reach.transport.dial import Credentials
from portus.reach.transport.host import ROOM_S, HostLocks, HostMedium, Links, patience_s
from portus.reach.transport.regions import (
    HERE,
    SMALL,
    Regions,
    RegisteredRegion,
    StagedError,
)
from portus.reach.transport.stream import Link, give
from portus.reach.transport.verbs import QueuePair, RegisterError
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
        durable: int = 1,
        links: Links | None = None,
    ) -> None:
        """model: the one to save, as the only client; None: to look at the pool. durable: 2 if a
        commit counts only once the replica of the host has it, too. links: if there are connections
        already. Raises ``TransportError`` if no host answers, ``UsageError`` for a wrong secret,
        ``BusyError``."""
        self.links: Final = links or Links(
            parse(address),
            Credentials.from_environment(),
            model=model,
            durable=durable,
        )
        self.durable: Final = durable
        self._untold = ""
        self._known: tuple[bytes, Catalogue | None] = b"", None
        self.newest: tuple[bytes, int] = b"", 0
        """The identity of the pool, and its newest commit, as they were seen last."""
        try:
            pins = HostLocks(self.links)
            super().__init__(HostMedium(self.links, pins), pins)
            if model is not None and self.links.address.second is not None:
                # Not the newest alone: it may be removed, or missing at the second host.
                for entry in self.catalogue().models.get(model, ()):
                    self.links.note_save(entry.info.token)
        except BaseException:
            self.links.close()
            raise

    @property
    def uuid(self) -> bytes:
        """The identity of the host's pool, which a restart replaces if it is in memory."""
        return self.links.welcome.uuid

    def catalogue(self) -> Catalogue:
        """Return the present catalogue. Fetches no unchanged part again."""
        while True:  # ends: in each turn but the last the host was restarted
            before, uuid = self.newest, self.uuid
            known = self._known[1] if self._known[0] == uuid else None
            try:
                found = newest_catalogue(self.medium, uuid, known)
            except CorruptionError:
                if self.uuid == uuid:
                    raise
                continue  # it has another pool now, in its memory
            self._known = uuid, found
            self.heed(before, uuid, found.root.sequence)
            return found

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

    def let_go(self, tokens: Collection[bytes], model: str = "", term: int = 0) -> None:
        """Remove versions, by their tokens, and ignore missing ones. term: the one in which this
        process, a host, leads ``model``."""
        if tokens:
            request = said.Retire(b"".join(tokens), model, term)
            self.links.ask(request, said.Done, self.links.silence_s)

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


class HostDraft:
    """A version in the making on a storage host, over a connection of its own.

    The host pulls, and reports the digests of the bytes that arrived. The draft compares them with
    its own, of the same bytes on their way out. The confirmation carries these: the host compares
    too.

    With verbs the host reads the storages itself, and the draft hashes them meanwhile. Small ones,
    and bytes that others may write in between, go over the socket, which hashes each piece as it is
    sent. A save
    that ends before its commit first revokes the host's access: it closes the queue pair, and then
    tells the host.
    """

    def __init__(
        self, pool: HostPool, snapshot: Snapshot, *, term: int = 0, commit: int = 0
    ) -> None:
        """term: of a host that copies a version there, the one in which it leads the model, and its
        ``commit`` in the pool of that host; 0: a client saves."""
        self._pool: Final = pool
        self._lead: Final = term, commit
        self._lengths: Final = snapshot.length
        self._late: Final = snapshot.late
        self._snapshot: Snapshot | None = snapshot
        self._counts: Final = unit_counts(snapshot.length)
        self._first: Final = np.cumsum(self._counts) - self._counts
        self._digests: Final[Digests] = np.zeros((int(self._counts.sum()), DIGEST_SIZE), np.uint8)
        self._crcs: Final[Crcs] = np.zeros(len(self._digests), np.uint32)
        self._stored: Final[Flags] = np.zeros(len(snapshot.length), np.bool_)
        self._guard: Final = threading.Lock()
        self._link: Link | None = None
        self._reached: _HostAccess | None = None
        self._bounced = 0
        self._has_committed = False
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
        for some, is_direct in self._ways(indices, stop):
            moved = Sources.in_memory(address[some], self._lengths[indices[some]])
            work = partial(_move, moved, stop)
            self._offer(indices[some], work, stop, (), is_direct=is_direct)
        return self._digests_of(indices, crcs)

    def copy_fed(
        self, indices: Column, feeds: Sequence[Feed], stop: Stop, crcs: Crcs | None = None
    ) -> Digests:
        """Copy storages that have no addresses, likewise."""
        for some, is_direct in self._ways(indices, stop):
            own = [feeds[number] for number in some.tolist()]
            work = partial(_move_fed, own, stop)
            self._offer(indices[some], work, stop, own, is_direct=is_direct)
        return self._digests_of(indices, crcs)

    def share(self, before: Previous, indices: Column, address: Column, stop: Stop) -> bool:
        link = self._ready(stop)
        assert isinstance(before, VersionRecord), "a pool shares with its own versions"
        token = before.info.token
        message = said.Share(token, pack_column(indices))
        with link.under(stop):
            answer = expect(self._pool.links.ask_for_work(link, message), said.Done)
        if answer.granted:
            self._note(indices, share(before, indices).digests)
        return answer.granted

    def read_back(self, storage: Column, offset: Column, length: Column) -> None:
        """Do nothing: the host has them."""

    def commit(self, labels: Labels, gone: Collection[bytes] = ()) -> VersionRecord:
        """See ``Draft``. gone: tokens of more versions to remove with the commit."""
        link = self._ready(Stop())
        confirm = said.Confirm(
            digests=self._digests.tobytes(),
            contents=labels.contents,
            keep=pack_map(asdict(labels.keep) if labels.keep else {}),
            inexact=labels.inexact,
            metrics=pack_map(labels.metrics),
            gone=b"".join(gone),
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
        self._pool.newest = self._pool.links.welcome.uuid, record.info.commit
        self._has_committed = True
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
        if not self._has_committed and not link.closed:
            if reached is not None:
                # The queue pair first: only closing it ends the access of the host's card
                # (decision 0023).
                reached.lane.close()
            if link.connection.state is not Phase.READY or self._pool.links.hangs:
                # The end of the connection abandons, too; the next save would wait for an answer.
                link.close()
            else:
                with contextlib.suppress(PortusError):
                    link.ask(said.Abandon(), _ABANDON_S)
        self._pool.links.give_back(link)
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
                term, commit = self._lead
                begin = said.Begin(
                    model=snapshot.model,
                    step=snapshot.step,
                    token=snapshot.token,
                    lengths=pack_column(snapshot.length),
                    handles=b"" if reached is None else pack_pairs(reached.address, reached.key),
                    term=term,
                    commit=commit,
                )
                links.note_save(snapshot.token)
                expect(link.ask(begin, links.answer_s), said.Done)
        except BaseException:
            links.revoke(link)
            if reached is not None:
                reached.regions.give_back(reached.taken)
            raise
        self._link, self._reached, self._snapshot = link, reached, None
        return link

    def _units(self, indices: Column) -> Column:
        return ranges(self._first[indices], self._counts[indices])

    def _digests_of(self, indices: Column, crcs: Crcs | None) -> Digests:
        """Return the digests of stored storages, and fill ``crcs`` with their CRC32s."""
        if crcs is not None:
            crcs[:] = self._crcs[self._units(indices)]
        return self._digests[self._units(indices)]

    def _note(self, indices: Column, digests: Digests) -> None:
        self._digests[self._units(indices)] = digests
        self._stored[indices] = True

    def _ways(self, indices: Column, stop: Stop) -> Iterator[tuple[Column, bool]]:
        """Yield the positions of storages that are not stored yet, first those that the host can
        read directly, and whether it can."""
        self._ready(stop)
        direct = np.zeros(len(indices), np.bool_)
        if self._reached is not None:
            direct = self._reached.key[indices] != 0
        for is_direct in (True, False):
            some = np.flatnonzero((direct == is_direct) & ~self._stored[indices])
            if len(some):
                yield some, is_direct

    def _offer(
        self,
        indices: Column,
        work: Callable[[Link | None], Digests],
        stop: Stop,
        feeds: Sequence[Feed],
        *,
        is_direct: bool,
    ) -> None:
        """Have the host pull storages. work: sends their bytes, or without a link only hashes them;
        returns their digests. feeds: of those on devices. is_direct: the host can read them."""
        link = self._ready(stop)
        reached = self._reached if is_direct else None
        lengths = self._lengths[indices]
        size = int(lengths.sum())
        digests = cut(Sources.in_memory(np.zeros(len(indices), np.int64), lengths))[1]
        try:
            with link.under(stop):
                if reached is None:
                    answer = link.ask(said.Offer(pack_column(indices)))
                else:
                    for feed in feeds:
                        feed.await_device()
                    link.send(said.Offer(pack_column(indices)))
                    # Hashed here while the card of the host reads the same bytes.
                    digests = work(None)
                    answer = link.hear(patience_s(size))
                if isinstance(answer, said.Pull):
                    digests = work(link)
                    answer = link.hear()
                if not (isinstance(answer, said.Refused) and answer.fault is said.Fault.FULL):
                    self._check(answer, indices, digests, feeds, reached)
        except BaseException:
            if self._reached is not None:
                # End all access of the host, and keep no registered memory for later saves.
                self._pool.links.revoke(link)
                self._reached.regions.forget()
            raise
        hashed = expect(answer, said.Hashed)  # full: it may be offered again
        self._bounced += min(size, hashed.bounced)
        self._crcs[self._units(indices)] = sum_rows(hashed.crcs, len(digests))
        self._note(indices, digests)

    def _check(
        self,
        answer: Said,
        indices: Column,
        digests: Digests,
        feeds: Sequence[Feed],
        reached: _HostAccess | None,
    ) -> None:
        """Raise the error of an unexpected answer. Have the next save avoid a path to a device that
        delivers wrong bytes, or none, and send other storages over the socket if no fence guards
        them, and they changed between the pull and the hash."""
        if isinstance(answer, said.Hashed):
            arrived = digest_rows(answer.digests, "pulled")
            if np.array_equal(arrived, digests):
                return
            wrong: PortusError = TransportError(
                f"{self.name}: the bytes that arrived are not those that were sent; this transfer "
                "is discarded"
            )
            if reached is not None and not feeds and arrived.shape == digests.shape:
                changed = owners(self._lengths[indices])[np.any(digests != arrived, axis=1)]
                storages = indices[np.unique(changed)]
                reached.regions.avoid(reached.address[storages[~self._late[storages]]].tolist())
        else:
            wrong = error_of(answer)
        if reached is not None and feeds and isinstance(wrong, TransportError | UsageError):
            reached.regions.distrust({feed.there.device for feed in feeds}, str(wrong))
        raise wrong

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
                has_ended = not self._pool.standing().saves
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
    """The host's access to the storages of a save: a row for each, its key 0 if there is none."""

    lane: QueuePair
    regions: Regions
    taken: Sequence[RegisteredRegion]
    address: Column
    key: Column


def _reach(links: Links, link: Link, snapshot: Snapshot) -> _HostAccess | None:
    """Register the storages of a save, but small ones, staged ones, and those that others may write
    meanwhile; None: all go over the socket. Raises ``TransportError``."""
    lane, regions = links.lane(link), links.verbs
    if lane is None or regions is None or not len(snapshot.owners):
        return None
    owners, place = list(snapshot.owners), snapshot.address.copy()
    lasting, device = snapshot.late.copy(), np.full(len(owners), HERE)
    for index, feed in snapshot.feeds.items():
        there = feed.there
        lasting[index] &= there.owner is owners[index]  # else it is a copy, for this save
        owners[index], place[index], device[index] = there.owner, there.address, there.device
    able = (snapshot.length >= SMALL) & (place > 0)
    # These changed between pull and hash before; the socket hashes the sent bytes.
    able &= ~np.isin(place, regions.unsteady())
    # Another process may write these between the pull and the hash.
    able[snapshot.exposed] = False
    while True:  # ends: each turn stages another device
        some = np.flatnonzero(able & ~np.isin(device, regions.staged_devices()))
        chosen = [owners[index] for index in some.tolist()]
        try:
            taken = regions.take(
                chosen, place[some], snapshot.length[some], lasting[some], device[some]
            )
            break
        except StagedError:
            continue
        except RegisterError as error:
            links.do_without(error)
            return None
    address, key = np.zeros(len(able), np.int64), np.zeros(len(able), np.int64)
    address[some] = [known.region.start for known in taken]
    key[some] = [known.region.remote_key for known in taken]
    return _HostAccess(lane, regions, taken, address, key)


def _move(moved: Sources, stop: Stop, link: Link | None) -> Digests:
    """Send sources over ``link``, or only hash them if it is None, and return their digests."""
    if link is not None:
        return give(link, moved, stop)
    segments, digests = cut(moved)
    for batch in segments.batches(BATCH):
        best_engine().move(batch, None, digests, stop)
    return digests


def _move_fed(feeds: Sequence[Feed], stop: Stop, link: Link | None) -> Digests:
    """Send or hash what is on devices, a unit at a time; see ``_move``."""
    found = []
    for feed in feeds:
        with feed.units() as units:
            for address, length in units:
                moved = Sources.in_memory(np.array([address]), np.array([length]))
                found.append(_move(moved, stop, link))
    return np.concatenate(found)
