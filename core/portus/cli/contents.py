"""Versions of shelves and of embedding tables: their batches, and their export as safetensors and
as torch files."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO, Final

from portus.cli.in_place import check_room
from portus.cli.output import counter
from portus.engine.loading.patterns import Matcher, matcher
from portus.engine.spec import TensorSpec, VersionInfo
from portus.errors import CorruptionError, UsageError
from portus.reach.formats.safetensors import LENGTH_SIZE, header
from portus.reach.index.log import read_log
from portus.reach.leaving import safetensors
from portus.reach.leaving.export_result import WrittenExport
from portus.reach.places.version import OpenVersion
from portus.reach.pools.contents import Storages, tensor_bytes

_BATCHES: Final = {"batch": "tables", "dense_batch": "dense part"}
"""The tensors of protected tables with the numbers of their batches, and what they count."""


def batches_of(tensors: Sequence[TensorSpec], storages: Storages) -> dict[str, int]:
    """Return the batches of a version of protected tables, whose log may continue after the step of
    the version. Return nothing for other versions, and for damaged ones."""
    specs = {each.name: each for each in tensors if each.dtype == "int64" and not each.shape}
    found: dict[str, int] = {}
    if _BATCHES.keys() <= specs.keys():
        with contextlib.suppress(CorruptionError):
            for name, part in _BATCHES.items():
                [data] = tensor_bytes(storages, specs[name], tempfile.gettempdir())
                found[part] = int.from_bytes(data, "little", signed=True)
    return found


def write(
    opened: OpenVersion,
    out: str,
    temporary: str,
    *,
    names: Sequence[str],
    strip: str,
    is_torch: bool,
) -> WrittenExport:
    """Write a version to ``temporary``, synced: its tensors as safetensors, or its state as
    ``torch.save`` writes it. Neither all tensors nor the whole file are ever in memory.

    out: where it goes. names: shell patterns of key paths; none means all. strip: removed from the
    beginning of names. Raises ``UsageError`` for what such a file cannot hold, ``CorruptionError``,
    ``MediumError``.
    """
    from portus.reach.pools.restore import contents_of, describe  # and torch with it

    reader, entry, record = opened.reader, opened.entry, opened.record
    keep = matcher(list(names) or None)
    with open(temporary, "wb") as file:
        storages = Storages(reader, record, read_log(reader.medium, record))
        specs, leaves = contents_of(reader, entry)
        if is_torch:
            from portus.reach.leaving import torch_file

            fits: Callable[[int], None] = lambda size: check_room(out, size)  # noqa: E731
            torch_file.write(reader, entry, file, keep=keep, fits=fits)
            if keep is not None:
                keep.complain(describe(entry.info))
            done = WrittenExport(tensors=sum(keep is None or keep(spec.name) for spec in specs))
        else:
            tensors, left_out = _tensors(leaves, keep, strip)
            if not tensors:
                text = "has no tensor of such a name; portus show lists them"
                raise UsageError(f"{entry.info.model}@{entry.info.step} {text}")
            _write_safetensors(tensors, storages, entry.info, out, file)
            shared = safetensors.shared_names((n, spec.storage) for n, spec in tensors.items())
            done = WrittenExport(tensors=len(tensors), shared=shared, left_out=left_out)
        file.flush()
        # The caller renames the file, which must not become durable before its bytes.
        os.fsync(file.fileno())
        done.size, done.batches = os.path.getsize(temporary), batches_of(specs, storages)
        return done


def _write_safetensors(
    tensors: Mapping[str, TensorSpec],
    storages: Storages,
    info: VersionInfo,
    out: str,
    file: BinaryIO,
) -> None:
    placed = safetensors.place(tensors)
    named = [each for each, _ in placed]
    total = sum(each.size for each in named)
    check_room(out, total)
    about = {"model": info.model, "step": info.step, "token": info.token.hex()}
    near = os.path.dirname(os.path.abspath(out))
    with counter(os.path.basename(out), total) as add:
        metadata = {"format": "pt", "portus": json.dumps(about)}
        file.write(header(named, metadata, alignment=LENGTH_SIZE))
        for each, spec in placed:
            try:
                for piece in tensor_bytes(storages, spec, near):
                    file.write(piece)
                    add(len(piece))
            except CorruptionError as error:
                raise CorruptionError(f"{each.name}: {error}") from error


def _tensors(
    leaves: Sequence[tuple[str, object]], keep: Matcher | None, strip: str
) -> tuple[Mapping[str, TensorSpec], list[str]]:
    """Return the tensors to write by their new names, arrays included, and the key paths of the
    other values."""
    tensors: dict[str, TensorSpec] = {}
    left_out = []
    for path, value in leaves:
        if keep is not None and not keep(path):
            continue
        if not isinstance(value, TensorSpec) or value.storage < 0:
            left_out.append(path)
            continue
        name = path.removeprefix(strip) or "tensor"
        if name in tensors:
            raise UsageError(f"two tensors would be called {name}; strip less")
        tensors[name] = value
    return tensors, left_out
