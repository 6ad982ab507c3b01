"""``portus pin MODEL@STEP`` and ``portus unpin MODEL@STEP``."""

from __future__ import annotations

from portus.cli.grouped import find_groups
from portus.cli.output import Output, count_text
from portus.cli.pools import FoundVersion, PlacePools, open_pools, version_document
from portus.client.files.pins import pin, unpin
from portus.errors import UsageError
from portus.mirror.address import is_store


def run(target: str, pool: str | None, *, pinned: bool, output: Output) -> int:
    """Pin the versions of a step, or take their pins back; the exit code."""
    command = "pin" if pinned else "unpin"
    for named in filter(None, (target, pool)):
        _refuse_mirror(named, command)
    with open_pools(pool, target) as pools:
        found = _selected(pools, target)
        act = pin if pinned else unpin
        done = [each for each in found if act(each.pool, each.reader, each.info)]
        if not done and not pinned:
            raise UsageError(f"{target} is not pinned")
        documents = [version_document(each.info) for each in found]
    how = "pinned" if pinned else "no longer pinned"
    again = " before" if pinned and not done else ""
    output.line(f"{target}: {count_text(len(found), 'version')} {how}{again}")
    output.document({"pinned" if pinned else "unpinned": list(documents)})
    return 0


def _refuse_mirror(named: str, command: str) -> None:
    """Raises ``UsageError`` where a mirror is named."""
    if is_store(named):
        raise UsageError(
            f"{named}: versions of a mirror cannot be pinned or unpinned. Do it in the pool that "
            f"is mirrored there, and the mirror follows: portus {command} MODEL@STEP --pool POOL"
        )


def _selected(pools: PlacePools, target: str) -> list[FoundVersion]:
    """The versions of a step; of a sharded save, the parts of all ranks."""
    parts = [part for group in find_groups(pools, target) for part in group.parts.values()]
    found = parts or pools.select(target)
    if len({each.info.step for each in found}) > 1:
        raise UsageError(f"{target} has several steps: say which, {target}@STEP")
    return found
