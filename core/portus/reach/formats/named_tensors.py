"""Tensors by their names, for a safetensors file, by the rules of the safetensors package."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import torch

from portus.engine.image.image import Image
from portus.engine.state.contents import FileContents
from portus.errors import UsageError
from portus.reach.formats.safetensors import DTYPES, METADATA, NOTE, NamedTensor, safetensors_image

_CODES: Final = {getattr(torch, name, None): code for name, code in DTYPES.items()}


class NamedTensors(FileContents):
    """``state``, a dict of tensors by name, as ``safetensors.torch.save_file`` takes it. Storage i
    has only the bytes of tensor i: a part of a larger storage is copied.

    Raises ``UsageError`` for values that the package refuses: other values than tensors, tensors
    that are not dense or not contiguous, dtypes that the format does not have, and tensors that
    share memory.
    """

    def __init__(self, state: object, metadata: Mapping[str, str] | None = None) -> None:
        metadata = {} if metadata is None else metadata
        if any(not isinstance(text, str) for pair in metadata.items() for text in pair):
            raise UsageError(f"metadata: expected texts by their names, found {metadata!r:.200}")
        if not isinstance(state, Mapping):
            raise UsageError(
                f"tensors: expected a dict of tensors by name, found {type(state).__name__}"
            )
        pairs = sorted(
            ((named_tensor(name, tensor), tensor) for name, tensor in state.items()),
            key=lambda pair: pair[0].rank,
        )
        self.named: Final = [each for each, _ in pairs]
        self.tensors: list[torch.Tensor] = [tensor for _, tensor in pairs]
        self.metadata: Final = metadata
        _refuse_shared(self.named, self.tensors)
        self.lengths = np.array([each.size for each in self.named], np.int64)
        self.has_devices = any(tensor.device.type != "cpu" for tensor in self.tensors)
        self.storages: list[torch.UntypedStorage] = []
        self.owned_storages: set[int] = set()
        for index, tensor in enumerate(self.tensors):
            if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                name = self.named[index].name
                raise UsageError(
                    f"tensors[{name!r:.200}] is not contiguous; pass tensor.contiguous()"
                )
            whole = tensor.untyped_storage()
            # The file has only this tensor's bytes; the storage has others, too.
            if self.named[index].size != whole.nbytes():
                self.owned_storages.add(index)
                own = tensor.detach().clone(memory_format=torch.contiguous_format)
                whole = own.untyped_storage()
            self.storages.append(whole)

    def image(self, path: str, note: bytes = b"") -> Image:
        """See ``FileContents``. note: in UTF-8."""
        noted = {NOTE: note.decode()} if note else {}
        return safetensors_image(self.named, {**self.metadata, **noted})

    def describer(self) -> Callable[[int], str]:
        return [each.name for each in self.named].__getitem__


def named_tensor(name: object, tensor: object) -> NamedTensor:
    """Return a tensor as a safetensors file has it. Raise ``UsageError`` if it cannot."""
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
    return NamedTensor(name, _CODES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)


def _refuse_shared(named: Sequence[NamedTensor], tensors: Sequence[torch.Tensor]) -> None:
    """Raise ``UsageError`` if two tensors share bytes: a load would give them separate ones."""
    spans = sorted(
        (str(tensor.device), tensor.data_ptr(), index)
        for index, tensor in enumerate(tensors)
        if named[index].size
    )
    for first, second in itertools.pairwise(spans):
        name = named[first[2]]
        # Per device: two devices may use the same addresses.
        if first[0] == second[0] and second[1] < first[1] + name.size:
            raise UsageError(
                f"tensors: {name.name!r} and {named[second[2]].name!r} share memory, which a "
                "safetensors file cannot express; leave one of them out, or clone it"
            )
