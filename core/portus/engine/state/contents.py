"""``FileContents``: a state in the format of a file, without the bytes of its storages."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence, Set
from typing import Final

import numpy as np
import torch

from portus.engine.image.image import Column, Image


class FileContents(abc.ABC):
    """A state at the moment of the call, in the format of a file.

    ``storages``: one for each storage of the image; holding it keeps its memory. ``tensors``: over
    them. ``owned_storages``: indices of those that no other code has. ``lengths``: bytes of each.
    ``has_devices``: some are not on the CPU.
    """

    storages: Sequence[torch.UntypedStorage]
    tensors: Sequence[torch.Tensor]
    lengths: Column
    has_devices: bool
    owned_storages: Set[int] = frozenset()

    def changes(self) -> Column:
        """Return the number of writes that torch counted for the tensors over each storage."""
        index = {storage._cdata: number for number, storage in enumerate(self.storages)}
        counts = np.zeros(len(self.storages), np.int64)
        for tensor in self.tensors:
            # Inference tensors have no count, and raise when asked for it.
            if tensor.layout is torch.strided and not tensor.is_inference():
                try:
                    number = index.get(tensor.untyped_storage()._cdata)
                except (RuntimeError, NotImplementedError):  # it has no storage
                    continue
                if number is not None:
                    counts[number] += tensor._version
        return counts

    @abc.abstractmethod
    def image(self, path: str, note: bytes = b"") -> Image:
        """Return the image of the file at ``path``, with ``note``, if the format has notes."""

    @abc.abstractmethod
    def describer(self) -> Callable[[int], str]:
        """Return a function that describes the place of a storage in the state, and holds none."""


class JoinedStorages:
    """The storages of files that are saved together, one file after another."""

    def __init__(self, contents: Sequence[FileContents]) -> None:
        self._contents: Final = contents
        counts = np.array([len(each.storages) for each in self._contents], np.int64)
        self._first: Final = (np.cumsum(counts) - counts).tolist()
        self.storages: Final[tuple[torch.UntypedStorage, ...]] = tuple(
            storage for each in self._contents for storage in each.storages
        )
        self.owned_storages: Final = {
            first + index
            for first, each in zip(self._first, self._contents, strict=True)
            for index in each.owned_storages
        }
        self.has_devices: Final = any(each.has_devices for each in self._contents)

    def changes(self) -> Column:
        """Return the number of writes that torch counted for the tensors over each storage."""
        return np.concatenate([each.changes() for each in self._contents])

    def describer(self) -> Callable[[int], str]:
        """Return a function that describes the place of a storage in its state, and holds none."""
        describers = [each.describer() for each in self._contents]
        first = self._first

        def describe(index: int) -> str:
            number = int(np.searchsorted(first, index, "right")) - 1
            return describers[number](index - first[number])

        return describe
