"""What a mirror has of a model, into a pool that has nothing of its own.

All versions, oldest first, each by an ordinary commit under its token. Whoever is killed in it does
the rest when it is done again, since all that is there is in the mirror too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final

from portus.engine.copying.segments import Stop
from portus.engine.spec import VersionInfo
from portus.errors import CorruptionError
from portus.reach.index.pool import PoolWriter
from portus.reach.mirror.mirror import Mirror
from portus.reach.mirror.objects import Added, State
from portus.reach.versions.transfer import transferred

_log: Final = logging.getLogger("portus")

Advanced = Callable[[int], None]
"""Told of bytes that are in the pool now, besides those before."""


def place_of(added: Added) -> tuple[int, int]:
    """Where a version is in the history of its mirror."""
    return added.term, added.commit


def missing(state: State, own: Collection[VersionInfo]) -> list[Added]:
    """What of a mirror a pool with the versions ``own`` lacks, oldest first."""
    tokens = {info.token for info in own}
    return sorted((each for each in state.versions if each.token not in tokens), key=place_of)


def fill(
    mirror: Mirror,
    state: State,
    writer: PoolWriter,
    infos: Callable[[], Sequence[VersionInfo]],
    advanced: Advanced | None = None,
) -> list[Added]:
    """Fetch what is ``missing``; which versions were fetched. infos: gives the versions of the
    model that are here by then. Blocks.

    An older version that is damaged in the mirror is left out, with an error in the log. Raises
    ``CorruptionError`` for the newest one, and what the mirror and the pool raise.
    """
    done = []
    for each in missing(state, infos()):
        try:
            with mirror.opened_as(each) as (reader, entry):
                transferred(reader, entry.info.id, writer, Stop(), advanced)
            done.append(each)
        except CorruptionError as error:
            if each == state.newest:
                raise
            _log.error("portus: step %d cannot be fetched from the mirror: %s", each.step, error)
    return done
