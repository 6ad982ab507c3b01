"""``portus rm TARGET``: let go of versions, or remove a reference file and what it alone held."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

from portus.cli import files, mirrored
from portus.cli.grouped import FoundGroup, find_groups, ranks_text
from portus.cli.output import Json, Output, count_text, size_text
from portus.cli.pools import (
    FoundVersion,
    PlacePools,
    aimed,
    holders,
    link_text,
    open_pools,
    reference_at,
    version_document,
)
from portus.client.files.fate import Fate, FileLink
from portus.client.files.host import HostPool
from portus.client.files.keeper import Keeper, keeper_of
from portus.client.files.pins import check_unpinned
from portus.errors import UsageError
from portus.format.reference import Reference
from portus.index.directory import WRITERS
from portus.index.keep import Keep
from portus.index.place import Place, PlaceKind
from portus.index.pool import PoolWriter
from portus.index.tables import MARKS
from portus.mirror.address import is_store

WAIT_S = 1.0
"""How long to wait for the writer of a pool: a trainer holds it as long as it runs."""


def run(
    target: str, pool: str | None, *, yes: bool, force: bool, keep: str | None, output: Output
) -> int:
    """Remove; the exit code. keep: of a model, or of a directory of files, what this says stays,
    see ``Keep.parse``."""
    kept = None if keep is None else Keep.parse(keep)
    path = files.meant(target, pool)
    if path is not None:
        return files.rm(path, output, force=force, keep=kept)
    target, pool = aimed(target, pool)
    reference = reference_at(target)
    if reference is not None and keep is not None:
        raise UsageError(f"--keep is for a model, and {target} is a reference file")
    if reference is not None:
        removed = _remove_file(os.path.abspath(target), reference, pool)
        _say(removed, output)
    else:
        removed = _remove_versions(target, pool, yes=yes, force=force, keep=kept, output=output)
    size = sum(int(str(each["size"])) for each in removed)
    then = (
        "the run that mirrors there, or portus gc, deletes the objects a day later"
        if pool is not None and is_store(pool)
        else "the pool file keeps its size, and has holes where the file system allows"
    )
    output.line(f"{count_text(len(removed), 'version')} removed, {size_text(size)} or less; {then}")
    output.document({"removed": list(removed)})
    return 0


def _say(removed: list[dict[str, Json]], output: Output) -> None:
    for each in removed:
        output.line(f"removed {each['model']}@{each['step']} (version {each['id']})")


@contextlib.contextmanager
def writing(path: str) -> Iterator[tuple[PoolWriter, Keeper]]:
    """A pool file opened for writing; at the end what nothing reaches is given back to the file
    system. Raises ``BusyError`` naming who writes it."""
    writer = WRITERS.open(path, timeout_s=WAIT_S, mapped=False)  # else holes would be filled
    last: Callable[[], object] = lambda: None  # noqa: E731  # after an error nothing is touched
    try:
        yield writer, keeper_of(path, writer)
        if os.path.exists(path):  # else it was removed
            last = writer.give_back
    finally:
        WRITERS.close(writer, last=last)


def _remove_file(path: str, reference: Reference, pool: str | None) -> list[dict[str, Json]]:
    with open_pools(pool, path) as pools:
        holding = [
            place
            for place, reader, _ in pools.catalogues()
            if reader.superblock.uuid.hex() == reference.pool
        ]
    if not holding:
        raise UsageError(
            f"{path} leads to pool {reference.pool}, which is not in {pools.place}; it was at "
            f"{reference.pool_path}: give it with --pool"
        )
    if holding[0].is_host:
        raise UsageError(
            f"{path} leads to a pool on {holding[0]}: remove the file, and then "
            f"portus rm {reference.model}@{reference.step} --force --pool {holding[0]}"
        )
    with writing(holding[0].path) as (writer, keeper):
        if reference_at(path) != reference:
            raise UsageError(f"{path} changed meanwhile, and is still there: run this again")
        before = {entry.info.id: entry.info for entry in writer.catalogue().entries()}
        keeper.remove(path)
        after = writer.catalogue().ids()
    return [version_document(info) for version, info in before.items() if version not in after]


def _remove_versions(
    target: str, pool: str | None, *, yes: bool, force: bool, keep: Keep | None, output: Output
) -> list[dict[str, Json]]:
    with open_pools(pool, target, mirrors=True) as pools:
        found, groups = _selected(pools, target)
        if groups:
            _check_groups(pools, groups, target, force=force, keep=keep)
        models = {each.group.model for each in groups} or {each.info.model for each in found}
        if not force:
            _refuse_marks(found)
        if keep is not None:
            found = _beyond(found, target, keep, force=force, output=output)
        elif not force:
            _check_unheld(found)
        else:
            _check_unpinned(found)
    if not found:
        return []
    question = f"Remove {count_text(len(found), 'version')}, all of {target}?"
    whole = keep is None and models == {target}
    if whole and not yes and not output.ask(question):
        raise UsageError(f"nothing was removed: use --yes for all of {target}, or {target}@STEP")
    places = _by_place(found)
    for place in [each for each in places if each.is_host or each.kind is PlaceKind.MIRROR]:
        seen = places.pop(place)
        if place.is_host:
            _retire_from_host(place, seen)
        else:
            mirrored.let_go(place, seen, force=force)
    _retire(places, force=force)
    removed = [version_document(each.info) for each in found]
    for group in groups:
        output.line(f"removed {group.group.model}@{group.group.step}: {ranks_text(group.group)}")
    _say([] if groups else removed, output)
    return removed


def _by_place(found: list[FoundVersion]) -> dict[Place, list[FoundVersion]]:
    return {
        place: [each for each in found if each.pool == place]
        for place in dict.fromkeys(each.pool for each in found)
    }


def _retire_from_host(place: Place, found: list[FoundVersion]) -> None:
    tokens = {each.info.token.hex() for each in found}
    with contextlib.closing(HostPool(place.path)) as host:
        host.renounce([each for each in host.holds() if each.token in tokens])
        host.retire([each.info.id for each in found])
        host.give_back()


def _retire(places: dict[Place, list[FoundVersion]], *, force: bool) -> None:
    """Let go of these versions of pool files; of none, with an error, if something changed since
    they were found: all pools are locked before it is checked."""
    with contextlib.ExitStack() as stack:
        opened = {place: stack.enter_context(writing(place.path)) for place in places}
        for place, seen in places.items():
            now = _as_seen(place, seen, opened[place][0])
            (_check_unpinned if force else _check_unheld)(now)
        for place, (writer, keeper) in opened.items():
            ids = [each.info.id for each in places[place]]
            keeper.renounce(ids)
            writer.retire(ids)
            keeper.deleted()  # forgets the links of what is gone


def _as_seen(place: Place, seen: list[FoundVersion], writer: PoolWriter) -> list[FoundVersion]:
    """Return these versions with what holds them now. Raises ``UsageError`` if one is gone, or if
    the pool was made anew: other versions have their ids there."""
    catalogue = writer.catalogue()
    there = {(entry.info.id, entry.info.token) for entry in catalogue.entries()}
    is_same = seen[0].reader.superblock.uuid == writer.superblock.uuid
    if not is_same or not there >= {(each.info.id, each.info.token) for each in seen}:
        raise UsageError(f"{place} changed meanwhile, and nothing was removed: run this again")
    links = holders(place, catalogue)

    def now(each: FoundVersion) -> FoundVersion:
        entry = each.entry
        held = links.get(each.info.token, [])
        return replace(each, open=lambda: (writer, entry), held=lambda: held)

    return list(map(now, seen))


def _selected(pools: PlacePools, target: str) -> tuple[list[FoundVersion], list[FoundGroup]]:
    """The versions that go, and the groups if they are parts: then the first rank's come last, by
    which a run finds the others, if this is cut off. Raises ``UsageError``."""
    try:
        return pools.select(target), []
    except UsageError:
        groups = find_groups(pools, target)
        if not groups:
            raise
    ranked = [(rank, part) for group in groups for rank, part in group.parts.items()]
    return [part for _, part in sorted(ranked, key=lambda pair: -pair[0])], groups


def _check_groups(
    pools: PlacePools, groups: list[FoundGroup], target: str, *, force: bool, keep: Keep | None
) -> None:
    """Raise ``UsageError`` if these groups may not go."""
    model = groups[0].group.model
    if keep is not None:
        raise UsageError(
            f"--keep is for a model that one process saves, and {model} is sharded: remove its "
            f"steps, {model}@STEP, or give keep= to the writer"
        )
    if model == target:
        return
    every = [each.group for each in find_groups(pools, model) if each.group.is_complete]
    if not force and every and any(each.group.id == every[-1].id for each in groups):
        instead = f"step {every[-2].step}" if len(every) > 1 else "nothing"
        raise UsageError(
            f"{target} is the newest complete group of {model}: a load, and a fresh node, would "
            f"begin with {instead}. To remove it all the same, use --force"
        )


def _beyond(
    found: list[FoundVersion], model: str, keep: Keep, *, force: bool, output: Output
) -> list[FoundVersion]:
    """All but what ``keep`` says, and but what files hold, which is said."""
    if any(each.info.model != model for each in found):
        raise UsageError(f"--keep is for a model, and {model} names a step")
    ordered = _in_order(found)
    staying = {id(info) for info in keep.staying([each.info for each in ordered])}
    beyond = [each for each in ordered if id(each.info) not in staying]
    held = [each for each in beyond if _is_held(each, force=force)]
    if held:
        steps = ", ".join(str(each.info.step) for each in held)
        output.line(f"held by files, and kept: {count_text(len(held), 'version')}, steps {steps}")
    return [each for each in beyond if each not in held]


def _in_order(found: list[FoundVersion]) -> list[FoundVersion]:
    """Return the versions of one pool file in the order of their commits, even if its clock went
    back. Those of several files, which come file by file, are ordered by time."""
    latest: dict[str, int] = {}
    timed = []
    for each in found:
        latest[each.path] = max(each.info.time_ns, latest.get(each.path, 0))
        timed.append((latest[each.path], each.info.commit, each))
    return [each for _, _, each in sorted(timed, key=lambda row: row[:2])]


def _is_held(found: FoundVersion, *, force: bool) -> bool:
    try:
        (_check_unpinned if force else _check_unheld)([found])
    except UsageError:
        return True
    return False


def _check_unpinned(found: list[FoundVersion]) -> None:
    for place, here in _by_place(found).items():
        if place.kind is not PlaceKind.MIRROR:
            check_unpinned(place, here[0].reader, [each.info for each in here])


def _refuse_marks(found: list[FoundVersion]) -> None:
    """Raise ``UsageError`` for a mark of protected tables: a checkpoint in any other pool, or file,
    may have its tables there."""
    for each in found:
        if each.info.model == MARKS:
            raise UsageError(
                f"{MARKS}@{each.info.step}: a checkpoint that was saved at batch {each.info.step} "
                "has its tables there, and this pool cannot tell whether one is left: use --force "
                "if none is"
            )


def _check_unheld(found: list[FoundVersion]) -> None:
    _check_unpinned(found)
    for each in found:
        if each.pool.is_host:
            raise UsageError(
                f"{each.info.model}@{each.info.step}: the host cannot tell whether reference "
                "files lead to it, only the trainers that wrote them can: use --force if none "
                "does"
            )
        held = [
            link_text(link)
            for link in each.held()
            if not isinstance(link, FileLink) or link.state is not Fate.DELETED
        ]
        if held:
            raise UsageError(
                f"{each.info.model}@{each.info.step} is held by {', '.join(held)}: run portus "
                "rm on that path, or use --force"
            )
