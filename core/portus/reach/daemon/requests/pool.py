"""The pool of a client: its space, what goes from it, and what is noted in it."""

from __future__ import annotations

import logging
from typing import Final

from portus.errors import PortusError
from portus.reach.daemon.pools import free_bytes, hole_bytes, used_bytes
from portus.reach.daemon.requests.guest import Guest
from portus.reach.index.directory import note_failure
from portus.reach.protocol import messages as said
from portus.reach.protocol.messages import Said, digest_rows


class PoolRequests:
    """Answers what a client asks of the pool as a whole."""

    def __init__(self, guest: Guest) -> None:
        self._guest: Final = guest

    def give_back_at_the_end(self) -> None:
        """The last trainer ended as it should: until another one comes nobody needs the space."""
        try:
            self._give_back(said.GiveBack())
        except PortusError as error:
            self._guest.tell(
                logging.WARNING, "log", f"its free space could not be returned: {error}"
            )

    def _retire(self, message: said.Retire) -> Said:
        tokens = {row.tobytes() for row in digest_rows(message.tokens, "tokens")}
        self._guest.hosted.refuse()
        self._guest.hosted.look()
        entries = self._guest.writer.catalogue().entries()
        gone = [each.info for each in entries if each.info.token in tokens]
        self._guest.writer.retire({info.id for info in gone})
        self._guest.note_change({info.model for info in gone})
        self._guest.tell(logging.INFO, "retired", f"{len(gone)} versions", versions=len(gone))
        return said.Done()

    def _give_back(self, message: said.GiveBack) -> Said:
        freed = self._guest.fabric.give_back(self._guest.hosted)
        self._guest.tell(logging.INFO, "gave_back", f"{freed} bytes given back", bytes=freed)
        return said.Done()

    def _note(self, message: said.Note) -> Said:
        self._guest.hosted.look()  # or it would be noted in another pool
        note_failure(self._guest.writer, message.text, self._guest.hosted.path)
        return said.Done()

    def _status(self, message: said.Status) -> Said:
        hosted, size = self._guest.hosted, self._guest.writer.medium.size
        free, holes, taken = free_bytes(hosted), hole_bytes(hosted), used_bytes(hosted)
        return said.Standing(size, free, hosted.saves, holes, taken)
