"""``portus ls``: the models and versions of a pool."""

from __future__ import annotations

from typing import Final

from portus.cli import files, words
from portus.cli.options import POOL_ARGUMENT, POOL_OR_MIRROR, Text, flag
from portus.cli.output import Json, Output, Row, error_line, fields, newest_rows
from portus.cli.pools import only_place, open_places, table_document, version_document
from portus.errors import CorruptionError, PortusError, StaleError
from portus.reach.index.file_table import FileTable
from portus.reach.places.base import OpenPlace, StoredCheckpoint

NEWEST: Final = 10
"""Versions of a model to list, unless the user asks for all."""


def command(
    output: Output,
    place: Text = POOL_ARGUMENT,
    pool: Text = POOL_OR_MIRROR,
    every: bool = flag("--all -a", "list all versions of each model"),
) -> None:
    """List checkpoints: the torch files of a directory and those below it; or the models of a pool,
    their versions, and the directories of the pointers to them."""
    where = only_place(place, pool)
    directory = files.find_files(where, None)
    if directory is not None:
        output.document({"directories": files.ls(directory, every, output), "pools": []})
        return
    documents, failed = list[Json](), list[Json]()
    with open_places(where) as places:
        for each in places.all():
            try:
                documents.append(_show_place(each, every, bool(documents), output))
            except PortusError as error:
                failed.append({"path": each.place.path, "error": output.skip(error)})
    if not documents and not failed:
        output.line(f"{places.place}: no pools yet; the first save makes one")
    output.document({"pools": documents + failed})


def _show_place(place: OpenPlace, every: bool, is_next: bool, output: Output) -> Json:
    """Show a place; return its JSON document. is_next: it follows another one."""
    skipped: dict[str, PortusError] = {}
    usage, found = place.usage(), place.list(skipped=skipped)
    models: dict[str, dict[str, Json]] = {
        model: {"error": output.skip(error, f"{model}: ")} for model, error in skipped.items()
    }
    if is_next:
        output.line()
    by_model: dict[str, list[StoredCheckpoint]] = {}
    for each in found:
        by_model.setdefault(each.info.model, []).append(each)
    most = None if every else NEWEST
    versions: list[Row] = []
    filed: list[Row] = []
    for model, own in sorted(by_model.items()):
        tables = [(each, _table(each, output)) for each in own if not each.path]
        paths = [each for each in own if each.path]
        versions += newest_rows([_row(*each) for each in tables], most, model, "...")
        filed += newest_rows([_file_row(each) for each in paths], most, model)
        models[model] = {
            "versions": [
                {**version_document(each.info), **table_document(table)} for each, table in tables
            ],
            "files": [files.file_document(each) for each in paths],
            **place.details(model),
        }
    sizes = [each.info.size for each in found if not each.path]
    title = f"{place.place}: {words.count(len(sizes), 'version')}"
    about: dict[str, Json] = {}
    if usage is not None:
        names = ("size", "on_disk", "kept", "reclaimable", "free")
        about = {**fields(usage, *names, "uuid"), "failure": usage.failure or None}
        size, on_disk, kept, back, free = (words.size(getattr(usage, name)) for name in names)
        holes = f", {on_disk} on disk" if 0 < usage.on_disk < usage.size else ""
        text = f"file of {size}{holes}: kept {kept}, reclaimable {back}, free {free}"
        output.line(f"{title}, {text}")
    elif sizes or not filed:
        output.line(f"{title}, {words.size(sum(sizes))} or less")
    if versions:
        output.table(("MODEL", ">STEP", "SAVED", ">SIZE", ">FILES", "DIRECTORY"), versions)
    if filed:
        total = words.size(sum(each.info.size for each in found if each.path))
        output.line(f"{place.place}: {words.count(len(found) - len(sizes), 'file')}, {total}")
        output.table(("RUN", "FILE", ">STEP", "SAVED", ">SIZE"), filed)
    if usage is not None and usage.failure:
        output.line(f"the last save that failed: {usage.failure}")
    listed: list[Json] = [{"name": model, **own} for model, own in sorted(models.items())]
    return {"path": place.place.path, "models": listed, **about}


def _table(version: StoredCheckpoint, output: Output) -> FileTable | None:
    """Return the files of a version, or None if it is damaged, after a message, or was removed
    meanwhile."""
    try:
        return version.table()
    except StaleError:
        return None
    except CorruptionError as error:
        output.note(f"portus: {error_line(error)}")
        return None


def _row(version: StoredCheckpoint, table: FileTable | None) -> Row:
    info = version.info
    age, size = words.age(info.time_ns), words.size(info.size)
    if table is None:
        return info.model, info.step, age, size, None, None
    directory = table.directory and words.path(table.directory)
    return info.model, info.step, age, size, len(table.files), directory


def _file_row(file: StoredCheckpoint) -> Row:
    info = file.info
    if file.leads_to:
        return info.model, file.path, None, "", f"points to {file.leads_to}"
    return info.model, file.path, info.step, words.age(info.time_ns), words.size(info.size)
