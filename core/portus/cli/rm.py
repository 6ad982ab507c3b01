"""``portus rm TARGET``: remove versions with their pointers; a file; or a pointer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence

from portus.cli import files, mirrored
from portus.cli.output import Json, Output, count_text, size_text
from portus.cli.pools import (
    FoundVersion,
    allow,
    open_pools,
    pointers_of,
    table_in,
    version_document,
)
from portus.client.files.home import Pool
from portus.client.files.host import HostPool
from portus.client.files.reference import read as pointer_at
from portus.client.pools.resolve import use_reference
from portus.errors import StaleError, UsageError
from portus.format.reference import Reference
from portus.index.directory import WRITERS
from portus.index.place import Place, PlaceKind
from portus.index.pool import PoolWriter
from portus.index.reader import PoolReader
from portus.index.records import VersionEntry
from portus.index.tables import MARKS
from portus.media.local import LocalFiles
from portus.settings.keep import Keep

WAIT_S = 1.0
"""How long to wait for the writer of a pool: a trainer holds it as long as it runs."""


def run(
    targets: Sequence[str],
    pool: str | None,
    *,
    yes: bool,
    force: bool,
    keep: str | None,
    output: Output,
) -> None:
    """Remove, one target after another. keep: of a model, or of a directory of files, what this
    says stays, see ``Keep.parse``."""
    kept = None if keep is None else Keep.parse(keep)
    removed: list[Json] = []
    for target in targets:
        path = files.find_files(target, pool)
        if path is None:
            removed += _remove_versions(target, pool, yes, force, kept, output)
        elif keep is None and pointer_at(path) is not None:
            allow(pool)
            removed += _remove_pointer(os.path.abspath(path), output)
        else:
            removed += files.rm(path, output, force=force, keep=kept)
    output.document({"removed": removed})


@contextlib.contextmanager
def writing(path: str) -> Iterator[PoolWriter]:
    """Open a pool file for writing; at the end give what nothing reaches back to the file system.
    Raises ``BusyError`` naming who writes it."""
    writer = WRITERS.open(path, timeout_s=WAIT_S, mapped=False)  # else holes would be filled
    last: Callable[[], object] = lambda: None  # noqa: E731  # after an error nothing is touched
    try:
        yield writer
        if os.path.exists(path):  # else it was removed
            last = writer.give_back
    finally:
        WRITERS.close(writer, last=last)


@contextlib.contextmanager
def _opened(place: Place) -> Iterator[Pool]:
    """Open a pool to remove versions from; at the end give its free space back."""
    if not place.is_host:
        with writing(place.path) as writer:
            yield writer
        return
    with contextlib.closing(HostPool(place.path)) as host:
        yield host
        host.give_back()


def _remove_files(paths: Sequence[str]) -> None:
    """Remove these files, durably. Raises ``MediumError``."""
    system = LocalFiles()
    for path in paths:
        system.remove(path)
    for directory in dict.fromkeys(map(os.path.dirname, paths)):
        system.sync(directory)


def _remove_pointer(path: str, output: Output) -> list[Json]:
    """Remove a pointer, and its version if it was the last one; return that for machines."""

    def led(reader: PoolReader, entry: VersionEntry, said: Reference) -> FoundVersion:
        place = Place.named(reader.medium.info.name)
        return FoundVersion(place, entry.info, lambda: (reader, entry))

    found = use_reference(path, led)
    removed: list[Json] = []
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(_opened(found.pool))
        said = pointer_at(path)
        if said is None or said.token != found.info.token.hex():
            raise UsageError(f"{path} changed meanwhile, and is still there: run this again")
        entries = pool.catalogue().entries()
        current = next((each for each in entries if each.info.token == found.info.token), None)
        table = None if current is None else table_in(pool, current)
        _remove_files([path])
        left = [] if table is None else pointers_of(table, found.info.token)
        if current is not None and not left:
            pool.retire([current.info.id])
            removed.append(version_document(current.info))
    output.line(f"{path}: removed")
    if left:
        output.line(f"{found.title} stays: {count_text(len(left), 'pointer')} lead to it")
    else:
        output.line(f"removed {found.title}, {size_text(found.info.size)} or less")
    return removed


def _remove_versions(
    target: str, pool: str | None, yes: bool, force: bool, keep: Keep | None, output: Output
) -> list[Json]:
    """Remove versions, and their pointers; return the versions for machines."""
    with open_pools(pool, target) as pools:
        found = pools.select()
        is_model = {each.info.model for each in found} == {pools.target}
        if not force:
            _refuse_marks(found)
        if keep is not None and not is_model:
            raise UsageError(f"--keep is for a model, and {pools.target} names a step")
        if keep is not None:
            found = _in_order(found)
            staying = {id(info) for info in keep.staying([each.info for each in found])}
            found = [each for each in found if id(each.info) not in staying]
        is_whole, is_mirror = is_model and keep is None, pools.place.kind is PlaceKind.MIRROR
        name = pools.target
    question = f"Remove {count_text(len(found), 'version')}, all of {name}?"
    if is_whole and not yes and not output.ask(question):
        raise UsageError(f"nothing was removed: use --yes for all of {name}, or {name}@STEP")
    if is_mirror:
        mirrored.rm(pools.place, found)
    pointers = 0 if is_mirror else _retire(found)
    for each in found:
        output.line(f"removed {each.title} (version {each.info.id})")
    if pointers:
        output.line(f"removed {count_text(pointers, 'pointer')}")
    then = (
        "the run that mirrors there, or portus gc, deletes the objects a day later"
        if is_mirror
        else "the pool file keeps its size, and has holes where the file system allows"
    )
    size = size_text(sum(each.info.size for each in found))
    output.line(f"{count_text(len(found), 'version')} removed, {size} or less; {then}")
    return [version_document(each.info) for each in found]


def _retire(found: Sequence[FoundVersion]) -> int:
    """Remove these versions of pools, and their pointers first; return how many pointers. Nothing
    is removed, with an error, if one is not there any more: all pools are locked before that is
    checked."""
    with contextlib.ExitStack() as stack:
        places = dict.fromkeys(each.pool for each in found)
        opened = {place: stack.enter_context(_opened(place)) for place in places}
        paths: list[str] = []
        for place, pool in opened.items():
            entries = {entry.info.token: entry for entry in pool.catalogue().entries()}
            for each in found:
                if each.pool == place:
                    paths += _pointers(pool, entries.get(each.info.token), each)
        _remove_files(paths)
        for place, pool in opened.items():
            pool.retire([each.info.id for each in found if each.pool == place])
    return len(paths)


def _pointers(pool: PoolReader, entry: VersionEntry | None, seen: FoundVersion) -> list[str]:
    """Return the pointers that lead to a version. Raises ``UsageError`` if it is gone."""
    with contextlib.suppress(StaleError):
        if entry is not None and entry.info.id == seen.info.id:
            table = table_in(pool, entry)
            return [] if table is None else pointers_of(table, entry.info.token)
    raise UsageError(f"{seen.pool} changed meanwhile, and nothing was removed: run this again")


def _in_order(found: list[FoundVersion]) -> list[FoundVersion]:
    """Return the versions of one pool file in the order of their commits, even if its clock went
    back. Those of several files, which come file by file, are ordered by time."""
    latest: dict[Place, int] = {}
    timed = []
    for each in found:
        latest[each.pool] = max(each.info.time_ns, latest.get(each.pool, 0))
        timed.append((latest[each.pool], each.info.commit, each))
    return [each for _, _, each in sorted(timed, key=lambda row: row[:2])]


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
