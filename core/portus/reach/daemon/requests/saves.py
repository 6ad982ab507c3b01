"""Saves: the requests of a client from its claim of a model to the commit of a version.

A save lives as long as its connection, and its only trace on the medium is the commit. If the
connection ends before that (the client was killed, a link was cut, the client abandoned the save),
the host takes the space back, and nothing else has happened. The host trusts nothing that a client
says about places. It places the bytes itself, and hashes what arrived; without equal digests from
the client there is no version.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import replace
from typing import Final

import msgspec
import numpy as np

from portus.engine.copying.segments import Column, Sources, Stop, cut
from portus.engine.media.file_calls import OUT_OF_SPACE
from portus.engine.pipeline.draft import Labels
from portus.engine.settings.keep import Keep, check_metrics
from portus.errors import CorruptionError, MediumError, UsageError
from portus.reach.daemon.requests.guest import STORAGE_MOVED, Draft, Guest
from portus.reach.daemon.shared_state import refusal_of
from portus.reach.index.file_table import decode_table
from portus.reach.index.records import encode_version
from portus.reach.protocol import messages as said
from portus.reach.protocol.messages import Fault, Said, column, digest_rows, handles, unpack_map
from portus.reach.transport.stream import drain, take
from portus.reach.transport.verbs import Endpoint
from portus.reach.versions.pool_draft import PoolDraft

VALUES_MAX: Final = 1 << 24
"""Values in contents, at most: each takes a hundred bytes while it is parsed."""

CLAIMS_MAX: Final = 64
"""Models that one connection may claim."""

# Bytes of memory that things take, at most; measured.
_DRAFT: Final = 4 << 10
_PART: Final = 4 << 10
"""Memory of a save, and of each request within it."""
_STORAGE: Final = 160
_STORAGE_BEGUN: Final = 128
_STORAGE_COMMITTED: Final = 512
"""Memory of each storage of a save: while the save is under way; while it begins; while it is
committed."""
_VALUE: Final = 64
_DICT: Final = 1024
_BYTE: Final = 8
"""Memory of each value, each dict, which may be a file, and each byte of contents, while they are
parsed."""


def claim(guest: Guest, message: said.Claim) -> Said:
    """Let the client alone save a model, as long as the connection lives."""
    if message.model in guest.claims:
        raise UsageError(f"model {message.model!r} is claimed here already")
    if len(guest.claims) >= CLAIMS_MAX:
        raise UsageError(f"more than {CLAIMS_MAX} models")
    if message.second:
        guest.hosted.replica.require_led(message.model)
    with contextlib.ExitStack() as undo:
        guest.hosted.claim(message.model, message.client, guest.patience.claim_s)
        undo.callback(guest.hosted.disclaim, message.model, goodbye=False)
        guest.hosted.replica.claim(message.model)
        undo.callback(guest.hosted.replica.release, message.model)
        if guest.hosted.mirror is not None:
            guest.hosted.mirror.claim(message.model)
        undo.pop_all()
    guest.claims.append(message.model)
    return said.Done()


def connect(guest: Guest, message: said.Connect) -> Said:
    """Connect the two ends of a queue pair."""
    if guest.lane is not None:
        guest.lane.pair.close()
    other = Endpoint(*msgspec.structs.astuple(message))
    guest.lane = guest.fabric.lane(guest.link, guest.hosted, other)
    return said.Connected(*guest.lane.pair.endpoint)


def begin(guest: Guest, message: said.Begin) -> Said:
    """Begin a save."""
    if not message.term and message.model not in guest.claims:
        raise UsageError(f"model {message.model!r} is not claimed here")
    if guest.draft is not None:
        raise UsageError("a save is under way on this connection already")
    guest.hosted.replica.require(message.model, message.term)
    lengths = column(message.lengths, "lengths")
    guest.link.room(_STORAGE_BEGUN * len(lengths))
    places = handles(message.handles, len(lengths), "handles")
    size_max = guest.writer.max_bytes
    if size_max is not None and int(lengths.sum()) > size_max:
        raise MediumError(
            28, f"a version of {int(lengths.sum())} bytes: the quota is {size_max} bytes"
        )
    _refuse_known(guest, message.token)
    # A pool file that was replaced takes no saves: no process would find them.
    guest.hosted.look()
    size = _DRAFT + _STORAGE * len(lengths)
    guest.hosted.began()
    try:
        with guest.keep_memory(size):
            pool = PoolDraft(guest.writer, lengths)
            guest.draft = Draft(pool, lengths, places, message, size)
    except BaseException:
        guest.hosted.end_save()
        raise
    return said.Done()


def offer(guest: Guest, message: said.Offer) -> Said:
    """Bring the offered storages into the pool."""
    draft = _draft_of(guest)
    indices = column(message.indices, "indices")
    guest.link.room(STORAGE_MOVED * len(indices))
    draft.claim(indices)
    try:
        reserved = draft.pool.reserve(indices, np.zeros(len(indices), np.int64))
    except MediumError as error:
        if error.errno not in OUT_OF_SPACE:
            raise
        # Not refused: the client may make room and offer these again.
        draft.claimed[indices] = False
        guest.counters.count_failure(Fault.FULL)
        guest.tell(logging.ERROR, "full", f"no room for an offer: {error}", why=str(error))
        return msgspec.structs.replace(refusal_of(error), fault=Fault.FULL)
    hashed = _move(guest, draft, indices, reserved.target)
    draft.pool.note(reserved, digest_rows(hashed.digests, "stored"))
    return hashed


def share(guest: Guest, message: said.Share) -> Said:
    """Take storages over from an earlier version."""
    draft = _draft_of(guest)
    indices = column(message.indices, "indices")
    guest.link.room(STORAGE_MOVED * len(draft.lengths))
    entry = guest.writer.catalogue().of_token(message.before)
    try:
        record = None if entry is None else guest.writer.record(entry)
    except CorruptionError:
        record = None  # a save can do without it
    if record is None:
        return said.Done(granted=False)
    if len(record.storages) != len(draft.lengths) or not draft.may_claim(indices):
        raise UsageError("share: these are not storages of both versions")
    lengths = record.storages["length"][indices].astype(np.int64)
    if not np.array_equal(lengths, draft.lengths[indices]):
        raise UsageError("share: a storage has another length in that version")
    # The medium must still hold the saved bytes. The client's own digests are compared when
    # it confirms.
    with guest.hashing() as stop:
        if not draft.pool.share(record, indices, np.zeros_like(indices), stop):
            return said.Done(granted=False)
    draft.claim(indices)
    draft.shared_bytes += int(lengths.sum())
    guest.counters.add("shared_bytes", int(lengths.sum()))
    return said.Done()


def confirm(guest: Guest, message: said.Confirm) -> Said:
    """Commit the version, if the client's digests are those of the bytes here."""
    draft, start = _draft_of(guest), time.perf_counter()
    guest.link.room(_STORAGE_COMMITTED * len(draft.lengths))
    if not draft.claimed.all():
        missing = int((~draft.claimed).sum())
        raise UsageError(f"confirmation: {missing} storages were neither pulled nor shared")
    rows = draft.pool.rows()
    # The digests of arrived and of sent bytes: without equality there is no version.
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
    _refuse_known(guest, begin.token)
    _refuse_nonsense(guest, draft.lengths, message.contents)
    guest.hosted.look()
    with guest.hosted.replica.committing(begin.model, begin.term, begin.commit):
        gone = {info.id for info in guest.find_all(message.gone)}
        record = draft.pool.commit_rows(rows, labels, gone)
    # Once more: if the pool file was replaced meanwhile, no process will find this version.
    guest.hosted.look()
    guest.draft = None
    guest.link.account.keep(-draft.size)
    guest.hosted.end_save()
    guest.note_change({begin.model})
    guest.counters.add("saves")
    end = time.perf_counter()
    guest.counters.add("commit_seconds", end - start)
    guest.counters.took("commit", end - start)
    guest.counters.took("save", end - draft.begun_s)
    info = record.info
    guest.tell(
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


def abandon(guest: Guest, message: said.Abandon) -> Said:
    """Give the save up, if there is one."""
    guest.drop("the client abandoned it")
    return said.Done()


def settle(guest: Guest, message: said.Settle) -> Said:
    """Wait until the replica has a version too, and answer."""
    if message.model not in guest.claims:
        raise UsageError(f"model {message.model!r} is not claimed here")
    with guest.link.working() as stop:  # a trainer that was killed keeps no claim
        guest.hosted.replica.settle(message.model, message.token, stop)
    return said.Done()


def lead(guest: Guest, message: said.Lead) -> Said:
    """Return who leads a model: another host's pool from now on, if it may."""
    if any(message.pool) and guest.hosted.mirror is not None:
        guest.hosted.mirror.claim(message.model)
    return guest.hosted.replica.answer(message)


def _move(guest: Guest, draft: Draft, indices: Column, moved: Sources) -> said.Hashed:
    """Bring the bytes of an offer to their places in the pool. Return the answer."""
    start = time.perf_counter()
    try:
        there = replace(moved, address=draft.address[indices])
        done = guest.transfer(there, draft.key[indices], is_pull=True)
        if done is None:
            return _pull(guest, moved)
        guest.counters.add("pulled_bytes", moved.size)
        return said.Hashed(done.digests.tobytes(), done.bounced, done.crcs.tobytes())
    finally:
        seconds = time.perf_counter() - start
        guest.counters.add("pull_seconds", seconds)
        guest.counters.took("pull", seconds)


def _pull(guest: Guest, moved: Sources) -> said.Hashed:
    """Receive the bytes of an offer over the socket. If the medium fails, receive the rest too:
    only then can the client read the error."""
    link, before, hashed_s = guest.link, guest.link.taken, guest.link.hash_s
    segments, digests = cut(moved)
    crcs = np.zeros(len(digests), np.uint32)
    if segments.size:
        link.send(said.Pull())
    try:
        take(link, segments, digests, Stop(), guest.writer.medium, crcs)
    except (MediumError, CorruptionError):
        drain(link, segments.size - (link.taken - before))
        raise
    finally:
        guest.counters.add("pulled_bytes", link.taken - before)
        guest.counters.add("hash_seconds", link.hash_s - hashed_s)
    return said.Hashed(digests.tobytes(), moved.size, crcs.tobytes())


def _refuse_nonsense(guest: Guest, lengths: Column, contents: bytes) -> None:
    """Raise ``UsageError`` for contents that are not a table of files whose storages have these
    lengths: a reader would call the version damaged."""
    dicts, others = contents.count(b"{"), contents.count(b"[") + contents.count(b",")
    if dicts + others > VALUES_MAX:
        raise UsageError(f"confirmation: contents of more than {VALUES_MAX} values")
    guest.link.room(memory_of(contents))
    try:
        table = decode_table(contents)
    except CorruptionError as error:
        raise UsageError(f"confirmation: {error}") from error
    if table is None or table.lengths != lengths.tolist():
        raise UsageError("confirmation: its contents are no table of files of these storages")


def _draft_of(guest: Guest) -> Draft:
    """Return the save under way, and count one more request of it: the memory that the request
    leaves stays until the end of the save."""
    draft = guest.draft
    if draft is None:
        raise UsageError("no save is under way on this connection")
    guest.link.account.keep(_PART)
    draft.size += _PART
    return draft


def _refuse_known(guest: Guest, token: bytes) -> None:
    if guest.writer.catalogue().of_token(token) is not None:
        raise UsageError(f"token {token.hex()} is that of a version that is there")


def memory_of(contents: bytes) -> int:
    """Return the bytes of memory that parsing contents takes, at most."""
    dicts, others = contents.count(b"{"), contents.count(b"[") + contents.count(b",")
    return _DICT * dicts + _VALUE * others + _BYTE * len(contents)
