"""The groups that a command means; a group is the parts of one save of a sharded job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from portus.cli.output import Json
from portus.cli.pools import FoundVersion, PlacePools
from portus.errors import CorruptionError, UsageError
from portus.format.layout import RecordKind
from portus.index.groups import Group, groups_of
from portus.index.records import VersionRecord, decode_layout
from portus.spec import TensorSpec

if TYPE_CHECKING:
    from portus.client.shards.cuts import Cut

ITEMS: Final = "items."


@dataclass(frozen=True, slots=True)
class FoundGroup:
    """A group, and the parts of its ranks that are there."""

    group: Group
    parts: dict[int, FoundVersion]


def find_groups(pools: PlacePools, target: str) -> list[FoundGroup]:
    """The groups that ``MODEL`` or ``MODEL@STEP`` means, newest last; none if it means no group."""
    versions = {(each.pool, each.info.id): each for each in pools.versions()}
    found = groups_of((each.pool, each.info) for each in versions.values())
    wanted = [group for group in found if group.model == target]
    model, at, step = target.rpartition("@")
    if not wanted and at and step.isdecimal():
        wanted = [group for group in found if (group.model, group.step) == (model, int(step))]
    return [
        FoundGroup(
            group,
            {rank: versions[pool, info.id] for rank, (pool, info) in sorted(group.parts.items())},
        )
        for group in wanted
    ]


def ranks_text(group: Group) -> str:
    """How many ranks' parts are there, and which are not; for people."""
    ranks = f"{len(group.parts)} of {group.count}"
    if group.is_complete:
        return f"{ranks}, complete"
    missing = ", ".join(map(str, group.missing[:8])) + (" ..." if len(group.missing) > 8 else "")
    return f"{ranks}, incomplete: not {missing}"


def group_document(group: Group) -> dict[str, Json]:
    """A group, for machines."""
    return {
        "model": group.model,
        "step": group.step,
        "count": group.count,
        "complete": group.is_complete,
        "missing": list(group.missing),
    }


def newest_complete(found: list[FoundGroup], target: str) -> FoundGroup:
    """Raises ``UsageError`` with the ranks that are missing if there is none."""
    complete = [each for each in found if each.group.is_complete]
    if complete:
        return complete[-1]
    group = found[-1].group
    raise UsageError(
        f"{target}: step {group.step} of {group.count} ranks is not complete, ranks "
        f"{group.missing[:8]} are missing; portus ls lists the groups there are"
    )


def cuts_of(found: FoundGroup) -> tuple[dict[str, Cut], list[str]]:
    """The tensors of a group by name, and the names of its other values.

    Raises ``CorruptionError``.
    """
    from portus.client.loading import restore
    from portus.client.shards.cuts import cuts

    for part in found.parts.values():
        content = restore.load(part.reader, part.entry, ["metadata"])
        if isinstance(content, dict) and "metadata" in content:
            return cuts(content["metadata"])
    raise CorruptionError(f"{found.group.model}@{found.group.step}: no part has the metadata")


@contextlib.contextmanager
def opened_part(found: FoundVersion) -> Iterator[tuple[VersionRecord, dict[str, TensorSpec]]]:
    """A part, pinned: its record, and its shards by key."""
    with found.reader.pinned(found.entry.info.id) as entry:
        record = found.reader.record(entry)
        specs = decode_layout(found.reader.payload(record.layout, RecordKind.LAYOUT))
        yield record, {spec.name.removeprefix(ITEMS): spec for spec in specs}
