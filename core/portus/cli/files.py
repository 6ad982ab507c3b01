"""Commands on checkpoints that are files: ``ls``, ``show`` and ``rm`` of torch and safetensors
files, of pointers, and of directories of these."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from portus.cli import words
from portus.cli.output import Json, Output, Row, fields, newest_rows
from portus.cli.pools import nearest
from portus.engine.settings.keep import Keep
from portus.errors import UsageError
from portus.reach.files.reference import read_reference
from portus.reach.index.directory import pools_at
from portus.reach.index.place import DEFAULT_DIRECTORY, Place
from portus.reach.places.base import GarbageOptions, StoredCheckpoint
from portus.reach.places.directory import (
    CHECKS,
    DirectoryPlace,
    StoredFile,
    is_checkpoint,
    verification_of,
)
from portus.reach.places.opening import Places, place_named
from portus.reach.pools.resolve import allow

if TYPE_CHECKING:
    from portus.reach.leaving.outline import FileOutline

NEWEST: Final = 20
"""Files of a directory to list, unless the user asks for all."""


def file_document(file: StoredCheckpoint) -> dict[str, Json]:
    """Return the JSON document of a file."""
    own = {**fields(file.info, "size", "time_ns"), "time": words.moment(file.info.time_ns)}
    about = {"path": file.path, "step": file.step, "leads_to": file.leads_to or None}
    return {**about, **own, **file.details}


def open_files(path: str) -> Places:
    """Open the directory of files, or the one file, at ``path``."""
    place = DirectoryPlace.at(path)
    return Places(place.place, [place])


def find_files(target: str | None, pool: str | None) -> str | None:
    """Return the file, or the directory of files, that a command's target is; None if it is a pool,
    or in one. With a pool the target may be a pointer to that. Without a target: the directory of
    the nearest ``.portus``, if that has no pool."""
    if pool is not None:
        if not target or not os.path.isfile(target) or read_reference(target) is None:
            return None
        allow(place_named(pool, "--pool"))
        return target
    if target is None:
        hidden = nearest(os.getcwd())
        if hidden is None or Place.by_variable() is not None or pools_at(Place.parse(hidden)):
            return None
        target = os.path.dirname(hidden)
        return None if next(DirectoryPlace.at(target).find_files(), None) is None else target
    if os.path.isfile(target):
        return target if is_checkpoint(target) else None
    is_hidden = os.path.basename(os.path.abspath(target)) == DEFAULT_DIRECTORY
    if not os.path.isdir(target) or is_hidden or pools_at(Place.parse(target)):
        return None
    place = DirectoryPlace.at(target)
    has_any = next(place.find_files(), None) or next(place.collections(GarbageOptions()), None)
    return None if has_any is None else target


def ls(path: str, every: bool, output: Output) -> list[Json]:
    """List the files of each directory; return their JSON documents."""
    by_directory: dict[str, list[StoredFile]] = {}
    for each in DirectoryPlace.at(path).find_files():
        by_directory.setdefault(os.path.dirname(each.path), []).append(each)
    documents: list[Json] = []
    for directory, files in by_directory.items():
        files.sort(key=lambda each: (each.info.time_ns, each.path))
        total = words.size(sum(each.info.size for each in files))
        if documents:
            output.line()
        output.line(f"{words.path(directory)}: {words.count(len(files), 'checkpoint')}, {total}")
        rows: list[Row] = []
        for each in files:
            age, size = words.age(each.info.time_ns), words.size(each.info.size)
            leads = f"points to {each.leads_to}" if each.leads_to else ""
            rows.append((os.path.basename(each.path), each.step, age, size, leads))
        most = None if every else NEWEST
        output.table(("FILE", ">STEP", "SAVED", ">SIZE", ""), newest_rows(rows, most))
        documents.append({"path": directory, "files": [file_document(each) for each in files]})
    return documents


def rm(path: str, output: Output, *, force: bool, keep: Keep | None) -> list[Json]:
    """Remove one file, durably, or those of a ``Checkpointer``'s directory that ``keep`` does not
    keep; return their JSON documents. Raises ``UsageError`` for a file that a link beside it refers
    to, unless ``force``."""
    if os.path.isdir(path) and keep is None:
        raise UsageError(f"{path}: expected a file, or --keep to say which of them stay")
    if not os.path.isdir(path) and keep is not None:
        raise UsageError(f"{path}: expected a directory for --keep, found a file")
    place = DirectoryPlace.at(path)
    paths = [path]
    if keep is not None:
        from portus.engine.paths.directory_steps import StepFiles  # and torch with it

        files = StepFiles(os.path.abspath(path))
        if not files.versions():
            raise UsageError(
                f"{path}: expected the files of a Checkpointer, such as step-00000100.pt, found "
                "none; other frameworks remove their checkpoints themselves"
            )
        paths = files.surplus(keep)
    found = [StoredFile(place.place, each) for each in paths]
    for own in paths if not force else ():
        with os.scandir(os.path.dirname(os.path.abspath(own))) as entries:
            real = os.path.realpath(own)
            links = [e for e in entries if e.is_symlink() and os.path.realpath(e.path) == real]
        if links:
            names = ", ".join(sorted(e.name for e in links))
            raise UsageError(f"{own}: {names} points to it; --force removes it")
    documents: list[Json] = [file_document(each) for each in found]
    with place.removal(found) as act:
        act()
    for each in found:
        output.line(f"{words.path(each.path)}: removed, {words.size(each.info.size)}")
    if keep is not None:
        size = words.size(sum(each.info.size for each in found))
        output.line(f"{words.count(len(found), 'file')} removed, {size}")
    return documents


def show(path: str, output: Output) -> None:
    """Show the tensors of one file."""
    from portus.engine.loading.checkpoint_file import use_file  # and torch with it
    from portus.reach.leaving.outline import outline_in

    found = StoredFile(DirectoryPlace.at(path).place, path)
    outline = use_file(path, lambda file: outline_in(file, path), as_torch=False)
    by = verification_of(path, outline.has_digests)
    size, age = words.size(found.info.size), words.age(found.info.time_ns)
    output.line(f"{words.path(path)}: {size}, saved {age}, {CHECKS[by]}")
    if found.leads_to:
        output.line(f"points to {found.leads_to}")
    output.document({**file_document(found), "verified_by": by, **show_outline(outline, output)})


def show_outline(outline: FileOutline, output: Output) -> dict[str, Json]:
    """Show the contents of a file; return their JSON document."""
    if outline.note:
        output.line(f"noted: {outline.note}")
    rows = [
        (each.name, each.dtype, str(list(each.shape)), f"{each.size:,}") for each in outline.tensors
    ]
    output.table(("NAME", "TYPE", "SHAPE", ">BYTES"), rows)
    if outline.others:
        output.line()
        output.table(("NAME", "VALUE"), outline.others)
    tensors: list[Json] = [fields(e, "name", "dtype", "shape", "size") for e in outline.tensors]
    return {"tensors": tensors, "others": dict(outline.others)}
