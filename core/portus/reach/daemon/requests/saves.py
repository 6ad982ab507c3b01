"""Saves: what a client says from its claim of a model to the commit of a version.

A save lives as long as its connection, and its only trace on the medium is the commit. Whatever
ends the connection before that (a client that was killed, a link that was cut, an abandonment)
gives the space back, and nothing else happened. The host believes nothing of what a client says
about places: it places the bytes itself, and hashes what arrived; the client's own digests must
be the same, or there is no version.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Final

import msgspec
import numpy as np

from portus.engine.copying.local import check
from portus.engine.copying.segments import Column, Digests, Sources, cut
from portus.engine.media.file_calls import OUT_OF_SPACE
from portus.engine.pipeline.draft import Labels
from portus.engine.settings.keep import Keep, check_metrics
from portus.errors import CorruptionError, MediumError, UsageError
from portus.reach.daemon.house import refusal_of
from portus.reach.daemon.requests.guest import STORAGE_MOVED, Guest, is_reached
from portus.reach.format.layout import HEADER
from portus.reach.index.file_table import decode_table
from portus.reach.index.records import Pointer, VersionRecord, encode_version
from portus.reach.protocol import messages as said
from portus.reach.protocol.messages import Said, column, handles, unpack_map
from portus.reach.transport.one_sided import RemoteStorages
from portus.reach.transport.stream import UnexpectedMessageError, drain, take_into
from portus.reach.transport.verbs import Endpoint
from portus.reach.versions.parts import sources
from portus.reach.versions.pool_draft import PoolDraft

VALUES_MAX: Final = 1 << 24
"""Values in contents, at most: each takes a hundred bytes while it is looked at."""

CLAIMS_MAX: Final = 64
"""Models that one connection claims, at most."""

# Bytes of memory that things take, at most; measured.
_DRAFT: Final = 4 << 10
_PART: Final = 4 << 10
"""Memory of a save, and of each request within it."""
_STORAGE: Final = 160
_STORAGE_BEGUN: Final = 128
_STORAGE_COMMITTED: Final = 512
"""Memory of each storage of a save: as long as it is under way; while it begins; while it is
committed."""
_VALUE: Final = 64
_DICT: Final = 1024
_BYTE: Final = 8
"""Memory of each value, each dict, which may be a file, and each byte of contents: while they are
looked at."""


class SaveRequests:
    """Answers what a client says of its saves, of which one is under way at a time."""

    def __init__(self, guest: Guest) -> None:
        self._guest: Final = guest
        self._claimed: Final[list[str]] = []
        self._draft: _Draft | None = None

    @property
    def claims(self) -> tuple[str, ...]:
        """The models that it claimed. From any thread."""
        return tuple(self._claimed)

    @property
    def saving(self) -> str:
        """MODEL@STEP, while a save is under way; else empty. From any thread."""
        draft = self._draft
        return "" if draft is None else f"{draft.begin.model}@{draft.begin.step}"

    def disclaim(self, *, goodbye: bool) -> bool:
        """Claim nothing any more. goodbye: the client ends as it should. True if nobody saves to
        the pool any more."""
        was_last, hosted = False, self._guest.hosted
        while self._claimed:
            model = self._claimed.pop()
            hosted.replica.release(model)
            was_last = hosted.disclaim(model, goodbye=goodbye)
        return was_last

    def drop(self, why: str) -> None:
        """End the save that is under way, without a version."""
        draft, self._draft = self._draft, None
        if draft is not None:
            draft.pool.release()
            self._guest.link.keep(-draft.size)
            self._guest.hosted.end_save()
            self._guest.counters.add("abandoned")
            model, step = draft.begin.model, draft.begin.step
            self._guest.tell(
                logging.INFO,
                "abandoned",
                f"model {model!r} step {step}: no version: {why}",
                model=model,
                step=step,
                why=why,
                bytes=int(draft.lengths.sum()),
                seconds=time.perf_counter() - draft.begun_s,
            )

    def _claim(self, message: said.Claim) -> Said:
        if message.model in self._claimed:
            raise UsageError(f"model {message.model!r} is claimed here already")
        if len(self._claimed) >= CLAIMS_MAX:
            raise UsageError(f"more than {CLAIMS_MAX} models")
        with contextlib.ExitStack() as undo:
            self._guest.hosted.claim(message.model, message.client, self._guest.patience.claim_s)
            undo.callback(self._guest.hosted.disclaim, message.model, goodbye=False)
            self._guest.hosted.replica.claim(message.model)
            undo.callback(self._guest.hosted.replica.release, message.model)
            if self._guest.hosted.mirror is not None:
                self._guest.hosted.mirror.claim(message.model)
            undo.pop_all()
        self._claimed.append(message.model)
        return said.Done()

    def _connect(self, message: said.Connect) -> Said:
        if self._guest.lane is not None:
            self._guest.lane.close()
        other = Endpoint(*msgspec.structs.astuple(message))
        self._guest.lane = self._guest.fabric.lane(self._guest.link, self._guest.hosted, other)
        return said.Connected(*self._guest.lane.endpoint)

    def _begin(self, message: said.Begin) -> Said:
        if message.model not in self._claimed:
            raise UsageError(f"model {message.model!r} is not claimed here")
        self._guest.hosted.replica.require(message.model)
        lengths = column(message.lengths, "lengths")
        self._guest.link.room(_STORAGE_BEGUN * len(lengths))
        remote = RemoteStorages(*handles(message.handles, len(lengths), "handles"))
        size_max = self._guest.writer.max_bytes
        if size_max is not None and int(lengths.sum()) > size_max:
            raise MediumError(
                28, f"a version of {int(lengths.sum())} bytes: the quota is {size_max} bytes"
            )
        self._refuse_known(message.token)
        # A pool that was exchanged under the host takes no saves: nobody would find them.
        self._guest.hosted.look()
        size = _DRAFT + _STORAGE * len(lengths)
        self._guest.hosted.began()
        try:
            with self._guest.keep_memory(size):
                pool = PoolDraft(self._guest.writer, lengths)
                self._draft = _Draft(pool, lengths, remote, message, size)
        except BaseException:
            self._guest.hosted.end_save()
            raise
        return said.Begun()

    def _offer(self, message: said.Offer) -> Said:
        draft = self._require_draft()
        self._grow(draft)
        indices = column(message.indices, "indices")
        self._guest.link.room(STORAGE_MOVED * len(indices))
        draft.claim(indices)
        lengths = draft.lengths[indices]
        remote = RemoteStorages(draft.remote.address[indices], draft.remote.key[indices])
        try:
            reserved = draft.pool.reserve(indices, np.zeros(len(indices), np.int64))
        except MediumError as error:
            if error.errno not in OUT_OF_SPACE:
                raise
            # Not refused: the client may make room and offer these again.
            draft.claimed[indices] = False
            return self._full(error)
        try:
            digests, bounced = self._move(remote, lengths, reserved.target)
            draft.pool.note(reserved, digests)
        except UnexpectedMessageError:  # by an abandonment: the table lets nothing else through
            self.drop("the client abandoned it")
            return said.Abandoned()
        return said.Pulled(digests.tobytes(), bounced)

    def _full(self, error: MediumError) -> said.Full:
        """Say that there is no room now."""
        refusal = refusal_of(error)
        self._guest.counters.count_failure(refusal.fault)
        self._guest.tell(logging.ERROR, "full", f"no room for an offer: {error}", why=str(error))
        return said.Full(refusal.errno, refusal.text)

    def _move(self, remote: RemoteStorages, lengths: Column, moved: Sources) -> tuple[Digests, int]:
        """Bring the bytes of an offer to where they stay; return their digests, and how many bytes
        went through a buffer."""
        lane = self._guest.lane
        if lane is None or lane.closed or not is_reached(remote, lengths):
            return self._pull(moved), moved.size
        start = time.perf_counter()
        try:
            done = self._guest.transfer(lane.pull, remote, moved)
        finally:
            self._note_pull(time.perf_counter() - start)
        self._guest.counters.add("pulled_bytes", moved.size)
        return done.digests, done.bounced

    def _pull(self, moved: Sources) -> Digests:
        """Fetch the bytes of an offer. If the medium fails, the rest is received all the same:
        only then can the client hear of it."""
        link, start, before = self._guest.link, time.perf_counter(), self._guest.link.taken
        hashed_s = link.hash_s
        segments, digests = cut(moved)
        if segments.size:
            link.send(said.Pull())
        try:
            take_into(link, self._guest.writer.medium, segments, digests)
        except (MediumError, CorruptionError):
            drain(link, segments.size - (link.taken - before))
            raise
        finally:
            self._guest.counters.add("pulled_bytes", link.taken - before)
            self._guest.counters.add("hash_seconds", link.hash_s - hashed_s)
            self._note_pull(time.perf_counter() - start)
        return digests

    def _note_pull(self, seconds: float) -> None:
        self._guest.counters.add("pull_seconds", seconds)
        self._guest.counters.took("pull", seconds)

    def _share(self, message: said.Share) -> Said:
        draft = self._require_draft()
        self._grow(draft)
        indices = column(message.indices, "indices")
        self._guest.link.room(STORAGE_MOVED * len(draft.lengths))
        record = self._record(message.before)
        if record is None:
            return said.Shared(False)
        if len(record.storages) != len(draft.lengths) or not draft.may_claim(indices):
            raise UsageError("share: these are not storages of both versions")
        lengths = record.storages["length"][indices].astype(np.int64)
        if not np.array_equal(lengths, draft.lengths[indices]):
            raise UsageError("share: a storage has another length in that version")
        group = draft.pool.hold(record, indices)
        if group is None:
            return said.Shared(False)
        # The medium must still hold what was saved. That the client has the same is seen when it
        # confirms: its digests must be those of this version.
        address = np.ones(len(indices), np.int64)
        with self._guest.hashing() as stop:
            moved = sources(address, lengths, group.extents)
            found = check(self._guest.writer.medium, moved, stop)
        if not np.array_equal(found, group.digests):
            return said.Shared(False)
        draft.pool.reach(group)
        draft.claim(indices)
        draft.shared_bytes += int(lengths.sum())
        self._guest.counters.add("shared_bytes", int(lengths.sum()))
        return said.Shared(True)

    def _confirm(self, message: said.Confirm) -> Said:
        draft, start = self._require_draft(), time.perf_counter()
        self._grow(draft)
        self._guest.link.room(_STORAGE_COMMITTED * len(draft.lengths))
        if not draft.claimed.all():
            missing = int((~draft.claimed).sum())
            raise UsageError(f"confirmation: {missing} storages were neither pulled nor shared")
        rows = draft.pool.rows()
        # What arrived here, compared with what the client sent: otherwise there is no version.
        if rows[2].tobytes() != message.digests:
            raise CorruptionError(
                "confirmation: the client's digests are not those of what arrived here: bytes "
                "changed on the way, or while they were pulled; nothing was committed"
            )
        begin = draft.begin
        labels = Labels(
            model=begin.model,
            step=begin.step,
            token=begin.token,
            contents=message.contents,
            inexact=message.inexact,
            metrics=check_metrics(unpack_map(message.metrics, "metrics")),
            keep=Keep.of(unpack_map(message.keep, "keep") or None),
        )
        self._refuse_known(begin.token)
        self._refuse_nonsense(draft.lengths, message.contents)
        self._guest.hosted.replica.require(begin.model)
        self._guest.hosted.look()
        record = draft.pool.commit_rows(rows, labels, self._find_contents(draft, message))
        # Once more: if the pool was exchanged meanwhile, nobody will find this version.
        self._guest.hosted.look()
        self._draft = None
        self._guest.link.keep(-draft.size)
        self._guest.hosted.end_save()
        self._guest.note_change({begin.model})
        self._guest.hosted.replica.note_commit(begin.model, begin.token)
        self._guest.counters.add("saves")
        end = time.perf_counter()
        self._guest.counters.add("commit_seconds", end - start)
        self._guest.counters.took("commit", end - start)
        self._guest.counters.took("save", end - draft.begun_s)
        info = record.info
        self._guest.tell(
            logging.INFO,
            "committed",
            f"model {info.model!r} step {info.step}: version {info.id}",
            model=info.model,
            step=info.step,
            version=info.id,
            commit=info.commit,
            bytes=info.size,
            shared_bytes=draft.shared_bytes,
            retired=draft.pool.retired,
            seconds=end - draft.begun_s,
            commit_seconds=end - start,
        )
        return said.Committed(encode_version(record))

    def _find_contents(self, draft: _Draft, message: said.Confirm) -> Pointer | None:
        """Where the version before has the same contents, if it has."""
        record = self._record(message.before)
        if record is None:
            return None
        known = draft.pool.hold_contents(record)
        if known is None or known.length != HEADER.size + len(message.contents):
            return None
        self._guest.link.room(2 * known.length)
        return known if self._guest.writer.contents(record) == message.contents else None

    def _record(self, before: bytes) -> VersionRecord | None:
        """The record of a version before; None if it is gone, or is damaged by now: then a save
        does without it."""
        entry = self._guest.find(before)
        if entry is None:
            return None
        try:
            return self._guest.writer.record(entry)
        except CorruptionError:
            return None

    def _refuse_nonsense(self, lengths: Column, contents: bytes) -> None:
        """Raise ``UsageError`` for contents that are no table of files whose storages have these
        lengths: a reader would call the version damaged."""
        dicts, others = contents.count(b"{"), contents.count(b"[") + contents.count(b",")
        if dicts + others > VALUES_MAX:
            raise UsageError(f"confirmation: contents of more than {VALUES_MAX} values")
        self._guest.link.room(memory_of(contents))
        try:
            table = decode_table(contents)
        except CorruptionError as error:
            raise UsageError(f"confirmation: {error}") from error
        if table is None or table.lengths != lengths.tolist():
            raise UsageError("confirmation: its contents are no table of files of these storages")

    def _abandon(self, message: said.Abandon) -> Said:
        self.drop("the client abandoned it")
        return said.Abandoned()

    def _settle(self, message: said.Settle) -> Said:
        if message.model not in self._claimed:
            raise UsageError(f"model {message.model!r} is not claimed here")
        self._guest.hosted.replica.wait_until_logged(message.model, message.token)
        return said.Done()

    def _grow(self, draft: _Draft) -> None:
        """Count one more request of a save: what it leaves behind stays until the end of the
        save."""
        self._guest.link.keep(_PART)
        draft.size += _PART

    def _require_draft(self) -> _Draft:
        assert self._draft is not None, "the table lets no such message through"
        return self._draft

    def _refuse_known(self, token: bytes) -> None:
        if self._guest.find(token) is not None:
            raise UsageError(f"token {token.hex()} is that of a version that is there")


def memory_of(contents: bytes) -> int:
    """Bytes of memory, at most, that it takes to look at contents."""
    dicts, others = contents.count(b"{"), contents.count(b"[") + contents.count(b",")
    return _DICT * dicts + _VALUE * others + _BYTE * len(contents)


class _Draft:
    """A save under way: the version that is made, and which of its storages have a place."""

    def __init__(
        self, pool: PoolDraft, lengths: Column, remote: RemoteStorages, begin: said.Begin, size: int
    ) -> None:
        """remote: where its storages are with the client. size: bytes of memory that are kept for
        it."""
        self.size = size
        self.pool: Final = pool
        self.lengths: Final = lengths
        self.remote: Final = remote
        self.begin: Final = begin
        self.claimed: Final = np.zeros(len(lengths), np.bool_)
        self.shared_bytes = 0
        self.begun_s: Final = time.perf_counter()

    def may_claim(self, indices: Column) -> bool:
        """True if these are storages of the version, each once, that have no place yet."""
        if len(indices) and int(indices.max()) >= len(self.lengths):
            return False
        return len(np.unique(indices)) == len(indices) and not self.claimed[indices].any()

    def claim(self, indices: Column) -> Column:
        """Mark these storages as having a place, and return them. Raises ``UsageError`` if they may
        not have one."""
        if not self.may_claim(indices):
            raise UsageError("storages that are not there, come twice, or have a place already")
        self.claimed[indices] = True
        return indices
