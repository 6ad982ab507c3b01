"""``portus show MODEL[@STEP]``: the versions of a model, or all that is in one of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import msgspec

from portus.cli import files
from portus.cli.grouped import FoundGroup, cuts_of, find_groups, group_document, ranks_text
from portus.cli.output import Json, Output, age_text, count_text, moment_text, size_text
from portus.cli.pools import (
    FoundVersion,
    Holder,
    aimed,
    link_document,
    link_text,
    open_pools,
    version_document,
)
from portus.cli.tables import batches_of
from portus.client.loading.contents import Storages
from portus.client.state.tree import decode, distinct, leaf_nodes, tensor_index
from portus.format.dtypes import ITEM_SIZES
from portus.format.layout import RecordKind
from portus.index.log import logged
from portus.index.place import PlaceKind
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
        return files.show(path, output)
    target, pool = aimed(target, pool)
    with open_pools(pool, target, mirrors=True) as pools:
        groups = find_groups(pools, target)
        if groups:
            _show_groups(target, groups, output)
            return 0
        found = pools.select(target)
        if all(each.info.model == target for each in found):
            _show_model(target, found, output)
        else:
            documents = [_show_version(each, output) for each in found]
            output.document({"versions": documents})
    return 0


def _show_groups(target: str, found: list[FoundGroup], output: Output) -> None:
    """All groups of a model; of a step, its ranks and its tensors too."""
    documents: list[Json] = []
    for each in found:
        document: dict[str, Json] = {**group_document(each.group), "ranks": _ranks(each)}
        if each.group.model != target:
            _say_group(each, document, output)
        documents.append(document)
    if all(each.group.model == target for each in found):
        rows = [(each.group.model, str(each.group.step), ranks_text(each.group)) for each in found]
        output.table(("GROUP", ">STEP", "RANKS"), rows)
    output.document({"groups": documents})


def _ranks(found: FoundGroup) -> list[Json]:
    return [
        {**version_document(part.info), "rank": rank, "pool": part.path}
        for rank, part in found.parts.items()
    ]


def _say_group(found: FoundGroup, document: dict[str, Json], output: Output) -> None:
    """A group for people; its tensors are put into ``document`` too, if all ranks are there."""
    group = found.group
    output.line(f"{group.model}@{group.step}: {ranks_text(group)}")
    rows = [
        (str(rank), age_text(part.info.time_ns), size_text(part.info.size), part.path)
        for rank, part in found.parts.items()
    ]
    rows += [(str(rank), "", "", "not there") for rank in group.missing]
    output.table((">RANK", "SAVED", ">SIZE", "POOL"), sorted(rows, key=lambda row: int(row[0])))
    if not group.is_complete:
        return
    tensors, others = cuts_of(found)
    output.line()
    output.table(
        ("NAME", "TYPE", "SHAPE", ">PIECES"),
        [
            (name, cut.dtype, f"[{', '.join(map(str, cut.shape))}]", str(len(cut.pieces)))
            for name, cut in tensors.items()
        ],
    )
    document["tensors"] = [
        {
            "name": name,
            "dtype": cut.dtype,
            "shape": list(cut.shape),
            "ranks": sorted({piece.at.rank for piece in cut.pieces}),
        }
        for name, cut in tensors.items()
    ]
    document["others"] = list(others)


def _show_model(model: str, found: list[FoundVersion], output: Output) -> None:
    held = [each.held() for each in found]
    unique = _unique(found)
    rows = [
        (
            str(each.info.step),
            str(each.info.id),
            str(each.info.commit),
            age_text(each.info.time_ns) + (", inexact" if each.info.inexact else ""),
            size_text(each.info.size),
            size_text(unique[each]) if each in unique else "",
            ", ".join(map(link_text, links)),
        )
        for each, links in zip(found, held, strict=True)
    ]
    for path in dict.fromkeys(each.path for each in found):
        output.line(f"{model} in {path}")
    output.table((">STEP", ">ID", ">COMMIT", "SAVED", ">SIZE", ">UNIQUE", "REFERENCES"), rows)
    versions: list[Json] = [
        {
            **_identity(each),
            "unique": unique.get(each),
            "references": [link_document(link) for link in links],
        }
        for each, links in zip(found, held, strict=True)
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
        tensors = decode_layout(reader.payload(record.layout, RecordKind.LAYOUT))
        changed = logged(reader.medium, record)
        root = decode(changed.tree or bytes(reader.payload(record.tree, RecordKind.TREE)))
        batches = batches_of(tensors, Storages(reader, record, changed))
    paths, nodes = _leaves(root)
    links = found.held()
    unique = _unique([found]).get(found)
    _say_head(found, record, links, unique, output)
    if record.log is not None:
        text = "1 entry" if changed.entries == 1 else f"{changed.entries} entries"
        output.line(f"log     {text}, in {size_text(record.log.extent.length)}")
    if batches:
        output.line(
            f"batch   {', '.join(f'{each} of the {name}' for name, each in batches.items())}"
        )
    if record.log is not None or batches:
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
        **_identity(found),
        "shared": _shared(record),
        "unique": unique,
        "changes": changed.entries,
        "batches": dict(batches),
        "references": [link_document(link) for link in links],
        "tensors": [_tensor_document(spec, record) for spec in tensors],
        "leaves": [
            {"name": path, "value": _plain(node)}
            for path, node in zip(paths, nodes, strict=True)
            if tensor_index(node) is None
        ],
    }


def _identity(found: FoundVersion) -> dict[str, Json]:
    return {**version_document(found.info), "pool": found.path}


def _leaves(root: object) -> tuple[list[str], list[object]]:
    found = list(leaf_nodes(root))
    return distinct([path for path, _ in found]), [node for _, node in found]


def _say_head(
    found: FoundVersion,
    record: VersionRecord,
    links: Sequence[Holder],
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
    for link in links:
        output.line(f"held by {link_text(link)}")
    output.line()


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
