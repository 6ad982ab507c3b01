"""The contents of a checkpoint file, for people, without the bytes of its tensors."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from portus.engine.image.key_paths import storage_places
from portus.engine.image.torch_reader import TorchFile
from portus.engine.loading.checkpoint_file import note_of, outline_file
from portus.engine.loading.open_file import OpenFile, reads
from portus.engine.loading.torch_file import load_outline
from portus.engine.state.walk import leaves
from portus.errors import PortusError, printable
from portus.reach.formats.safetensors import DTYPES, NamedTensor, SafetensorsFile
from portus.reach.pools.state_file import StateFile

_VALUE_MAX: Final = 60
_NAMES: Final = {code: name for name, code in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class FileOutline:
    """``note``: the note of a ``Checkpointer``, as text. ``tensors``: with torch's names of dtypes;
    "" if the tensor's class was not loaded: then ``size`` is that of its storage. ``others``: key
    paths and values that are no tensors."""

    has_digests: bool
    note: str
    tensors: tuple[NamedTensor, ...]
    others: tuple[tuple[str, str], ...]


def outline_in(file: OpenFile, where: str) -> FileOutline:
    """Return the outline of an open torch or safetensors file; ``where``: its name in errors. Runs
    no code that the file names: for classes that ``weights_only`` refuses, it lists only the names
    and storages of tensors. Raises ``CorruptionError``, ``MediumError``."""
    found = outline_file(reads(file), file.size, printable(where))
    if isinstance(found, SafetensorsFile):
        return FileOutline(
            has_digests=found.digests is not None,
            note=found.note or "",
            tensors=tuple(replace(e, dtype=_NAMES.get(e.dtype, e.dtype)) for e in found.tensors),
            others=tuple((key, value_text(value)) for key, value in found.metadata.items()),
        )
    assert isinstance(found, TorchFile)
    note = note_of(file, where)
    values: list[tuple[str, Any]] = []
    try:
        if isinstance(file, StateFile):
            with file.naming() as settings:
                values = leaves(load_outline(file, found, **settings))
        else:
            values = leaves(load_outline(file, found, map_location="meta", weights_only=True))
    except (pickle.UnpicklingError, RuntimeError, ValueError, TypeError, PortusError):
        lengths = dict(zip(found.keys, found.length.tolist(), strict=True))
        places = [each for each in storage_places(found.pickle) if each.storage in lengths]
        tensors = [NamedTensor(e.pattern_path, "", (), lengths[e.storage]) for e in places]
    else:
        tensors = [
            NamedTensor(
                name, str(value.dtype).removeprefix("torch."), tuple(value.shape), value.nbytes
            )
            for name, value in values
            if isinstance(value, (torch.Tensor, np.ndarray))
        ]
    return FileOutline(
        has_digests=found.digests is not None,
        note="" if note is None else note.decode(errors="replace"),
        tensors=tuple(tensors),
        others=tuple(
            (name, value_text(value))
            for name, value in values
            if not isinstance(value, (torch.Tensor, np.ndarray))
        ),
    )


def value_text(value: object) -> str:
    """Return a plain value for people, and for others the name of their class."""
    plain = value is None or isinstance(value, (bool, int, float, str, list, tuple, dict))
    text = repr(value) if plain else type(value).__name__
    return text if len(text) <= _VALUE_MAX else f"{text[: _VALUE_MAX - 3]}..."
