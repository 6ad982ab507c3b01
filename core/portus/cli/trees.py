"""Versions of shelves and of embedding tables as safetensors and as torch files: streamed."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import msgspec

from portus.cli.in_place import check_room
from portus.cli.pools import FoundVersion
from portus.cli.progress import bar
from portus.cli.tables import batches_of
from portus.client.leaving import safetensors
from portus.client.loading.contents import Storages, tensor_bytes
from portus.client.state.tree import decode, distinct, leaf_nodes, tensor_index
from portus.errors import CorruptionError, UsageError
from portus.format.arrays import read_shape
from portus.format.layout import RecordKind
from portus.image.safetensors import DTYPES
from portus.index.log import logged
from portus.index.records import VersionRecord, decode_layout
from portus.spec import TensorSpec


@dataclass(slots=True)
class ExportResult:
    """What was exported, and what was not. ``exact``: every byte is as it was saved. ``batches``:
    up to which each part of protected tables is."""

    size: int = 0
    tensors: int = 0
    exact: bool = False
    shared: list[list[str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    no_weights: list[str] = field(default_factory=list)
    batches: dict[str, int] = field(default_factory=dict)


def write_safetensors(
    found: FoundVersion, out: str, temporary: str, names: Sequence[str], strip: str
) -> ExportResult:
    """Write the tensors to ``temporary``, synced; neither they nor the file are in memory at once.

    names: shell patterns of key paths; none means all. strip: taken off the front of names. Raises
    ``UsageError`` for what safetensors cannot hold, ``CorruptionError``, ``MediumError``.
    """
    with found.reader.pinned(found.entry.info.id) as entry:
        record = found.reader.record(entry)
        storages = Storages(found.reader, record, logged(found.reader.medium, record))
        specs = _layout(found, record)
        tensors, left_out = _tensors(found, record, specs, names, strip)
        if not tensors:
            raise UsageError(f"{found.title} has no tensor of such a name; portus show lists them")
        placed = safetensors.place(tensors)
        total, done = sum(each.size for each in placed), 0
        check_room(out, total)
        near = os.path.dirname(os.path.abspath(out))
        with bar(os.path.basename(out)) as advanced, open(temporary, "wb") as file:
            file.write(safetensors.head_of(placed, _metadata(found)))
            for each in placed:
                try:
                    for piece in tensor_bytes(storages, each.spec, near):
                        file.write(piece)
                        done += len(piece)
                        advanced(done, total)
                except CorruptionError as error:
                    raise CorruptionError(f"{each.name}: {error}") from error
            file.flush()
            os.fsync(file.fileno())
        return ExportResult(
            size=os.path.getsize(temporary),
            tensors=len(placed),
            shared=safetensors.shared(tensors),
            left_out=left_out,
            batches=batches_of(specs, storages),
        )


def write_torch(
    found: FoundVersion, out: str, temporary: str, names: Sequence[str], strip: str
) -> ExportResult:
    """Write the state to ``temporary``, synced, as ``torch.save`` writes it. What of it is no
    tensor is in memory. Raises as ``write_safetensors``."""
    from portus.client.leaving import torch_file
    from portus.client.loading.patterns import matcher
    from portus.client.loading.restore import named

    if strip:
        raise UsageError("--strip is for .safetensors files")
    keep = matcher(list(names) or None)
    fits: Callable[[int], None] = lambda size: check_room(out, size)  # noqa: E731
    with open(temporary, "wb") as file:
        torch_file.write(found.reader, found.entry, file, keep=keep, fits=fits)
        file.flush()
        os.fsync(file.fileno())
    if keep is not None:
        keep.complain(named(found.info))
    with found.reader.pinned(found.entry.info.id) as entry:
        record = found.reader.record(entry)
        specs = _layout(found, record)
        storages = Storages(found.reader, record, logged(found.reader.medium, record))
        batches = batches_of(specs, storages)
    count = sum(_is_wanted(spec.name, names) for spec in specs)
    return ExportResult(size=os.path.getsize(temporary), tensors=count, batches=batches)


def _tensors(
    found: FoundVersion,
    record: VersionRecord,
    specs: Sequence[TensorSpec],
    names: Sequence[str],
    strip: str,
) -> tuple[Mapping[str, TensorSpec], list[str]]:
    """The tensors to write by the name they get, and the key paths of what is left out."""
    leaves = list(leaf_nodes(decode(bytes(found.reader.payload(record.tree, RecordKind.TREE)))))
    tensors: dict[str, TensorSpec] = {}
    left_out = []
    for path, (_, node) in zip(distinct([path for path, _ in leaves]), leaves, strict=True):
        if not _is_wanted(path, names):
            continue
        spec = _tensor_of(node, specs, arrays=record.log is not None)
        if spec is None:
            left_out.append(path)
            continue
        name = path.removeprefix(strip) or "tensor"
        if name in tensors:
            raise UsageError(f"two tensors would be called {name}; strip less")
        tensors[name] = spec
    return tensors, left_out


def _tensor_of(node: object, specs: Sequence[TensorSpec], *, arrays: bool) -> TensorSpec | None:
    """The tensor of a leaf, if it is one. arrays: one of numpy is one too, if it has a storage, and
    a dtype and an order that tensors have: a shelf has little else."""
    index = tensor_index(node)
    if index is None or not isinstance(node, dict) or specs[index].storage < 0:
        return None
    if "$tensor" in node:
        return specs[index]
    if not arrays or "$array" not in node:
        return None
    _, dtype, sizes, fortran = node["$array"]
    shape = read_shape(dtype, sizes, fortran)
    own = specs[index]
    offset, gap = divmod(own.offset, shape.dtype.itemsize or 1)
    is_plain = shape.dtype.name in DTYPES and shape.dtype.isnative
    if not is_plain or shape.fortran or gap:
        return None
    strides = tuple(prod(shape.shape[axis + 1 :]) for axis in range(len(shape.shape)))
    made = TensorSpec(own.name, shape.dtype.name, shape.shape, strides, own.storage, 0)
    return msgspec.structs.replace(made, offset=offset)


def _layout(found: FoundVersion, record: VersionRecord) -> tuple[TensorSpec, ...]:
    return decode_layout(found.reader.payload(record.layout, RecordKind.LAYOUT))


def _is_wanted(path: str, names: Sequence[str]) -> bool:
    """Return whether ``path`` is wanted, by the rule of ``names`` in ``Checkpointer.load``."""
    return not names or any(
        fnmatch.fnmatchcase(path, name) or path.startswith(name + ".") for name in names
    )


def _metadata(found: FoundVersion) -> dict[str, str]:
    info = found.info
    about = {"model": info.model, "step": info.step, "token": info.token.hex()}
    return {"format": "pt", "portus": json.dumps(about)}
