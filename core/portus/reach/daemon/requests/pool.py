"""Requests about the pool of a client: its space, retired versions, and notes of failures."""

from __future__ import annotations

import logging

from portus.reach.daemon.pools import free_bytes, hole_bytes, used_bytes
from portus.reach.daemon.requests.guest import Guest
from portus.reach.index.directory import note_failure
from portus.reach.protocol import messages as said
from portus.reach.protocol.messages import Said, digest_rows


def retire(guest: Guest, message: said.Retire) -> Said:
    """Retire versions, by their tokens."""
    tokens = {row.tobytes() for row in digest_rows(message.tokens, "tokens")}
    guest.hosted.refuse()
    guest.hosted.look()
    entries = guest.writer.catalogue().entries()
    gone = [each.info for each in entries if each.info.token in tokens]
    guest.writer.retire({info.id for info in gone})
    guest.note_change({info.model for info in gone})
    guest.tell(logging.INFO, "retired", f"{len(gone)} versions", versions=len(gone))
    return said.Done()


def give_back(guest: Guest, message: said.GiveBack) -> Said:
    """Return free space to the file system."""
    guest.give_back()
    return said.Done()


def note(guest: Guest, message: said.Note) -> Said:
    """Record a failed save in the pool's journal."""
    guest.hosted.look()  # or it would be noted in another pool
    note_failure(guest.writer, message.text, guest.hosted.path)
    return said.Done()


def status(guest: Guest, message: said.Status) -> Said:
    """Return the bytes of the pool, and how many saves are under way."""
    hosted, size = guest.hosted, guest.writer.medium.size
    free, holes, taken = free_bytes(hosted), hole_bytes(hosted), used_bytes(hosted)
    return said.Standing(size, free, hosted.saves, holes, taken)
