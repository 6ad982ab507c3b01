"""Objects: what others mirror on this host."""

from __future__ import annotations

import itertools
from typing import Final

from portus.errors import StaleError
from portus.reach.daemon.requests.guest import Guest
from portus.reach.mirror.names import check_name
from portus.reach.mirror.store import MissingError
from portus.reach.protocol import messages as said
from portus.reach.protocol.messages import Said


class ObjectRequests:
    """Answers what a client asks of the objects of its tenant."""

    def __init__(self, guest: Guest) -> None:
        self._guest: Final = guest

    def _put(self, message: said.Put) -> Said:
        self._guest.hosted.refuse()
        name = check_name(message.name, self._guest.hosted.tenant)
        made = self._guest.hosted.replica.put(name, message.data, fresh=message.fresh)
        self._guest.counters.add("object_bytes", len(message.data) if made else 0)
        return said.Placed(made)

    def _get(self, message: said.Get) -> Said:
        store = self._guest.hosted.objects.store
        self._guest.link.room(message.length or said.OBJECT_SIZE_MAX)
        try:
            if not message.length:
                return said.Object(store.get(message.name))
            room = bytearray(message.length)
            store.get_range(message.name, message.start, memoryview(room))
            return said.Object(bytes(room))
        except MissingError as error:
            raise StaleError(str(error)) from error

    def _list(self, message: said.List) -> Said:
        found = self._guest.hosted.objects.store.list(message.prefix, message.after)
        some = list(itertools.islice(found, said.LISTED_MAX))
        return said.Listed(
            [each.name for each in some],
            said.pack_column([each.size for each in some]),
            said.pack_column([int(each.modified * 1e6) for each in some]),
        )

    def _delete(self, message: said.Delete) -> Said:
        self._guest.hosted.refuse()
        for name in message.names:
            check_name(name, self._guest.hosted.tenant)
        self._guest.hosted.objects.delete(message.names)
        return said.Done()
