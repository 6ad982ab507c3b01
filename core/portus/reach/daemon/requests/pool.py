"""Requests about a pool (space, retired versions, noted failures) and the objects beside it."""

from __future__ import annotations

import itertools
import logging

from portus.errors import StaleError
from portus.reach.daemon.pools import free_bytes, hole_bytes, used_bytes
from portus.reach.daemon.requests.guest import Guest
from portus.reach.index.directory import note_failure
from portus.reach.mirror.store import MissingError, check_name
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


def put(guest: Guest, message: said.Put) -> Said:
    """Write an object."""
    guest.hosted.refuse()
    name = check_name(message.name, guest.hosted.tenant)
    made = guest.hosted.replica.put(name, message.data, fresh=message.fresh)
    guest.counters.add("object_bytes", len(message.data) if made else 0)
    return said.Placed(made)


def get(guest: Guest, message: said.Get) -> Said:
    """Return the bytes of an object, or of a part of it."""
    store = guest.hosted.objects.store
    guest.link.room(message.length or said.OBJECT_SIZE_MAX)
    try:
        if not message.length:
            return said.Object(store.get(message.name))
        return said.Object(bytes(store.get_range(message.name, message.start, message.length)))
    except MissingError as error:
        raise StaleError(str(error)) from error


def list_some(guest: Guest, message: said.List) -> Said:
    """Return the next names of objects."""
    found = guest.hosted.objects.store.list(message.prefix, message.after)
    some = list(itertools.islice(found, said.LISTED_MAX))
    return said.Listed(
        [each.name for each in some],
        said.pack_column([each.size for each in some]),
        said.pack_column([int(each.modified * 1e6) for each in some]),
    )


def delete(guest: Guest, message: said.Delete) -> Said:
    """Remove objects."""
    guest.hosted.refuse()
    for name in message.names:
        check_name(name, guest.hosted.tenant)
    guest.hosted.objects.delete(message.names)
    return said.Done()
