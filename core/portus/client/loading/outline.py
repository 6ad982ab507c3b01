"""What is in a checkpoint file, without the bytes of its tensors: for people who look."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from portus.client.loading.checkpoint_file import outlined, read_note
from portus.image.key_paths import storage_places
from portus.image.safetensors import DTYPES
from portus.image.safetensors_reader import SafetensorsFile
from portus.image.torch_reader import TorchFile

_VALUE_MAX: Final = 60
_NAMES: Final = {code: name for name, code in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class OutlinedTensor:
    """One tensor. ``dtype``: empty if it is of a class that was not made; then ``size`` is that of
    its storage. ``size``: in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class FileOutline:
    """``note``: what a ``Checkpointer`` noted, as text. ``others``: key paths and values that are
    no tensors."""

    has_digests: bool
    note: str
    tensors: tuple[OutlinedTensor, ...]
    others: tuple[tuple[str, str], ...]


def outline_of(path: str | os.PathLike[str]) -> FileOutline:
    """Return what is in the file at ``path``. Runs no code that it names: of classes that
    ``weights_only`` refuses, only the names and storages of tensors are told. Raises
    ``CorruptionError``, ``MediumError``."""
    found = outlined(path)
    if isinstance(found, SafetensorsFile):
        return FileOutline(
            has_digests=found.digests is not None,
            note=found.note or "",
            tensors=tuple(
                OutlinedTensor(e.name, _NAMES.get(e.dtype, e.dtype), e.shape, e.size)
                for e in found.tensors
            ),
            others=tuple((key, _text(value)) for key, value in found.metadata.items()),
        )
    assert isinstance(found, TorchFile)
    note = read_note(path)
    try:
        state = torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, TypeError):
        lengths = dict(zip(found.keys, found.length.tolist(), strict=True))
        places = [each for each in storage_places(found.pickle) if each.storage in lengths]
        tensors = [OutlinedTensor(e.dotted, "", (), lengths[e.storage]) for e in places]
        leaves: list[tuple[str, Any]] = []
    else:
        leaves = leaves_of(state)
        tensors = [
            OutlinedTensor(
                name, str(value.dtype).removeprefix("torch."), tuple(value.shape), value.nbytes
            )
            for name, value in leaves
            if isinstance(value, torch.Tensor)
        ]
    return FileOutline(
        has_digests=found.digests is not None,
        note="" if note is None else note.decode(errors="replace"),
        tensors=tuple(tensors),
        others=tuple(
            (name, _text(value)) for name, value in leaves if not isinstance(value, torch.Tensor)
        ),
    )


def leaves_of(state: object) -> list[tuple[str, Any]]:
    """Return the values in nested dicts, lists and tuples, and their key paths, with dots."""
    return list(_leaves(state, ()))


def _leaves(value: Any, keys: tuple[object, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _leaves(each, (*keys, key))
    elif isinstance(value, (list, tuple)) and value:
        for index, each in enumerate(value):
            yield from _leaves(each, (*keys, index))
    else:
        yield ".".join(map(str, keys)), value


def _text(value: object) -> str:
    plain = value is None or isinstance(value, (bool, int, float, str, list, tuple, dict))
    text = repr(value) if plain else type(value).__name__
    return text if len(text) <= _VALUE_MAX else f"{text[: _VALUE_MAX - 3]}..."
