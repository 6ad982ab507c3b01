"""Exports tensors as safetensors, also as a directory that ``from_pretrained`` reads, and states as
torch files: of a checkpoint file, and of a version of a shelf or of tables.

Such a version need not fit into memory. It is outlined over memory that is never touched, and laid
out as any state that Portus saves; then each storage goes from the pool to its place in the file, a
unit (16 MiB) at a time. Numpy arrays are in memory, and so are, for a safetensors file, tensors
that are a part of a storage, or not contiguous.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import torch
from isal import isal_zlib

from portus.engine.copying.segments import memory
from portus.engine.format.checksum import DIGEST_SIZE, UNIT, digest
from portus.engine.image.image import Image
from portus.engine.loading.checkpoint_file import load_file
from portus.engine.loading.patterns import matcher
from portus.engine.spec import TensorSpec
from portus.engine.state.pickling import pickle_state
from portus.engine.state.walk import leaves
from portus.errors import CorruptionError, UsageError, printable
from portus.reach.formats.named_tensors import named_tensor
from portus.reach.formats.safetensors import SUFFIX, safetensors_image
from portus.reach.index.log import LogState
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry, VersionRecord
from portus.reach.leaving.options import ExportOptions, WrittenExport
from portus.reach.pools.contents import read_units
from portus.reach.pools.elsewhere import fill
from portus.reach.pools.restore import Outline, describe, outline_version

PREFIXES: Final = ("pytorch_model_fsdp_0.model.", "model.safetensors.", "state_dict.", "model.")
"""The prefixes of weights' names: in checkpoints of Accelerate, of Lightning, and in most
others."""

_BATCHES: Final = {"batch": "tables", "dense_batch": "dense part"}
"""The tensors of protected tables with the numbers of their batches, and what they count."""

Tensors = dict[str, torch.Tensor]

Units = Iterator[memoryview]
"""The bytes of a tensor, or of a storage, by units; each is valid until the next."""


def write_file(path: str, out: str, options: ExportOptions) -> WrittenExport:
    """Write the values of the checkpoint file at ``path`` to ``out``, where what becomes
    ``options.out`` is made.

    A directory gets tensors alone, and unless some are chosen only weights, by their names in a
    model. Protected tables are read from their own pool. Verifies the file, and runs no code that
    it names. Raises ``UsageError`` for objects of other classes than ``weights_only`` allows,
    ``CorruptionError``, ``MediumError``.
    """
    try:
        state = load_file(path, list(options.names) or None, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise UsageError(
            f"{printable(path)}: it has objects that are no tensors and no plain values"
            f"{f' ({named[1]})' if named else ''}. Load it with torch.load in a program that "
            "trusts it, and save the tensors"
        ) from error
    state = fill(state)
    found = leaves(state)
    tensors = {name: value for name, value in found if isinstance(value, torch.Tensor)}
    done = WrittenExport()
    if options.is_directory and not options.names and not options.strip:
        prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in tensors)), "")
        done.no_weights = [name for name in tensors if not name.startswith(prefix)]
        tensors = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    if not tensors:
        raise UsageError(f"{printable(path)} has no tensor of such a name; portus show lists them")
    done.tensors = len(tensors)
    if options.is_torch:
        torch.save(state, out)
        return done
    done.left_out = [name for name, value in found if not isinstance(value, torch.Tensor)]
    done.shared = _shared_names(tensors)
    tensors = _shorten(tensors, options.strip)
    if options.is_directory:
        _save_parts(out, tensors, options.limit)
    else:
        _save(out, tensors)
    return done


def write_version(
    pool: PoolReader,
    entry: VersionEntry,
    target: BinaryIO,
    options: ExportOptions,
    advance: Callable[[int], None] = lambda size: None,
) -> WrittenExport:
    """Write the state of a version of a shelf or of tables as ``torch.save`` does, or its tensors
    as safetensors, to ``target``, which is empty and can be sought in. advance: takes the bytes of
    each piece.

    Raises ``CorruptionError`` and ``MediumError``, after it may have written; ``StaleError``; and
    ``UsageError`` for what such a file cannot hold, before it writes.
    """
    keep = matcher(list(options.names) or None)
    with outline_version(pool, entry, keep if options.is_torch else None) as outline:
        batches = batches_of(pool, outline.record, outline.logged, outline.tensors)
        done = WrittenExport(batches=batches)
        if options.is_torch:
            found = pickle_state(outline.state)
            if keep is not None:
                keep.complain(describe(entry.info))
            done.tensors = sum(keep is None or keep(spec.name) for spec in outline.tensors)
            # The archive's name in torch's files without a name.
            image = found.image("archive")
            _write(image, (_read(pool, outline, e) for e in found.storages), target, advance)
            return done
        plain = {spec.name for spec in outline.tensors}
        tensors: Tensors = {}
        for path, value in leaves(outline.state):
            if keep is not None and not keep(path):
                continue
            if isinstance(value, np.ndarray):
                with contextlib.suppress(TypeError, ValueError):  # torch has no such dtype
                    value = torch.from_numpy(value)
            if path in plain and isinstance(value, torch.Tensor) and not value.is_meta:
                tensors[path] = value
            else:
                done.left_out.append(path)
        info = entry.info
        if not tensors:
            raise UsageError(
                f"{info.model}@{info.step} has no tensor of such a name; portus show lists them"
            )
        done.tensors, done.shared = len(tensors), _shared_names(tensors)
        about = {"model": info.model, "step": info.step, "token": info.token.hex()}
        tensors = _shorten(tensors, options.strip)
        units = {name: _read_tensor(pool, outline, each) for name, each in tensors.items()}
        image, sorted_units = _lay_out(tensors, units, portus=json.dumps(about))
        _write(image, sorted_units, target, advance)
        return done


def batches_of(
    pool: PoolReader, record: VersionRecord, logged: LogState, tensors: Sequence[TensorSpec]
) -> dict[str, int]:
    """Return the batches of a version of protected tables, whose log may continue after the step of
    the version. Return nothing for other versions, and for damaged ones."""
    specs = {each.name: each for each in tensors if each.dtype == "int64" and not each.shape}
    found: dict[str, int] = {}
    if _BATCHES.keys() <= specs.keys():
        with contextlib.suppress(CorruptionError):
            for name, part in _BATCHES.items():
                at = 8 * specs[name].offset
                unit = next(read_units(pool, record, logged, specs[name].storage), b"")
                found[part] = int.from_bytes(unit[at : at + 8], "little", signed=True)
    return found


def _read(pool: PoolReader, outline: Outline, storage: torch.UntypedStorage) -> Units:
    """Yield the bytes of a storage of the version."""
    index = outline.indices[storage._cdata]
    if not storage.nbytes():
        yield memoryview(b"")  # an empty unit has a digest, too
    try:
        yield from read_units(pool, outline.record, outline.logged, index)
    except CorruptionError as error:
        raise CorruptionError(f"{outline.name(index)}: {error}") from error


def _read_tensor(pool: PoolReader, outline: Outline, tensor: torch.Tensor) -> Units:
    """Yield the elements of a tensor of the version in row-major order."""
    storage = tensor.untyped_storage()
    if storage._cdata in outline.indices:
        is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if is_plain and tensor.nbytes == storage.nbytes():
            yield from _read(pool, outline, storage)
            return
        at = storage.data_ptr()
        for unit in _read(pool, outline, storage):
            memory(at, len(unit))[:] = unit
            at += len(unit)
    yield from _units_of(tensor)


def _units_of(tensor: torch.Tensor) -> Units:
    """Yield the elements of a tensor in row-major order."""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = memory(whole.data_ptr(), whole.nbytes)
    for start in range(0, max(1, len(flat)), UNIT):
        yield flat[start : start + UNIT]


def _shared_names(tensors: Tensors) -> list[list[str]]:
    """Return the names of tensors that share memory, which a safetensors file cannot express."""
    users: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        users.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return [names for address, names in users.items() if address and len(names) > 1]


def _shorten(tensors: Tensors, strip: str) -> Tensors:
    """Return tensors by their names without the prefix ``strip``."""
    named: Tensors = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(strip) or "tensor"
        if short in named:
            raise UsageError(f"two tensors would be called {short}; strip less")
        named[short] = tensor
    return named


def _save_parts(out: str, tensors: Tensors, limit: int) -> None:
    """Write tensors to files of at most ``limit`` bytes each, as transformers names them, with an
    index if there are several."""
    parts, room = [Tensors()], limit
    for name, tensor in tensors.items():
        if parts[-1] and tensor.nbytes > room:
            parts.append({})
            room = limit
        parts[-1][name] = tensor
        room -= tensor.nbytes
    if len(parts) == 1:
        _save(os.path.join(out, f"model{SUFFIX}"), tensors)
        return
    index = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}{SUFFIX}"
        _save(os.path.join(out, file), part)
        index.update(dict.fromkeys(part, file))
    size = sum(each.nbytes for each in tensors.values())
    data = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2)
    Path(out, f"model{SUFFIX}.index.json").write_text(data)


def _save(path: str, tensors: Tensors) -> None:
    with open(path, "wb") as file:
        units = {name: _units_of(tensor) for name, tensor in tensors.items()}
        _write(*_lay_out(tensors, units), file)


def _lay_out(
    tensors: Tensors, units: Mapping[str, Units], **metadata: str
) -> tuple[Image, list[Units]]:
    """Return the image of a safetensors file, and the units of its tensors in their order."""
    try:
        named = [named_tensor(name, tensor) for name, tensor in tensors.items()]
    except UsageError as error:
        raise UsageError(f"{error}; leave it out with --names, or export to a .pt file") from error
    named.sort(key=lambda each: each.rank)
    image = safetensors_image(named, {"format": "pt", **metadata})
    return image, [units[each.name] for each in named]


def _write(
    image: Image,
    storages: Iterable[Units],
    target: BinaryIO,
    advance: Callable[[int], None] = lambda size: None,
) -> None:
    digests, crcs = [], []
    for offset, units in zip(image.offset.tolist(), storages, strict=True):
        target.seek(offset)
        crc = 0
        for unit in units:
            target.write(unit)
            advance(len(unit))
            digests.append(digest(unit))
            crc = isal_zlib.crc32(unit, crc)
        crcs.append(crc)
    rows = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_SIZE)
    for literal in image.literals(rows, np.array(crcs, np.uint32)):
        target.seek(literal.offset)
        target.write(literal.data)
