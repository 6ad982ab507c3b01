"""``portus show MODEL[@STEP]``: the versions of a model, or all that is in one of them."""

from __future__ import annotations

import os
from typing import Final

import msgspec

from portus.cli import files
from portus.cli.output import Json, Output, age_text, count_text, moment_text, size_text
from portus.cli.pools import (
    FoundVersion,
    aimed,
    allow,
    open_pools,
    table_document,
    version_document,
)
from portus.cli.tables import batches_of
from portus.client.loading.contents import Storages
from portus.client.loading.open_file import VersionFile, file_in, table_of
from portus.client.state.tree import decode, distinct, leaf_nodes, tensor_index
from portus.format.dtypes import ITEM_SIZES
from portus.format.layout import RecordKind
from portus.image.metadata_file import NAME as METADATA
from portus.image.packed import FileTable
from portus.image.rank_file import DISTCP
from portus.index.log import logged
from portus.index.place import PlaceKind
from portus.index.reader import PoolReader
from portus.index.records import VersionRecord, decode_layout
from portus.spec import TensorSpec

_VALUE_MAX: Final = 60
"""Characters of a value that are shown to people."""


def run(target: str, pool: str | None, output: Output) -> int:
    """Show; the exit code."""
    path = files.meant(target, pool)
    if path is not None and os.path.isdir(path):
        output.document({"directories": files.ls(path, True, output)})
        return 0
    if path is not None:
        allow(pool)
        return files.show(path, output)
    target, pool = aimed(target, pool)
    with open_pools(pool, target, mirrors=True) as pools:
        found = pools.select(target)
        if all(each.info.model == target for each in found):
            _show_model(target, found, output)
        else:
            documents = [_show_version(each, output) for each in found]
            output.document({"versions": documents})
    return 0


def _show_model(model: str, found: list[FoundVersion], output: Output) -> None:
    mirror = PlaceKind.MIRROR
    tables = [None if each.pool.kind is mirror else each.table() for each in found]
    unique = _unique(found)
    rows = [
        (
            str(each.info.step),
            str(each.info.id),
            str(each.info.commit),
            age_text(each.info.time_ns) + (", inexact" if each.info.inexact else ""),
            size_text(each.info.size),
            size_text(unique[each]) if each in unique else "",
            "" if table is None else table.directory,
        )
        for each, table in zip(found, tables, strict=True)
    ]
    for path in dict.fromkeys(each.path for each in found):
        output.line(f"{model} in {path}")
    output.table((">STEP", ">ID", ">COMMIT", "SAVED", ">SIZE", ">UNIQUE", "DIRECTORY"), rows)
    versions: list[Json] = [
        {**_identity(each), "unique": unique.get(each), **table_document(table)}
        for each, table in zip(found, tables, strict=True)
    ]
    output.document({"model": model, "versions": versions})


def _unique(found: list[FoundVersion]) -> dict[FoundVersion, int]:
    """Bytes that only one version reaches. Of a mirror it is not known."""
    here = [each for each in found if each.pool.kind is not PlaceKind.MIRROR]
    readers = {each.path: each.reader for each in here}
    sizes = {path: reader.unique_bytes() for path, reader in readers.items()}
    return {each: sizes[each.path].get(each.info.id, 0) for each in here}


def _show_version(found: FoundVersion, output: Output) -> dict[str, Json]:
    reader = found.reader
    with reader.pinned(found.entry.info.id) as entry:
        record = reader.record(entry)
        table = table_of(reader, record)
        unique = _unique([found]).get(found)
        _say_head(found, record, table, unique, output)
        document: dict[str, Json] = {
            **_identity(found),
            "shared": _shared(record),
            "unique": unique,
            "directory": None if table is None else table.directory or None,
        }
        if table is None:
            return {**document, **_show_tree(reader, record, output)}
        shown: list[Json] = [
            _show_file(each.name, file_in(reader, record, table.files, number), output)
            for number, each in enumerate(table.files)
        ]
    return {**document, "files": shown}


def _show_file(name: str, file: VersionFile, output: Output) -> dict[str, Json]:
    """A file of a version; of one of a sharded checkpoint nothing is told but its size."""
    from portus.client.loading.outline import outline_in  # and torch with it

    output.line()
    output.line(f"{name}: {size_text(file.size)}")
    document: dict[str, Json] = {"name": name, "size": file.size}
    if name == METADATA or name.endswith(DISTCP):
        return document
    outline = outline_in(file, name)
    files.say_outline(outline, output)
    return {**document, **files.outline_document(outline)}


def _show_tree(reader: PoolReader, record: VersionRecord, output: Output) -> dict[str, Json]:
    """What is in a version of a shelf, or of tables."""
    tensors = decode_layout(reader.payload(record.layout, RecordKind.LAYOUT))
    changed = logged(reader.medium, record)
    root = decode(changed.tree or bytes(reader.payload(record.tree, RecordKind.TREE)))
    batches = batches_of(tensors, Storages(reader, record, changed))
    leaves = list(leaf_nodes(root))
    paths, nodes = distinct([path for path, _ in leaves]), [node for _, node in leaves]
    if record.log is not None:
        text = "1 entry" if changed.entries == 1 else f"{changed.entries} entries"
        output.line(f"log     {text}, in {size_text(record.log.extent.length)}")
    if batches:
        output.line(
            f"batch   {', '.join(f'{each} of the {name}' for name, each in batches.items())}"
        )
    output.line()
    held: dict[int, str] = {}
    rows: list[tuple[str, ...]] = []
    for path, node in zip(paths, nodes, strict=True):
        index = tensor_index(node)
        if index is None:
            rows.append((path, _kind(node), "", "", _value(node)))
        else:
            rows.append(_tensor_row(path, tensors[index], node, held))
    output.table(("NAME", "TYPE", "SHAPE", ">SIZE", ""), rows)
    return {
        "changes": changed.entries,
        "batches": dict(batches),
        "tensors": [_tensor_document(spec, record) for spec in tensors],
        "leaves": [
            {"name": path, "value": _plain(node)}
            for path, node in zip(paths, nodes, strict=True)
            if tensor_index(node) is None
        ],
    }


def _identity(found: FoundVersion) -> dict[str, Json]:
    return {**version_document(found.info), "pool": found.path}


def _say_head(
    found: FoundVersion,
    record: VersionRecord,
    table: FileTable | None,
    unique: int | None,
    output: Output,
) -> None:
    info, shared = found.info, _shared(record)
    output.line(f"{info.model}@{info.step} in {found.path}")
    output.line(f"saved   {moment_text(info.time_ns)} ({age_text(info.time_ns)})")
    told = f", of which {size_text(shared)} shared with older versions" if shared else ""
    storages = count_text(len(record.storages), "storage")
    output.line(f"size    {size_text(info.size)} in {storages}{told}")
    if unique is not None:
        output.line(f"unique  {size_text(unique)}, which no other version has")
    output.line(f"id      {info.id}, commit {info.commit}, token {info.token.hex()}")
    if info.inexact:
        output.line("inexact another process wrote parts of it during the copy")
    if info.metrics:
        scores = ", ".join(f"{name} {value:g}" for name, value in sorted(info.metrics.items()))
        output.line(f"metrics {scores}")
    if table is not None and table.directory:
        output.line(f"at      {table.directory}")


def _shared(record: VersionRecord) -> int:
    """Bytes that an older commit wrote."""
    old = record.storages["born"] < record.info.commit
    return int(record.storages["length"][old].sum())


def _tensor_row(path: str, spec: TensorSpec, node: object, held: dict[int, str]) -> tuple[str, ...]:
    shape = f"[{', '.join(map(str, spec.shape))}]"
    first = held.setdefault(spec.storage, path)
    tied = f"shares memory with {first}" if first != path and spec.storage >= 0 else ""
    dtype = spec.dtype if _is_tensor(node) else _kind(node)
    size = size_text(tensor_size(spec)) if spec.storage >= 0 else "meta"
    return path, dtype, shape if _is_tensor(node) else "", size, tied


def _is_tensor(node: object) -> bool:
    return isinstance(node, dict) and "$tensor" in node


def tensor_size(spec: TensorSpec) -> int:
    """Bytes of a tensor, without gaps."""
    size = ITEM_SIZES.get(spec.dtype, 0)
    for length in spec.shape:
        size *= length
    return size


def _tensor_document(spec: TensorSpec, record: VersionRecord) -> dict[str, Json]:
    born = int(record.storages["born"][spec.storage]) if spec.storage >= 0 else None
    return {
        "name": spec.name,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "strides": list(spec.strides),
        "offset": spec.offset,
        "storage": spec.storage,
        "size": tensor_size(spec),
        "kind": spec.kind.value,
        "requires_grad": spec.requires_grad,
        "device": spec.device,
        "born": born,
    }


def _kind(node: object) -> str:
    if isinstance(node, dict) and len(node) == 1:
        [tag] = node
        if isinstance(tag, str) and tag.startswith("$"):
            return tag[1:]
    return {type(None): "None", dict: "dict", list: "list"}.get(type(node), type(node).__name__)


def _plain(node: object) -> Json:
    """A node as JSON; what JSON has not is already tagged."""
    value: Json = msgspec.to_builtins(node)
    return value


def _value(node: object) -> str:
    if isinstance(node, dict) and len(node) == 1 and next(iter(node)).startswith("$"):
        node = next(iter(node.values()))
    text = msgspec.json.encode(node).decode()
    return text if len(text) <= _VALUE_MAX else f"{text[: _VALUE_MAX - 3]}..."
