"""Recognizes and loads safetensors files; compares every byte with the digests on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from portus.engine.image.image import Read
from portus.engine.image.torch_zip import NOTE
from portus.engine.loading.checkpoint_file import FileFormat
from portus.engine.loading.open_file import OpenFile, StoredBytes, reads
from portus.engine.loading.patterns import Patterns, matcher
from portus.errors import UsageError, printable
from portus.reach.formats.safetensors import (
    DTYPES,
    LENGTH_SIZE,
    SUFFIX,
    is_safetensors,
    read_safetensors,
)

_DTYPES: Final = {code: getattr(torch, name, None) for name, code in DTYPES.items()}
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
    if record == NOTE:
        return None if found.note is None else found.note.encode()
    return None if found.digests is None else found.digests.tobytes()


_FORMAT: Final = FileFormat(load_tensors, read_safetensors, _record)


def other_format(read: Read, name: str) -> FileFormat | None:
    """Return the format of a file that is no zip, by its first bytes, or else its name. None for a
    file that torch has to load."""
    is_ours = is_safetensors(read(0, LENGTH_SIZE + 1)) or name.endswith(SUFFIX)
    return _FORMAT if is_ours else None
