"""Tensors to ``TensorSpec`` and storages, and back.

Describing is done by column: one attribute of all tensors at a time, so that the loop runs in C.
Where the columns equal those of the last time, the specs of the last time are given again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from portus.errors import CorruptionError, UsageError
from portus.spec import TensorKind, TensorSpec

LIMIT: Final = 1 << 63
"""Sizes, strides, offsets, and bytes of a tensor are below it, as torch counts in 64 bits."""

DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.qint", "torch.quint"))
}
"""By name, every dtype that a saved tensor may have: all but the quantized ones."""

PLAIN_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""The classes of tensor that are saved; ``nn.Buffer`` makes a Tensor."""

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_TENSOR: Final = torch.Tensor

Storages = tuple[torch.UntypedStorage, ...]


@dataclass(frozen=True, slots=True)
class _Columns:
    """What a list of tensors looks like; equal columns mean equal specs. Holds no tensor."""

    names: list[str]
    types: list[type]
    buffers: list[bool]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    offsets: list[int]
    gradients: list[bool]
    conjugates: list[bool]
    negatives: list[bool]
    devices: list[torch.device]
    places: list[int]
    sizes: list[int]


@dataclass(slots=True)
class TensorTable:
    """Describes tensors, and remembers how they looked the last time. Not for several threads."""

    _columns: _Columns | None = field(default=None, init=False)
    _specs: tuple[TensorSpec, ...] = field(default=(), init=False)

    def describe(
        self, names: list[str], tensors: list[torch.Tensor]
    ) -> tuple[tuple[TensorSpec, ...], Storages]:
        """The specs of ``tensors`` and the distinct storages under them, in order of first use.

        Gives the very tuple of the last call if all looks the same. Raises ``UsageError`` that
        names the first tensor that cannot be saved.
        """
        try:
            columns, storages = _look(names, tensors)
        except (RuntimeError, AttributeError) as error:
            for name, tensor in zip(names, tensors, strict=True):
                check_kind(name, tensor)
            raise UsageError(f"a tensor cannot be saved: {error}") from error
        if columns != self._columns:
            for name, tensor in zip(names, tensors, strict=True):
                check_kind(name, tensor)
            self._specs = _specs(columns)
            self._columns = columns
        return self._specs, storages


def _look(names: list[str], tensors: list[torch.Tensor]) -> tuple[_Columns, Storages]:
    every = [tensor.untyped_storage() for tensor in tensors]
    devices = [tensor.device for tensor in tensors]
    places, storages = _tie(every, devices)
    dtypes = [tensor.dtype for tensor in tensors]
    complex_ones = any(dtype.is_complex for dtype in set(dtypes))
    columns = _Columns(
        names=names,
        types=list(map(type, tensors)),
        buffers=[hasattr(tensor, "_is_buffer") for tensor in tensors],
        dtypes=dtypes,
        shapes=[tensor.shape for tensor in tensors],
        strides=list(map(_TENSOR.stride, tensors)),
        offsets=list(map(_TENSOR.storage_offset, tensors)),  # type: ignore[arg-type]
        gradients=[tensor.requires_grad for tensor in tensors],
        conjugates=list(map(_TENSOR.is_conj, tensors)) if complex_ones else [False] * len(tensors),
        negatives=list(map(_TENSOR.is_neg, tensors)),
        devices=devices,
        places=places,
        sizes=list(map(torch.UntypedStorage.nbytes, every)),
    )
    return columns, storages


def _tie(
    every: list[torch.UntypedStorage], devices: list[torch.device]
) -> tuple[list[int], Storages]:
    """The index of the storage of each tensor (-1: meta), and the distinct storages."""
    keys = [storage._cdata for storage in every]
    meta = any(device.type == "meta" for device in set(devices))
    if len(set(keys)) == len(keys) and not meta:
        return list(range(len(keys))), tuple(every)
    found = dict(zip(keys, every, strict=True))
    order: dict[int, int] = {}
    places = [
        -1 if meta and device.type == "meta" else order.setdefault(key, len(order))
        for key, device in zip(keys, devices, strict=True)
    ]
    return places, tuple(found[key] for key in order)


def _specs(columns: _Columns) -> tuple[TensorSpec, ...]:
    _check_bounds(columns)
    devices = {device: str(device) for device in set(columns.devices)}
    return tuple(
        map(
            TensorSpec,
            columns.names,
            [_NAMES[dtype] for dtype in columns.dtypes],
            map(tuple, columns.shapes),
            columns.strides,
            columns.places,
            columns.offsets,
            map(_kind, columns.types, columns.buffers),
            columns.gradients,
            columns.conjugates,
            columns.negatives,
            [devices[device] for device in columns.devices],
        )
    )


def _kind(kind: type, buffer: bool) -> TensorKind:
    if kind is torch.nn.Parameter:
        return TensorKind.PARAMETER
    return TensorKind.BUFFER if buffer else TensorKind.TENSOR


def _check_bounds(columns: _Columns) -> None:
    rows = zip(columns.shapes, columns.strides, columns.offsets, columns.dtypes, strict=True)
    for i, (shape, strides, offset, dtype) in enumerate(rows):
        needed = _end(shape, strides, offset) * dtype.itemsize
        if needed > columns.sizes[i] and columns.places[i] >= 0:
            raise UsageError(
                f"{columns.names[i]}: needs {needed} bytes, but its storage has "
                f"{columns.sizes[i]}; it was freed (FSDP does that): gather it first"
            )


def _end(shape: Sequence[int], strides: Sequence[int], offset: int) -> int:
    """Elements from the start of a storage to the last one of a view; 0 if the view is empty."""
    if 0 in shape:
        return 0
    last = offset
    for size, stride in zip(shape, strides, strict=True):
        last += (size - 1) * stride
    return last + 1


def check_kind(name: str, tensor: torch.Tensor) -> None:
    """Raises ``UsageError`` that names ``name`` if ``tensor`` is not of a kind that is saved."""
    found, hint = _exotic(tensor)
    if found:
        raise UsageError(f"{name}: {found} cannot be saved yet; {hint}")


def _exotic(tensor: torch.Tensor) -> tuple[str, str]:
    """What is strange about a tensor, and what to do; two empty strings if nothing is."""
    kind = type(tensor)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor inside torch.func", "save it outside of the transformed function"
    if kind not in PLAIN_TENSORS:
        return f"{kind.__module__}.{kind.__qualname__}, a subclass of Tensor,", _subclass_hint(kind)
    if tensor.is_nested:
        return "a nested tensor", "save tensor.unbind(), or its values and offsets"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}", "save its parts, or tensor.to_dense()"
    if tensor.dtype not in _NAMES:
        return f"a tensor of dtype {tensor.dtype}", "save int_repr(), scales and zero points"
    if torch._is_functional_tensor(tensor):
        return "a functional tensor", "save it outside of torch.compile"
    if any(getattr(tensor, "names", ())):  # later versions of torch have no names
        return "a named tensor", "save tensor.rename(None)"
    return "", ""


def _subclass_hint(kind: type) -> str:
    if "Uninitialized" in kind.__name__:
        return "run the module once, so that it has a shape"
    if kind.__name__ == "NestedTensor":
        return "save tensor.values() and tensor.offsets()"
    if kind.__name__ == "DTensor":
        return "save tensor.full_tensor() or tensor.to_local()"
    return "save the plain tensors it is made of"


def rebuild(spec: TensorSpec, storage: torch.UntypedStorage | None) -> torch.Tensor:
    """The tensor that ``spec`` describes, over ``storage`` (None for a meta tensor): no copy.

    It is where the storage is. Raises ``CorruptionError`` for a spec that makes no sense; no
    memory outside ``storage`` can be reached.
    """
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        raise CorruptionError(f"this torch has no dtype {spec.dtype!r:.40}")
    size = _bytes_needed(spec, dtype.itemsize)
    if storage is None:
        storage = torch.UntypedStorage(size, device="meta")
    elif size > storage.nbytes():
        raise CorruptionError(f"view needs {size} bytes, storage has {storage.nbytes()}")
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, spec.offset, spec.shape, spec.strides)
    plain = spec.kind is TensorKind.TENSOR and not (spec.conjugate or spec.negative)
    return tensor if plain and not spec.requires_grad else _dress(spec, tensor)


def _bytes_needed(spec: TensorSpec, itemsize: int) -> int:
    """Bytes from the start of the storage to the last one of the view; every number is checked."""
    last, count = spec.offset, 1
    if type(last) is not int or not 0 <= last < LIMIT:
        raise CorruptionError(f"offset out of range: {last!r:.40}")
    for size, stride in zip(spec.shape, spec.strides, strict=True):
        if type(size) is not int or not 0 <= size < LIMIT:
            raise CorruptionError(f"size out of range: {size!r:.40}")
        if type(stride) is not int or not 0 <= stride < LIMIT:
            raise CorruptionError(f"stride out of range: {stride!r:.40}")
        last += (size - 1) * stride
        count *= size or 1
    if (last + 1) * itemsize >= LIMIT or count * itemsize >= LIMIT:
        raise CorruptionError(f"view of {count} elements, to {last}, is too large")
    return 0 if 0 in spec.shape else (last + 1) * itemsize


def _dress(spec: TensorSpec, tensor: torch.Tensor) -> torch.Tensor:
    """Bits, class and gradient of a tensor just made."""
    if spec.conjugate:
        if not tensor.is_complex():
            raise CorruptionError(f"conjugate bit on {spec.dtype}")
        tensor = tensor.conj()
    if spec.negative:
        tensor = torch._neg_view(tensor)
    if spec.kind is TensorKind.PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=spec.requires_grad)
    if spec.kind is TensorKind.BUFFER:
        tensor = torch.nn.Buffer(tensor)
    return tensor.requires_grad_() if spec.requires_grad else tensor
