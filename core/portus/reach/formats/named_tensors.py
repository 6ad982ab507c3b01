"""Tensors by their names, as a safetensors file has them: the rules are those of its package."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from portus.engine.image.image import Column, Image
from portus.engine.state.contents import changes_of
from portus.errors import UsageError
from portus.reach.formats.safetensors import DTYPES, METADATA, NOTE, NamedTensor, safetensors_image

_CODES: Final = {getattr(torch, name, None): code for name, code in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """Tensors by their names, as ``FileContents``. Storage i has the bytes of tensor i alone: those
    of a part of a larger storage were copied."""

    named: Sequence[NamedTensor]
    tensors: Sequence[torch.Tensor]
    storages: Sequence[torch.UntypedStorage]
    owned_storages: frozenset[int]
    lengths: Column
    has_devices: bool
    metadata: Mapping[str, str] = field(default_factory=dict)

    def changes(self) -> Column:
        return changes_of(self.storages, self.tensors)

    def image(self, path: str, note: bytes = b"") -> Image:
        """note: in UTF-8."""
        noted = {NOTE: note.decode()} if note else {}
        return safetensors_image(self.named, {**self.metadata, **noted})

    def describer(self) -> Callable[[int], str]:
        return [each.name for each in self.named].__getitem__


def named_tensors(state: object, metadata: Mapping[str, str] | None = None) -> NamedTensors:
    """``state``, a dict of tensors by name, as ``safetensors.torch.save_file`` takes it.

    Raises ``UsageError`` for what that package refuses: other values, tensors that are not dense
    or not contiguous, dtypes that the format does not have, and tensors that share memory.
    """
    metadata = {} if metadata is None else metadata
    if any(not isinstance(text, str) for pair in metadata.items() for text in pair):
        raise UsageError(f"metadata: expected texts by their names, found {metadata!r:.200}")
    if not isinstance(state, Mapping):
        raise UsageError(
            f"tensors: expected a dict of tensors by name, found {type(state).__name__}"
        )
    pairs = sorted(
        ((_named_tensor(name, tensor), tensor) for name, tensor in state.items()),
        key=lambda pair: pair[0].rank,
    )
    named, tensors = [each for each, _ in pairs], [tensor for _, tensor in pairs]
    _refuse_shared(named, tensors)
    storages, owned = [], set()
    for index, tensor in enumerate(tensors):
        size, whole = named[index].size, tensor.untyped_storage()
        # The file has the bytes of this tensor alone; the storage has those of others, too.
        if size != whole.nbytes():
            owned.add(index)
            whole = tensor.detach().clone(memory_format=torch.contiguous_format).untyped_storage()
        storages.append(whole)
    return NamedTensors(
        named=named,
        tensors=tensors,
        storages=storages,
        owned_storages=frozenset(owned),
        lengths=np.array([each.size for each in named], np.int64),
        has_devices=any(tensor.device.type != "cpu" for tensor in tensors),
        metadata=metadata,
    )


def _named_tensor(name: object, tensor: object) -> NamedTensor:
    if not isinstance(name, str) or name == METADATA:
        raise UsageError(f"tensors: expected the name of a tensor, found {name!r:.200}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"tensors[{name!r}]: expected a name in UTF-8: {error}") from error
    where = f"tensors[{name!r:.200}]"
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{where}: expected a tensor, found {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type == "meta":
        raise UsageError(
            f"{where}: expected a dense tensor, found one of {tensor.layout} on {tensor.device}"
        )
    if tensor.dtype not in _CODES:
        raise UsageError(f"{where} is {tensor.dtype}, which safetensors does not support")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise UsageError(f"{where} is not contiguous; pass tensor.contiguous()")
    return NamedTensor(name, _CODES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)


def _refuse_shared(named: Sequence[NamedTensor], tensors: Sequence[torch.Tensor]) -> None:
    """Refuse two tensors over the same bytes, which would be two tensors after a load."""
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), index)
        for index, tensor in enumerate(tensors)
        if named[index].size
    )
    for first, second in itertools.pairwise(spans):
        name = named[first[2]]
        # By device: addresses of two of them may be equal.
        if first[0] == second[0] and second[1] < first[1] + name.size:
            raise UsageError(
                f"tensors: {name.name!r} and {named[second[2]].name!r} share memory, which a "
                "safetensors file cannot express; leave one of them out, or clone it"
            )
