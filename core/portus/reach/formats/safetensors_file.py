"""Tensors by their names, as the contents of a safetensors file; recognizes and loads such files,
and compares every byte with the digests on the way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from portus.engine.image.image import Image, Read
from portus.engine.image.torch_zip import NOTE as NOTE_RECORD
from portus.engine.loading.checkpoint_file import FileFormat
from portus.engine.loading.open_file import OpenFile, StoredBytes, reads
from portus.engine.loading.patterns import Patterns, matcher
from portus.engine.state.contents import FileContents
from portus.errors import UsageError, printable
from portus.reach.formats.safetensors import (
    DTYPES,
    LENGTH_SIZE,
    METADATA,
    NOTE,
    SUFFIX,
    NamedTensor,
    is_safetensors,
    read_safetensors,
    safetensors_image,
)

_DTYPES: Final = {code: getattr(torch, name, None) for name, code in DTYPES.items()}
_CODES: Final = {dtype: code for code, dtype in _DTYPES.items()}
_KNOWN: Final = frozenset({"map_location", "weights_only"})


def load_tensors(
    file: OpenFile,
    where: str,
    names: Patterns,
    *,
    verify: bool,
    settings: dict[str, Any],
) -> dict[str, torch.Tensor]:
    """Return the tensors of an open safetensors file by their names, those that match ``names``.

    settings: of ``torch.load``; the file has only tensors, so only ``map_location``, a device,
    matters. Raises ``CorruptionError``, ``MediumError``, ``UsageError``.
    """
    unknown = sorted(settings.keys() - _KNOWN)
    device = settings.get("map_location")
    if unknown or not (device is None or isinstance(device, str | int | torch.device)):
        raise UsageError(
            f"{printable(where)} is a safetensors file: expected map_location, a device, and no "
            f"other settings, found {unknown or device!r}"
        )
    keep = matcher(names)
    found = read_safetensors(reads(file), file.size, printable(where))
    wanted = [n for n, each in enumerate(found.tensors) if keep is None or keep(each.name)]
    made = {}
    for number in wanted:
        tensor = found.tensors[number]
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            raise UsageError(
                f"{printable(where)}: {tensor.name} is {tensor.dtype}, which this torch does not "
                "have; load it with the safetensors package"
            )
        made[tensor.name] = torch.empty(tensor.shape, dtype=dtype, device="cpu")
    # Tensors without elements have no memory to fill.
    filled = [number for number in wanted if found.length[number]]
    address = [made[found.keys[number]].data_ptr() for number in filled]
    stored = StoredBytes(file, found if verify else replace(found, digests=None))
    stored.fetch(np.array(filled, np.int64), np.array(address, np.int64))
    if keep is not None:
        keep.complain(printable(where))
    return {name: tensor.to(device) for name, tensor in made.items()} if device else made


def _record(file: OpenFile, where: str, record: str) -> bytes | None:
    found = read_safetensors(reads(file), file.size, printable(where))
    if record == NOTE_RECORD:
        return None if found.note is None else found.note.encode()
    return None if found.digests is None else found.digests.tobytes()


_FORMAT: Final = FileFormat(load_tensors, read_safetensors, _record)


def other_format(read: Read, name: str) -> FileFormat | None:
    """Return the format of a file that is no zip, by its first bytes, or else its name. None for a
    file that torch has to load."""
    is_ours = is_safetensors(read(0, LENGTH_SIZE + 1)) or name.endswith(SUFFIX)
    return _FORMAT if is_ours else None


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
