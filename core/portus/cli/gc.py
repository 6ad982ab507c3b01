"""``portus gc``: returns free space to the disk, and removes versions without their pointers."""

from __future__ import annotations

import os

from portus.cli import files, words
from portus.cli.options import POOL_ARGUMENT, POOL_OR_MIRROR, Text, Texts, flag, option
from portus.cli.output import Json, Output
from portus.cli.pools import only_place, open_places, version_document
from portus.errors import PortusError, UsageError
from portus.reach.places.base import Collection, Garbage, GarbageOptions, OpenPlace


def command(
    output: Output,
    place: Text = POOL_ARGUMENT,
    pool: Text = POOL_OR_MIRROR,
    missing: Texts = option(
        "--missing DIR", "delete versions whose pointers were in DIR, or below, and are gone"
    ),
    yes: bool = flag("--yes -y", "delete them without asking"),
    empty: bool = flag("--empty", "also remove pool files that end up empty"),
    dry_run: bool = flag("--dry-run", "only show what would be deleted and returned"),
) -> None:
    """Remove what killed processes left in a directory of files; return a pool's free space to the
    disk.

    With --missing, first delete versions whose pointers were removed. It looks at the files of this
    machine: run it where DIR is mounted.
    """
    where = only_place(place, pool)
    path = None if missing or empty else files.find_files(where, None)
    is_directory = path is not None and os.path.isdir(path)
    options = GarbageOptions(missing=missing or (), empty=empty)
    documents: list[Json] = []
    parts = OpenPlace.parts
    with files.open_files(path) if path and is_directory else open_places(where) as places:
        for each in places.all():
            parts = each.parts
            for part in each.collections(options):
                try:
                    documents.append(_collect(each, part, yes, dry_run, output))
                except PortusError as error:
                    what = f"{part.model}: " if part.model else ""
                    documents.append({**_name(part), "error": output.skip(error, what)})
    if not documents:
        output.line(f"{places.place}: nothing to do")
    output.document({"dry_run": dry_run, parts: documents})


def _name(part: Collection) -> dict[str, Json]:
    return {"name": part.model} if part.model else {"path": part.path}


def _collect(place: OpenPlace, part: Collection, yes: bool, dry_run: bool, output: Output) -> Json:
    title = f"{part.path}: {part.model}" if part.model else part.path
    found = part.look()
    for info in found.gone:
        name, size = f"{info.model}@{info.step}", words.size(info.size)
        output.line(f"{title}: {name}, {size}: none of the pointers found refers to it")
    if found.errors:
        output.line(f"{title}: nothing was removed: what could not be read may be a pointer")
        for error in found.errors[1:]:
            output.skip(error)
        raise found.errors[0]
    if not dry_run:
        question = f"Remove {words.count(len(found.gone), 'version')}?"
        if found.gone and not yes and not output.ask(question):
            raise UsageError(f"{title}: nothing was removed: use --yes to remove these versions")
        # Searched again under the lock, which is not held while the user is asked.
        found = part.collect(found)
    _show(title, place.piece, found, "would be " if dry_run else "", output)
    if found.pieces is not None:
        return {**_name(part), f"{place.piece}s": found.pieces, "size": found.freed}
    return {
        **_name(part),
        "retired": [version_document(info) for info in found.gone],
        "removed": found.is_removed,
        "freed": found.freed,
    }


def _show(title: str, piece: str, found: Garbage, would: str, output: Output) -> None:
    if found.gone:
        output.line(f"{title}: {words.count(len(found.gone), 'version')} {would}removed")
    if found.is_removed:
        output.line(f"{title}: empty, {would}removed")
    if found.pieces:
        size = words.size(found.freed)
        output.line(f"{title}: {words.count(found.pieces, piece)}, {size}, {would}removed")
    elif found.freed:
        size = f"{'about ' if would else ''}{words.size(found.freed)}"
        output.line(f"{title}: {size} {would}returned to the file system")
    elif not (found.gone or found.is_removed):
        output.line(f"{title}: nothing to do")
