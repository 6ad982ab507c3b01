"""A pool made of versions that were found without roots: see ``rescue``.

Their records and bytes stay in place, or are copied to the same places of a new medium. The
catalogue and roots are written again, after all of them. So ids, tokens, commits and times stay the
same, pointers find the versions again, and versions still share what they shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from portus.engine.media.base import Medium
from portus.engine.spec import PAGE, Extent
from portus.reach.format.layout import DATA_START, RecordKind
from portus.reach.index.catalogue import version_runs
from portus.reach.index.commit_records import RecordArea
from portus.reach.index.records import encode_catalogue, frame, point
from portus.reach.index.rescue import CHUNK, RecoverableVersion
from portus.reach.index.roots import Root, store_root
from portus.reach.index.space import EMPTY, Runs, extents_runs, merge, page_count, runs_of


def choose(found: Sequence[RecoverableVersion]) -> list[RecoverableVersion]:
    """Return those of some intact versions that can be in one pool: of the same pool as most, each
    id and token once, no page of two commits.

    Of two that exclude each other the newer stays: the other was retired, or given up. They are in
    the order of their commits.
    """
    uuids = [each.uuid for each in found]
    uuid = max(uuids, key=uuids.count, default=b"")
    ids, tokens = set[int](), set[bytes]()
    taken: dict[int, Runs] = {}
    kept: list[RecoverableVersion] = []
    own = [each for each in found if each.uuid == uuid]
    for each in sorted(own, key=lambda each: each.record.info.time_ns, reverse=True):
        info, pages = each.record.info, _pages_by_commit(each)
        if info.id in ids or info.token in tokens or _meets(pages, taken):
            continue
        ids.add(info.id)
        tokens.add(info.token)
        for commit, runs in pages.items():
            taken[commit] = merge([taken.get(commit, EMPTY), runs])
        kept.append(each)
    return sorted(kept, key=lambda each: (each.record.info.commit, each.record.info.id))


def chunks_of(versions: Sequence[RecoverableVersion], size: int) -> Iterator[Extent]:
    """Yield all pages of ``versions``, on a medium of ``size`` bytes, as extents to copy to the
    same places of another one of the same size."""
    for first, after in merge([_reach(each) for each in versions]).tolist():
        end = min(after * PAGE, size)
        for start in range(first * PAGE, end, CHUNK):
            yield Extent(start, min(CHUNK, end - start))


def rebuild(medium: Medium, versions: Sequence[RecoverableVersion]) -> None:
    """Write the catalogue and both roots for ``versions``, whose bytes and records
    ``medium`` has. Durable on return; all other space is free.

    versions: as ``choose`` returns them, one at least. Raises ``MediumError``; then the medium is
    no more of a pool than it was.
    """
    uuid = versions[0].uuid
    sequence = max(each.record.info.commit for each in versions) + 1
    area = RecordArea(medium.size + -medium.size % PAGE)
    record = frame(
        RecordKind.CATALOGUE, sequence, uuid, encode_catalogue(each.entry for each in versions)
    )
    catalogue = point([area.add(record), area.add(record)], record)
    end = area.offset + len(area.data)
    medium.grow(end + -end % PAGE)
    medium.store(area.offset, area.data)
    # Durable before the header is cleared: until then the pool can be rescued again.
    medium.persist([Extent(DATA_START, medium.size - DATA_START)])
    next_version = max(each.record.info.id for each in versions) + 1
    medium.store(0, bytes(DATA_START))
    # Both slots: a blank one would count as damaged.
    for number in (sequence, sequence + 1):
        store_root(medium, uuid, Root(number, next_version, medium.size, catalogue))
    medium.persist([Extent(0, DATA_START)])


def _reach(found: RecoverableVersion) -> Runs:
    return version_runs(found.entry, found.record)


def _pages_by_commit(found: RecoverableVersion) -> dict[int, Runs]:
    """Return the pages that a version reaches, by the commit that wrote them."""
    record = found.record
    parts: list[tuple[int, Runs]] = []
    parts.append((record.info.commit, extents_runs(found.entry.pointer.extents)))
    for born in set(record.storages["born"].tolist()):
        extents = [
            extent
            for index in (record.storages["born"] == born).nonzero()[0].tolist()
            for extent in record.storage_extents(index)
        ]
        parts.append((born, runs_of([e.offset for e in extents], [e.length for e in extents])))
    if record.log is not None:
        parts.append((record.log.born, extents_runs([record.log.extent])))
    pages: dict[int, Runs] = {}
    for commit, runs in parts:
        pages[commit] = merge([pages.get(commit, EMPTY), runs])
    return pages


def _meets(pages: dict[int, Runs], taken: dict[int, Runs]) -> bool:
    """Return whether another commit has a page already."""
    for commit, runs in pages.items():
        others = merge([each for other, each in taken.items() if other != commit])
        if page_count(merge([runs, others])) < page_count(runs) + page_count(others):
            return True
    return False
