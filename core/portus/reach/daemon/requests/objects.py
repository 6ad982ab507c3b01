"""Requests about objects, which others mirror on this host."""

from __future__ import annotations

import itertools

from portus.errors import StaleError
from portus.reach.daemon.requests.guest import Guest
from portus.reach.mirror.names import check_name
from portus.reach.mirror.store import MissingError
from portus.reach.protocol import messages as said
from portus.reach.protocol.messages import Said


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
        room = bytearray(message.length)
        store.get_range(message.name, message.start, memoryview(room))
        return said.Object(bytes(room))
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
