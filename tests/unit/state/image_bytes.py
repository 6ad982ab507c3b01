"""The bytes of an image, as whoever writes images makes them."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from portus.engine.format.checksum import UNIT, digest
from portus.engine.image.image import Image
from portus.engine.state.pickling import pickle_state


def filled(image: Image, storages: list[bytes]) -> bytearray:
    """The whole file."""
    file = bytearray(image.size)
    units = []
    for offset, data in zip(image.offset.tolist(), storages, strict=True):
        file[offset : offset + len(data)] = data
        units += [digest(data[at : at + UNIT]) for at in range(0, max(1, len(data)), UNIT)]
    digests = np.frombuffer(b"".join(units), np.uint8).reshape(-1, 16)
    crcs = np.array([zlib.crc32(data) for data in storages], np.uint32)
    for literal in image.literals(digests, crcs):
        file[literal.offset : literal.end] = literal.data
    return file


def stored(storage: torch.UntypedStorage) -> bytes:
    """The bytes of a storage."""
    if not storage.nbytes():
        return b""
    whole = torch.empty(0, dtype=torch.uint8).set_(storage.cpu())
    return whole.numpy().tobytes()


def saved(state: object, path: str) -> tuple[bytearray, int]:
    """The whole file, and where its last storage ends."""
    pickled = pickle_state(state)
    image = pickled.image(path)
    end = int((image.offset + image.length).max(initial=0))
    return filled(image, [stored(each) for each in pickled.storages]), end
