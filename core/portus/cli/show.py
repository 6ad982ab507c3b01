"""``portus show MODEL[@STEP]``: the versions of a model, or all that is in one of them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from portus.cli import files, words
from portus.cli.options import POOL_OR_MIRROR, TARGET, Text
from portus.cli.output import Json, Output, Row
from portus.cli.pools import open_places, table_document, version_document
from portus.engine.loading.open_file import OpenFile
from portus.reach.places.base import StoredCheckpoint
from portus.reach.shards.rank_file import DISTCP, METADATA
from portus.reach.versions.open_version import OpenVersion


def command(output: Output, target: str = TARGET, pool: Text = POOL_OR_MIRROR) -> None:
    """Show what is in a torch file; or the versions of a model, or everything in one version."""
    path = files.find_files(target, pool)
    if path is not None and os.path.isdir(path):
        output.document({"directories": files.ls(path, True, output)})
        return
    if path is not None:
        files.show(path, output)
        return
    with open_places(pool, target) as places:
        found = places.select()
        if all(each.info.model == places.target for each in found):
            _show_model(found, output)
        else:
            documents: list[Json] = [_show_version(each, output) for each in found]
            output.document({"versions": documents})


def _show_model(found: Sequence[StoredCheckpoint], output: Output) -> None:
    model = found[0].info.model
    rows: list[Row] = []
    versions: list[Json] = []
    for each in found:
        info, unique, table = each.info, each.unique(), each.table()
        age = words.age(info.time_ns) + (", inexact" if info.inexact else "")
        own = None if unique is None else words.size(unique)
        directory = (table and table.directory) or None
        size = words.size(info.size)
        rows.append((info.step, info.id, info.commit, age, size, own, directory))
        versions.append({**_identity(each), "unique": unique, **table_document(table)})
    for path in dict.fromkeys(each.place.path for each in found):
        output.line(f"{model} in {path}")
    heads = (">STEP", ">ID", ">COMMIT", "SAVED", ">SIZE", ">UNIQUE", "DIRECTORY")
    output.table(heads, rows)
    output.document({"model": model, "versions": versions})


def _show_version(found: StoredCheckpoint, output: Output) -> dict[str, Json]:
    info = found.info
    with found.open() as opened:
        output.line(f"{found.name} in {found.place}")
        if found.path:
            sizes = {name: file.size for name, file in opened.files.items()}
            output.table(("FILE", ">SIZE"), [(name, words.size(sizes[name])) for name in sizes])
            return {
                **_identity(found),
                "files": [{"name": name, "size": size} for name, size in sizes.items()],
            }
        directory, unique, told, about = None, None, "", dict[str, Json]()
        if (version := opened.version) is not None:
            record, unique = version.record, found.unique()
            directory = None if version.table is None else version.table.directory or None
            old = record.storages["born"] < record.info.commit
            shared = int(record.storages["length"][old].sum())
            told = f" in {words.count(len(record.storages), 'storage')}"
            told += f", of which {words.size(shared)} shared with older versions" if shared else ""
            about = {"shared": shared, "unique": unique, "directory": directory}
        output.line(f"saved   {words.moment(info.time_ns)} ({words.age(info.time_ns)})")
        output.line(f"size    {words.size(info.size)}{told}")
        if unique is not None:
            output.line(f"unique  {words.size(unique)}, which no other version has")
        output.line(f"id      {info.id}, commit {info.commit}, token {info.token.hex()}")
        if info.inexact:
            output.line("inexact another process wrote parts of it during the copy")
        if info.metrics:
            scores = ", ".join(f"{name} {value:g}" for name, value in sorted(info.metrics.items()))
            output.line(f"metrics {scores}")
        if directory:
            output.line(f"at      {directory}")
        document = {**_identity(found), **about}
        if version is not None and version.table is None:
            return {**document, **_show_state(version, output)}
        files_shown = [_show_file(name, file, output) for name, file in opened.files.items()]
        return {**document, "files": list[Json](files_shown)}


def _identity(found: StoredCheckpoint) -> dict[str, Json]:
    return {**version_document(found.info), "pool": found.place.path}


def _show_file(name: str, file: OpenFile, output: Output) -> dict[str, Json]:
    """Show a file of a version; for a file of a sharded checkpoint only its size."""
    from portus.reach.leaving.outline import outline_in  # and torch with it

    output.line()
    output.line(f"{name}: {words.size(file.size)}")
    document: dict[str, Json] = {"name": name, "size": file.size}
    if name == METADATA or name.endswith(DISTCP):
        return document
    return {**document, **files.show_outline(outline_in(file, name), output)}


def _show_state(version: OpenVersion, output: Output) -> dict[str, Json]:
    """Show the contents of a version of a shelf, or of tables."""
    from portus.reach.leaving.export import batches_of  # and torch with it
    from portus.reach.leaving.outline import outline_in
    from portus.reach.pools.state_file import StateFile

    file, log, entries = StateFile(version), version.record.log, version.log_state.entries
    batches = batches_of(file, version.where)
    if log is not None:
        text = "1 entry" if entries == 1 else f"{entries} entries"
        output.line(f"log     {text}, in {words.size(log.extent.length)}")
    if batches:
        text = ", ".join(f"{each} of the {name}" for name, each in batches.items())
        output.line(f"batch   {text}")
    output.line()
    shown = files.show_outline(outline_in(file, version.where), output)
    return {"changes": entries, "batches": dict(batches), **shown}
