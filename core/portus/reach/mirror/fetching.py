"""Fetches the versions that a mirror has of a model into a pool that has nothing of its own.

It fetches all versions, oldest first, and commits each as usual under its token. A killed process
can repeat the fetch, which does the rest, since the mirror has all versions of the pool too.

Each byte of the files is requested once, in ranges, several at a time. Before the commit the stored
bytes are read back, and compared with the digests of the manifest: so a failed write shows too.
"""

from __future__ import annotations

import bisect
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final

import numpy as np

from portus.engine.copying.local import check
from portus.engine.copying.segments import Column, Sources, Stop
from portus.engine.format.checksum import UNIT
from portus.engine.media.base import Medium
from portus.engine.pipeline.draft import Labels
from portus.engine.spec import VersionInfo
from portus.errors import CorruptionError
from portus.reach.index.pool import PoolWriter
from portus.reach.index.records import VersionRecord
from portus.reach.mirror.mirror import Mirror
from portus.reach.mirror.model_objects import ABREAST
from portus.reach.mirror.object_file import ObjectFile
from portus.reach.mirror.objects import Added, State
from portus.reach.versions.parallel import in_any_order, in_turn
from portus.reach.versions.pool_draft import PoolDraft

_log: Final = logging.getLogger("portus")

Advance = Callable[[int], None]
"""Called with the number of newly arrived bytes, by one thread at a time."""


def place_of(added: Added) -> tuple[int, int]:
    """Return the place of a version in the history of its mirror."""
    return added.term, added.commit


def missing(state: State, own: Collection[VersionInfo]) -> list[Added]:
    """Return the versions of a mirror that a pool with the versions ``own`` lacks, oldest first."""
    tokens = {info.token for info in own}
    return sorted((each for each in state.versions if each.token not in tokens), key=place_of)


def fill(
    mirror: Mirror,
    state: State,
    writer: PoolWriter,
    wanted: Sequence[Added],
    advance: Advance | None = None,
) -> list[Added]:
    """Fetch ``wanted``, which is ``missing``; return the fetched versions. Blocks.

    Skips an older version that is damaged in the mirror, with an error in the log. Raises
    ``CorruptionError`` for the newest one, and what the mirror and the pool raise.
    """
    done = []
    for each in wanted:
        try:
            fetch_version(mirror, each, writer, advance)
            done.append(each)
        except CorruptionError as error:
            if each == state.newest:
                # To resume from an older one would lose steps silently.
                raise
            _log.error("portus: step %d cannot be fetched from the mirror: %s", each.step, error)
    return done


def fetch_version(
    mirror: Mirror, added: Added, writer: PoolWriter, advance: Advance | None = None
) -> VersionRecord:
    """Commit a version of a mirror to the pool of ``writer``, as the newest one, with the same
    model, step and token. Blocks.

    Raises ``CorruptionError`` if bytes are not those of the version, ``StaleError`` if it was
    removed meanwhile, and what the store and the pool raise. Then the pool is unchanged.
    """
    with mirror.open(added) as opened:
        version = opened.version
        assert version is not None
        draft = PoolDraft(writer, version.lengths)
        try:
            count = len(version.lengths)
            reserved = draft.reserve(np.arange(count), np.zeros(count, np.int64))
            _bring(opened.parts, version.lengths, _Target(writer.medium, reserved.target), advance)
            # Before the commit: only right bytes are ever part of a version (V4).
            found = check(writer.medium, reserved.target, Stop())
            for bad in np.flatnonzero((found != version.digests).any(axis=1))[:1].tolist():
                raise CorruptionError(
                    f"{mirror.name}: model {mirror.model!r}, step {added.step}: a unit is damaged: "
                    f"expected digest {version.digests[bad].tobytes().hex()}, found "
                    f"{found[bad].tobytes().hex()}"
                )
            draft.note(reserved, version.digests)
            labels = Labels(
                model=mirror.model,
                step=added.step,
                token=added.token,
                contents=version.manifest.contents,
                inexact=added.inexact,
                metrics=dict(added.metrics),
            )
            return draft.commit(labels)
        finally:
            draft.release()


class _Target:
    """The place in a pool for the storages of a version, end to end."""

    def __init__(self, medium: Medium, target: Sources) -> None:
        self._medium: Final = medium
        self._offsets: Final[list[int]] = (target.extent_offset + target.extent_length).tolist()
        self._ends: Final[list[int]] = np.cumsum(target.extent_length).tolist()

    def store(self, start: int, data: memoryview) -> None:
        """Store bytes from byte ``start`` of all storages on."""
        while data:
            row = bisect.bisect_right(self._ends, start)
            left = self._ends[row] - start
            part = data[:left]
            self._medium.store(self._offsets[row] - left, part)
            start, data = start + len(part), data[left:]


def _bring(
    parts: Sequence[ObjectFile], lengths: Column, target: _Target, advance: Advance | None
) -> None:
    """Store all files of a version, several ranges at a time."""
    begins = (np.cumsum(lengths) - lengths).tolist()
    counts = [len(each.file.length) for each in parts]
    firsts = [0, *itertools.accumulate(counts)]
    spans = [each.file.spans() for each in parts]
    tell = in_turn(advance)

    def bring(part: tuple[int, int]) -> None:
        number, start = part
        file = parts[number]
        data = file.read(start, min(UNIT, file.size - start))
        size = len(data)
        for storage, inside, length in spans[number].within(start, size):
            is_around = storage == counts[number]
            # Those around the storages of the files come after all storages.
            index = firsts[-1] + number if is_around else firsts[number] + storage
            target.store(begins[index] + inside, data[:length])
            data = data[length:]
        tell(size)

    ranges = [
        (number, start) for number, file in enumerate(parts) for start in range(0, file.size, UNIT)
    ]
    in_any_order(bring, ranges, ABREAST)
