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
from portus.reach.index.check_catalogue import ReachedRun
from portus.reach.index.check_reach import check_reach
from portus.reach.index.commit_records import RecordArea
from portus.reach.index.findings import Findings
from portus.reach.index.records import encode_catalogue, frame, point
from portus.reach.index.rescue import CHUNK, RecoverableVersion
from portus.reach.index.roots import Root, store_root
from portus.reach.index.space import merge


def choose(found: Sequence[RecoverableVersion]) -> list[RecoverableVersion]:
    """Return those of some intact versions that can be in one pool: of the same pool as most, each
    id and token once, no page of two commits.

    Of two that exclude each other the newer stays: the other was retired, or given up. They are in
    the order of their commits.
    """
    uuids = [each.uuid for each in found]
    uuid = max(uuids, key=uuids.count, default=b"")
    kept: list[RecoverableVersion] = []
    own = [each for each in found if each.uuid == uuid]
    for each in sorted(own, key=lambda each: each.record.info.time_ns, reverse=True):
        together, findings = [*kept, each], Findings()
        infos = [one.record.info for one in together]
        if len({info.id for info in infos}) == len({info.token for info in infos}) == len(infos):
            runs = [
                ReachedRun(extent, one.record.info.commit, "record")
                for one in together
                for extent in one.entry.pointer.extents
            ]
            check_reach([one.record for one in together], runs, findings)
            kept = kept if findings.all else together
    return sorted(kept, key=lambda each: (each.record.info.commit, each.record.info.id))


def chunks_of(versions: Sequence[RecoverableVersion], size: int) -> Iterator[Extent]:
    """Yield all pages of ``versions``, on a medium of ``size`` bytes, as extents to copy to the
    same places of another one of the same size."""
    reach = merge(version_runs(each.entry, each.record) for each in versions)
    for first, after in reach.tolist():
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
