"""What a draft in a pool takes from the version before it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from portus.engine.copying.segments import Stop
from portus.engine.pipeline.draft import Labels
from portus.reach.index.records import VersionRecord
from portus.reach.versions.pool_draft import PoolDraft
from tests.unit.index.pools import Pool, close_all

FIRST = np.zeros(1, np.int64)


@pytest.fixture
def pool() -> Iterator[Pool]:
    yield Pool()
    close_all()


def draft_of(pool: Pool, data: np.ndarray) -> tuple[PoolDraft, np.ndarray]:
    """A draft of a version with one storage, and where ``data`` is."""
    place = np.array([data.ctypes.data], np.int64)
    return PoolDraft(pool.writer, np.array([data.nbytes], np.int64)), place


def commit(draft: PoolDraft, step: int) -> VersionRecord:
    found = draft.commit(Labels(model="net", step=step, token=bytes([step] * 16)))
    draft.release()
    return found


def saved(pool: Pool, data: np.ndarray) -> VersionRecord:
    draft, place = draft_of(pool, data)
    draft.copy(FIRST, place, Stop())
    return commit(draft, 1)


def extents(version: VersionRecord) -> list[tuple[int, int]]:
    return [(each.offset, each.length) for each in version.storage_extents(0)]


def test_what_is_the_same_is_shared_and_what_rotted_is_not(pool: Pool) -> None:
    data = np.arange(1000)
    before = saved(pool, data)
    draft, place = draft_of(pool, data)
    assert draft.share(before, FIRST, place, Stop())
    assert extents(commit(draft, 2)) == extents(before)

    pool.writer.medium.store(before.storage_extents(0)[0].offset, b"rot")
    draft, place = draft_of(pool, data)
    assert not draft.share(before, FIRST, place, Stop())
    draft.copy(FIRST, place, Stop())
    assert extents(commit(draft, 3)) != extents(before), "nothing of it is reached"


def test_a_version_that_was_retired_meanwhile_is_not_shared_with(pool: Pool) -> None:
    data = np.arange(1000)
    before = saved(pool, data)
    pool.writer.retire([before.info.id])
    draft, place = draft_of(pool, data)
    assert not draft.share(before, FIRST, place, Stop())
    draft.copy(FIRST, place, Stop())
    assert len(commit(draft, 2).storages) == 1, "there is nothing else in it"
