"""The values in a state, by their key paths.

A **leaf** is a value with a key path: a tensor, a single value, an empty container, and a list or
tuple of only None, bool, int, float, str. A key path joins the keys on the way by dots; a place in
a list is its number; the fields of a dataclass, named tuple or namespace are their names. Dots in
keys are kept, and keys that are not strings are written as Python does (``1``, ``(0, 1)``). If two
leaves have the same path, the later ones get ``#2``, ``#3``... Values in sets, and in attributes of
containers (``_metadata`` of an OrderedDict), have no path.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from portus.engine.spec import TensorKind, TensorSpec
from portus.errors import UsageError


@dataclass(frozen=True)
class Elsewhere:
    """Stands for a tensor that is stored in a mark: a version of the tables for one batch. It is in
    the engine, so that every process can load a state that has it.

    pool: the path of the tables' pool. token: the mark's token, in hex. batch: the number of
    batches that the mark contains. path: the keys of the tensor in the mark's state.
    """

    pool: str
    token: str
    batch: int
    path: tuple[str | int, ...]


# The name of the class in a file of ``torch.save``: where it is public.
Elsewhere.__module__ = "portus.embedding"

torch.serialization.add_safe_globals([Elsewhere])


PLAIN: Final = frozenset({type(None), bool, int, float, str})
"""Types of single values, without their subclasses."""

PLAIN_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""The classes of plain tensors; ``nn.Buffer`` makes a Tensor."""

DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.qint", "torch.quint"))
}
"""Every dtype that a plain tensor may have, by name: all but the quantized ones."""

_SINGLE: Final = PLAIN | PLAIN_TENSORS
ROWS: Final = (list, tuple, deque)
NAMESPACES: Final = (argparse.Namespace, types.SimpleNamespace)
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StateContents:
    """The contents of a state. ``tensors``: the plain ones; a spec has the place of its storage in
    ``storages``, -1 for a meta tensor over none of them. ``others``: all other leaves."""

    tensors: tuple[TensorSpec, ...]
    storages: list[torch.UntypedStorage]
    others: list[tuple[str, Any]]

    def refuse_freed(self) -> None:
        """Raise ``UsageError`` if the memory of a tensor was freed."""
        for spec in self.tensors:
            if spec.storage >= 0:
                refuse_freed(spec, self.storages[spec.storage])


def walk(state: object, storages: Iterable[torch.UntypedStorage] = ()) -> StateContents:
    """Return a state's contents. storages: the first of its ``storages``. Raises as ``leaves``."""
    held = list(storages)
    place = {storage._cdata: index for index, storage in enumerate(held)}
    specs, others = [], []
    for path, value in leaves(state):
        if not is_plain(value):
            others.append((path, value))
            continue
        storage = value.untyped_storage()
        number = place.get(storage._cdata, -1)
        if number < 0 and not value.is_meta:
            number = place[storage._cdata] = len(held)
            held.append(storage)
        specs.append(_spec(path, value, number))
    return StateContents(tuple(specs), held, others)


def leaves(state: object) -> list[tuple[str, Any]]:
    """Return the leaves of a state, by distinct key paths. Raise ``UsageError`` for a loop."""
    found: list[tuple[str, Any]] = []
    try:
        _look(state, "", (), found)
    except RecursionError as error:
        raise UsageError("the state is nested too deep for this call stack") from error
    if len({path for path, _ in found}) == len(found):
        return found
    used: set[str] = set()
    named = []
    for path, value in found:
        name, count = path, 1
        while name in used:
            count += 1
            name = f"{path}#{count}"
        used.add(name)
        named.append((name, value))
    return named


def is_plain(value: object) -> bool:
    """Return True for a tensor that is only a view of a storage."""
    return (
        type(value) in PLAIN_TENSORS
        and isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_nested
        and value.dtype in _NAMES
    )


def children(value: Any) -> Iterable[tuple[object, Any]] | None:
    """Return the keys and values directly inside a container; None for a leaf."""
    if isinstance(value, dict):
        return value.items() or None
    if isinstance(value, ROWS):
        if not value or is_row(value):
            return None
        names = getattr(value, "_fields", None)
        return enumerate(value) if names is None else zip(names, value, strict=True)
    if isinstance(value, NAMESPACES) or is_dataclass(value):
        return fields_of(value).items() or None
    return None


def is_row(value: Sequence[object]) -> bool:
    """Return True if a list or tuple has only single values."""
    return PLAIN.issuperset(map(type, value))


def is_dataclass(value: object) -> bool:
    """Return True for an object of a dataclass, except an ``Elsewhere``, a tensor's placeholder."""
    if isinstance(value, (type, Elsewhere)):
        return False
    return dataclasses.is_dataclass(value)


def fields_of(value: Any) -> dict[str, object]:
    """Return the attributes of a namespace, or of an object of a dataclass, those in slots too."""
    fields = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)]
        fields |= {name: getattr(value, name) for name in names if hasattr(value, name)}
    return fields


def below(path: str, key: object) -> str:
    """Return the key path of the value at ``key`` in the container at ``path``."""
    return f"{path}.{key}" if path else str(key)


def refuse_freed(spec: TensorSpec, storage: torch.UntypedStorage) -> None:
    """Raise ``UsageError`` for a tensor whose memory was freed."""
    needed = DTYPES[spec.dtype].itemsize * end_of(spec)
    if storage.nbytes() < needed:
        raise UsageError(
            f"{spec.name}: needs {needed} bytes, but its storage has {storage.nbytes()}; it was "
            "freed (FSDP does that): gather it first"
        )


def end_of(spec: TensorSpec) -> int:
    """Return the elements from the start of the storage to the end of the last one of a tensor."""
    if 0 in spec.shape:
        return 0
    steps = zip(spec.shape, spec.strides, strict=True)
    return spec.offset + sum((size - 1) * stride for size, stride in steps) + 1


def _look(value: Any, path: str, within: tuple[int, ...], found: list[tuple[str, Any]]) -> None:
    inside = children(value)
    if inside is None:
        found.append((path, value))
        return
    # Only its containers: a container at two places is no loop.
    if id(value) in within:
        raise UsageError(f"{path:.200}: the state contains itself; expected one without loops")
    within = (*within, id(value))
    for key, each in inside:
        name = below(path, key)
        if type(each) in _SINGLE:  # without a call: most are
            found.append((name, each))
        else:
            _look(each, name, within, found)


def _spec(path: str, tensor: torch.Tensor, storage: int) -> TensorSpec:
    is_buffer = "_is_buffer" in tensor.__dict__
    kind = TensorKind.BUFFER if is_buffer else TensorKind.TENSOR
    return TensorSpec(
        path,
        _NAMES[tensor.dtype],
        tuple(tensor.shape),
        tuple(tensor.stride()),
        storage,
        int(tensor.storage_offset()),
        TensorKind.PARAMETER if type(tensor) is torch.nn.Parameter else kind,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
    )
