"""``portus rm TARGET``: let go of versions, or remove a reference file and what it alone held."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from portus.cli.output import Json, Output, count_text, size_text
from portus.cli.pools import (
    Found,
    holders,
    link_text,
    open_pools,
    reference_at,
    version_document,
)
from portus.client.fate import State
from portus.client.host import HostPool
from portus.client.keeper import Keeper, keeper_of
from portus.errors import UsageError
from portus.format.reference import Reference
from portus.index.directory import WRITERS
from portus.index.pool import PoolWriter

WAIT_S = 1.0
"""How long to wait for the writer of a pool: a trainer holds it as long as it runs."""


def run(
    target: str, pool: str | None, *, yes: bool, force: bool, keep: int | None, output: Output
) -> int:
    """Remove; the exit code. keep: of a model, that many of the newest versions stay."""
    reference = reference_at(target)
    if reference is not None and keep is not None:
        raise UsageError(f"--keep is for a model, and {target} is a reference file")
    if reference is not None:
        removed = _remove_file(os.path.abspath(target), reference, pool)
    else:
        removed = _remove_versions(target, pool, yes=yes, force=force, keep=keep, output=output)
    for each in removed:
        output.line(f"removed {each['model']}@{each['step']} (version {each['id']})")
    size = sum(int(str(each["size"])) for each in removed)
    output.line(
        f"{count_text(len(removed), 'version')} let go of, {size_text(size)} or less; the pool "
        f"file keeps its size, and has holes where the file system allows"
    )
    output.document({"removed": list(removed)})
    return 0


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
        before = {entry.info.id: entry.info for entry in writer.catalogue().entries()}
        keeper.remove(path)
        after = writer.catalogue().ids()
    return [version_document(info) for version, info in before.items() if version not in after]


def _remove_versions(
    target: str, pool: str | None, *, yes: bool, force: bool, keep: int | None, output: Output
) -> list[dict[str, Json]]:
    with open_pools(pool, target) as pools:
        found = pools.select(target)
        if keep is not None:
            found = _beyond(found, target, keep, force=force, output=output)
        elif not force:
            _check_unheld(found)
    if not found:
        return []
    whole = keep is None and all(each.info.model == target for each in found)
    question = f"Remove {count_text(len(found), 'version')}, all of {target}?"
    if whole and not yes and not output.ask(question):
        raise UsageError(f"nothing was removed: say --yes for all of {target}, or {target}@STEP")
    for place in dict.fromkeys(each.pool for each in found):
        ids = [each.info.id for each in found if each.pool == place]
        if place.is_host:
            tokens = {each.info.token.hex() for each in found if each.pool == place}
            with contextlib.closing(HostPool(place.path)) as host:
                host.renounce([each for each in host.holds() if each.token in tokens])
                host.retire(ids)
                host.give_back()
            continue
        with writing(place.path) as (writer, keeper):
            keeper.renounce(ids)
            writer.retire(ids)
            keeper.deleted()  # forgets the links of what is gone
    return [version_document(each.info) for each in found]


def _beyond(
    found: list[Found], model: str, keep: int, *, force: bool, output: Output
) -> list[Found]:
    """All but the newest ``keep`` versions, and but what files hold, which is said."""
    if any(each.info.model != model for each in found):
        raise UsageError(f"--keep is for a model, and {model} names a step")
    beyond = sorted(found, key=lambda each: (each.info.time_ns, each.info.commit))[:-keep]
    held = [] if force else [each for each in beyond if _is_held(each)]
    if held:
        steps = ", ".join(str(each.info.step) for each in held)
        output.line(f"held by files, and kept: {count_text(len(held), 'version')}, steps {steps}")
    return [each for each in beyond if each not in held]


def _is_held(found: Found) -> bool:
    try:
        _check_unheld([found])
    except UsageError:
        return True
    return False


def _check_unheld(found: list[Found]) -> None:
    for each in found:
        if each.pool.is_host:
            raise UsageError(
                f"{each.info.model}@{each.info.step}: whether reference files lead to it is known "
                f"to the trainers that wrote them, not to the host: say --force if none does"
            )
        links = holders(each.pool, each.reader.catalogue()).get(each.info.token, [])
        held = [link_text(link) for link in links if link.state is not State.DELETED]
        if held:
            raise UsageError(
                f"{each.info.model}@{each.info.step} is held by {', '.join(held)}: "
                f"portus rm that path, or say --force"
            )
