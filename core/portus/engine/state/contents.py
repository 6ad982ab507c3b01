"""``FileContents``: a state as a file has it, but for the bytes of its storages."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Protocol

import numpy as np
import torch

from portus.engine.image.image import Column, Image


class FileContents(Protocol):
    """A state at the moment of the call, in the format of a file.

    ``storages``: one for each storage of the image; holding it keeps its memory. ``owned``: indices
    of those that nobody else has. ``lengths``: bytes of each. ``has_devices``: some are not on the
    CPU.
    """

    @property
    def storages(self) -> Sequence[torch.UntypedStorage]: ...

    @property
    def owned(self) -> Set[int]: ...

    @property
    def lengths(self) -> Column: ...

    @property
    def has_devices(self) -> bool: ...

    def changes(self) -> Column:
        """Return how often torch saw the tensors over each storage being written."""

    def image(self, path: str, note: bytes = b"") -> Image:
        """Return the image of the file at ``path``, with ``note``."""

    def describer(self) -> Callable[[int], str]:
        """Return what says where a storage is in the state, for messages. It holds no storage."""


def changes_of(storages: Sequence[torch.UntypedStorage], tensors: Sequence[torch.Tensor]) -> Column:
    """Return how often torch saw ``tensors`` being written, by their storages."""
    index = {storage._cdata: number for number, storage in enumerate(storages)}
    counts = np.zeros(len(storages), np.int64)
    for tensor in tensors:
        if tensor.layout is torch.strided and not tensor.is_inference():
            number = index.get(_storage_of(tensor))
            if number is not None:
                counts[number] += tensor._version
    return counts


def _storage_of(tensor: torch.Tensor) -> int | None:
    """The identity of its storage; None for one that has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None
