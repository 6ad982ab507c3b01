"""Files that are about to be written, and their storages as those of one save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from portus.engine.image.image import Column, Image
from portus.engine.state.contents import FileContents


@dataclass(frozen=True, slots=True)
class NewFile:
    """One file. ``said``: its path as the caller has it. ``real``: where that leads. ``note``:
    bytes for a record of the file."""

    said: str
    real: str
    contents: FileContents
    note: bytes = b""

    def image(self) -> Image:
        """Return the image of the file."""
        return self.contents.image(self.said, self.note)

    @property
    def size(self) -> int:
        """Bytes of its storages."""
        return int(self.contents.lengths.sum())


class JoinedStorages:
    """The storages of files, one file after another."""

    def __init__(self, files: Sequence[NewFile]) -> None:
        self._contents: Final = [each.contents for each in files]
        counts = np.array([len(each.storages) for each in self._contents], np.int64)
        self._first: Final = (np.cumsum(counts) - counts).tolist()
        self.storages: Final[tuple[torch.UntypedStorage, ...]] = tuple(
            storage for each in self._contents for storage in each.storages
        )
        self.owned: Final = {
            first + index
            for first, each in zip(self._first, self._contents, strict=True)
            for index in each.owned
        }
        self.has_devices: Final = any(each.has_devices for each in self._contents)

    def changes(self) -> Column:
        """Return how often torch saw the tensors over each storage being written."""
        return np.concatenate([each.changes() for each in self._contents])

    def describer(self) -> Callable[[int], str]:
        """Return what says where a storage is in its state. It holds no storage."""
        describers = [each.describer() for each in self._contents]
        first = self._first

        def describe(index: int) -> str:
            number = int(np.searchsorted(first, index, "right")) - 1
            return describers[number](index - first[number])

        return describe
