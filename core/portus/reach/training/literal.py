"""``LiteralContents``: a file without storages: the call knows all of its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from portus.engine.image.image import Column, Image, bytes_image


class LiteralContents:
    """Literal bytes as ``FileContents``."""

    storages: Final[Sequence[torch.UntypedStorage]] = ()
    owned_storages: Final[frozenset[int]] = frozenset()
    has_devices: Final = False

    def __init__(self, data: bytes) -> None:
        self._image: Final = bytes_image(data)
        self.lengths: Final[Column] = np.zeros(0, np.int64)

    def changes(self) -> Column:
        return np.zeros(0, np.int64)

    def image(self, path: str, note: bytes = b"") -> Image:
        """See ``FileContents``; there is no note."""
        return self._image

    def describer(self) -> Callable[[int], str]:
        return str
