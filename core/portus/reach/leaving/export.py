"""Exports tensors as safetensors, also as a directory that ``from_pretrained`` reads, and states as
torch files: of a checkpoint file, and of a version of a shelf or of tables.

A torch file, and such a version, need not fit into memory. Its state is outlined over memory that
is never touched, and laid out as any state that Portus saves; then each storage goes to its place
in the new file, a unit (16 MiB) at a time. Numpy arrays are in memory, and so are, for a
safetensors file, tensors that are a part of a storage, or not contiguous.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch
from isal import isal_zlib

from portus.engine.copying.segments import memory
from portus.engine.format.checksum import DIGEST_SIZE, UNIT, digest
from portus.engine.image.image import Image
from portus.engine.image.key_paths import storage_places
from portus.engine.loading.checkpoint_file import format_of, load_opened
from portus.engine.loading.open_file import OpenFile, reads
from portus.engine.loading.patterns import matcher, part_of
from portus.engine.loading.restore_over import StoredState
from portus.engine.loading.torch_file import load_torch, open_state
from portus.engine.state.pickling import pickle_state
from portus.engine.state.walk import is_plain, leaves
from portus.errors import CorruptionError, UsageError, printable
from portus.reach.formats.safetensors import SUFFIX, NamedTensor, safetensors_image
from portus.reach.formats.safetensors_file import named_tensor
from portus.reach.leaving.options import ExportOptions, WrittenExport
from portus.reach.pools.elsewhere import fill
from portus.reach.pools.state_file import StateFile

PREFIXES: Final = ("pytorch_model_fsdp_0.model.", "model.safetensors.", "state_dict.", "model.")
"""The prefixes of weights' names: in checkpoints of Accelerate, of Lightning, and in most
others."""

_BATCHES: Final = {"batch": "tables", "dense_batch": "dense part"}
"""The tensors of protected tables with the numbers of their batches, and what they count."""

Tensors = dict[str, torch.Tensor]

Units = Iterator[memoryview]
"""The bytes of a tensor, or of a storage, by units; each is valid until the next."""


def write(
    file: OpenFile,
    where: str,
    out: str,
    options: ExportOptions,
    *,
    advance: Callable[[int], None] = lambda size: None,
    about: Mapping[str, object] | None = None,
) -> WrittenExport:
    """Write the values of an open checkpoint file to ``out``, where what becomes ``options.out`` is
    made. where: its name, for errors. advance: takes the bytes of each piece. about: of its
    version, for the metadata of a safetensors file.

    A directory gets tensors alone, and unless some are chosen only weights, by their names in a
    model. Protected tables are read from their own pool. Verifies the file, and runs no code that
    it names. Raises ``UsageError`` for objects of other classes than ``weights_only`` allows, and
    for what such a file cannot hold, before it writes; ``CorruptionError``, ``MediumError``.
    """
    stored = _open(file, where)
    keep = matcher(list(options.names) or None)
    state = stored.outline if keep is None else part_of(stored.outline, keep)
    if keep is not None:
        keep.complain(where)
    state = fill(state)
    done = WrittenExport(batches=batches_of(file, where))
    tensors, done.left_out = _tensors_in(state, isinstance(file, StateFile))
    if options.is_directory and not options.names and not options.strip:
        prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in tensors)), "")
        done.no_weights = [name for name in tensors if not name.startswith(prefix)]
        tensors = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    done.tensors = len(tensors)
    if not tensors and (options.names or not options.is_torch):
        raise UsageError(f"{where} has no tensor of such a name; portus show lists them")
    if options.is_torch:
        found, done.left_out = pickle_state(state), []
        # The archive's name in torch's files without a name.
        _write(out, found.image("archive"), map(stored.units, found.storages), advance)
        return done
    done.shared = _shared_names(tensors)
    tensors = _shorten(tensors, options.strip)
    noted = {} if about is None else {"portus": json.dumps(about)}
    for path, part in _parts_in(out, tensors, options):
        image, named = _lay_out(part, noted)
        units = (_units(stored, part[each.name]) for each in named)
        _write(path, image, units, advance)
    return done


def _open(file: OpenFile, where: str) -> StoredState:
    """Return the state in an open file, of which tensors of torch files are not read yet."""
    if isinstance(file, StateFile):
        with file.naming() as settings:
            return open_state(file, where, **settings)
    settings = {"map_location": "cpu", "weights_only": True}
    try:
        if format_of(reads(file), where).load is load_torch:
            return open_state(file, where, **settings)
        state = load_opened(file, where, None, verify=True, settings=settings)
        return StoredState(where, state)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise UsageError(
            f"{printable(where)}: it has objects that are no tensors and no plain values"
            f"{f' ({named[1]})' if named else ''}. Load it with torch.load in a program that "
            "trusts it, and save the tensors"
        ) from error


def _tensors_in(state: object, plain: bool) -> tuple[Tensors, list[str]]:
    """Return the tensors in a state, its numpy arrays too, and the names of its other values.
    plain: tensors of special classes are such others."""
    tensors, others = Tensors(), list[str]()
    for name, value in leaves(state):
        if isinstance(value, np.ndarray):
            with contextlib.suppress(TypeError, ValueError):  # torch has no such dtype
                value = torch.from_numpy(value)
        is_tensor = is_plain(value) if plain else isinstance(value, torch.Tensor)
        if is_tensor and not value.is_meta:
            tensors[name] = value
        else:
            others.append(name)
    return tensors, others


def batches_of(file: OpenFile, where: str) -> dict[str, int]:
    """Return the batches of a version of protected tables, whose log may continue after the step of
    the version. Return nothing for other versions, and for damaged ones."""
    if not isinstance(file, StateFile) or not _BATCHES.keys() <= {
        each.pattern_path for each in storage_places(file.pickle)
    }:
        return {}
    with contextlib.suppress(CorruptionError), file.naming() as settings:
        state = load_torch(file, where, list(_BATCHES), verify=True, settings=settings)
        return {part: int(state[name]) for name, part in _BATCHES.items()}
    return {}


def _units(stored: StoredState, tensor: torch.Tensor) -> Units:
    """Yield the elements of a tensor in row-major order."""
    storage = tensor.untyped_storage()
    is_simple = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    if is_simple and tensor.nbytes == storage.nbytes():
        yield from stored.units(storage)
        return
    stored.fill(storage)
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


def _parts_in(out: str, tensors: Tensors, options: ExportOptions) -> Iterator[tuple[str, Tensors]]:
    """Yield the paths of the files to write, and their tensors: ``out``; or in a directory files of
    at most ``limit`` bytes each, as transformers names them, with an index if there are several."""
    if not options.is_directory:
        yield out, tensors
        return
    parts, room = [Tensors()], options.limit
    for name, tensor in tensors.items():
        if parts[-1] and tensor.nbytes > room:
            parts.append({})
            room = options.limit
        parts[-1][name] = tensor
        room -= tensor.nbytes
    if len(parts) == 1:
        yield os.path.join(out, f"model{SUFFIX}"), tensors
        return
    index = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}{SUFFIX}"
        yield os.path.join(out, file), part
        index.update(dict.fromkeys(part, file))
    size = sum(each.nbytes for each in tensors.values())
    data = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2)
    Path(out, f"model{SUFFIX}.index.json").write_text(data)


def _lay_out(tensors: Tensors, noted: Mapping[str, str]) -> tuple[Image, list[NamedTensor]]:
    """Return the image of a safetensors file, and its tensors in their order."""
    try:
        named = [named_tensor(name, tensor) for name, tensor in tensors.items()]
    except UsageError as error:
        raise UsageError(f"{error}; leave it out with --names, or export to a .pt file") from error
    named.sort(key=lambda each: each.rank)
    return safetensors_image(named, {"format": "pt", **noted}), named


def _write(
    path: str, image: Image, storages: Iterable[Units], advance: Callable[[int], None]
) -> None:
    digests, crcs = [], []
    with open(path, "wb") as target:
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
