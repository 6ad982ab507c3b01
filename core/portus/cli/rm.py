"""``portus rm TARGET``: remove versions with their pointers; a file; or a pointer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from portus.cli import files, words
from portus.cli.options import POOL_OR_MIRROR, Text, argument, flag, option
from portus.cli.output import Json, Output
from portus.cli.pools import open_places, version_document
from portus.engine.settings.keep import Keep
from portus.engine.spec import VersionInfo
from portus.errors import UsageError
from portus.reach.files.reference import read_reference
from portus.reach.format.reference import Reference
from portus.reach.index.catalogue import MARKS
from portus.reach.index.place import Place
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry
from portus.reach.places.base import StoredCheckpoint
from portus.reach.places.opening import Places
from portus.reach.places.pool import let_go
from portus.reach.pools.resolve import use_reference


def command(
    output: Output,
    targets: list[str] = argument(
        "MODEL[@STEP]...", "versions, files, pointers, or MIRROR/MODEL[@STEP]"
    ),
    pool: Text = POOL_OR_MIRROR,
    yes: bool = flag("--yes -y", "delete a whole model without asking"),
    force: bool = flag(
        "--force -f", "also delete marks of protected tables, and files that a link points to"
    ),
    keep: Text = option(
        "--keep N|KEEP",
        "keep only the newest N of a directory, or of a model, or what a policy keeps, "
        "such as last=2,every=1000,within=24h,best=val_loss:min:3",
    ),
) -> None:
    """Delete a torch file; or versions, and the pointers to them; or a pointer, and its version if
    no other one refers to it.

    A torch file that a link beside it points to needs --force.
    """
    kept = None if keep is None else Keep.parse(keep)
    removed: list[Json] = []
    for target in targets:
        path = files.find_files(target, pool)
        if path is None:
            removed += _remove_versions(target, pool, yes, force, kept, output)
        elif keep is None and read_reference(path) is not None:
            removed += _remove_pointer(os.path.abspath(path), output)
        else:
            removed += files.rm(path, output, force=force, keep=kept)
    output.document({"removed": removed})


def _remove_pointer(path: str, output: Output) -> list[Json]:
    """Remove a pointer, and its version if it was the last one; return the JSON document."""

    def use(reader: PoolReader, entry: VersionEntry, said: Reference) -> tuple[Place, VersionInfo]:
        return Place.parse(reader.medium.info.name), entry.info

    place, info = use_reference(path, use)
    is_retired, left = let_go(place, path, info.token)
    name = f"{info.model}@{info.step}"
    output.line(f"{path}: removed")
    if left:
        refer = "refers" if left == 1 else "refer"
        output.line(f"{name} stays: {words.count(left, 'pointer')} {refer} to it")
    else:
        output.line(f"removed {name}, {words.size(info.size)} or less")
    return [version_document(info)] if is_retired else []


def _remove_versions(
    target: str, pool: str | None, yes: bool, force: bool, keep: Keep | None, output: Output
) -> list[Json]:
    """Remove versions, and their pointers; return the JSON documents of the versions."""
    with open_places(pool, target) as places:
        found = places.select()
        name = places.target
        is_model = {each.info.model for each in found} == {name}
        if keep is not None and not is_model:
            raise UsageError(f"--keep is for a model, and {name} names a step")
        if keep is not None:
            found = _in_order([each for each in found if not each.leads_to])
            staying = {id(info) for info in keep.staying([each.info for each in found])}
            found = [each for each in found if id(each.info) not in staying]
        if found and not force:
            _refuse(places, found)
        question = f"Remove {words.count(len(found), 'version')}, all of {name}?"
        if is_model and keep is None and not yes and not output.ask(question):
            raise UsageError(f"nothing was removed: use --yes for all of {name}, or {name}@STEP")
        with contextlib.ExitStack() as stack:
            # All places are locked, and looked at, before anything is removed.
            removals = [p.removal(chosen) for p, chosen in places.by_place(found).items()]
            acts = [stack.enter_context(each) for each in removals]
            pointers = sum(act() for act in acts)
        then = "; ".join(dict.fromkeys(each.after_removal for each in places.all()))
    for each in found:
        output.line(f"removed {each.name} (version {each.info.id})")
    if pointers:
        output.line(f"removed {words.count(pointers, 'pointer')}")
    size = words.size(sum(each.info.size for each in found))
    output.line(f"{words.count(len(found), 'version')} removed, {size} or less; {then}")
    return [version_document(each.info) for each in found]


def _in_order(found: Sequence[StoredCheckpoint]) -> list[StoredCheckpoint]:
    """Return the versions of one pool file in the order of their commits, even if its clock went
    back. Those of several files, which come file by file, are ordered by time."""
    latest: dict[Place, int] = {}
    timed = []
    for each in found:
        latest[each.place] = max(each.info.time_ns, latest.get(each.place, 0))
        timed.append((latest[each.place], each.info.commit, each))
    return [each for _, _, each in sorted(timed, key=lambda row: row[:2])]


def _refuse(places: Places, found: Sequence[StoredCheckpoint]) -> None:
    """Raise ``UsageError`` for a file that a remaining link refers to, and for a mark of protected
    tables: a checkpoint in any other pool, or file, may have its tables there."""
    paths = {each.path for each in found if each.path}
    for each in places.list(found[0].info.model) if paths else ():
        led = os.path.normpath(os.path.join(os.path.dirname(each.path), each.leads_to))
        if each.leads_to and each.path not in paths and led in paths:
            raise UsageError(f"{led}: {each.path} points to it; --force removes it")
    for each in found:
        if each.info.model == MARKS:
            raise UsageError(
                f"{MARKS}@{each.info.step}: a checkpoint that was saved at batch {each.info.step} "
                "has its tables there, and this pool cannot tell whether one is left: use --force "
                "if none is"
            )
