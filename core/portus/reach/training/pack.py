"""A small state as bytes, and back: for what one process hands to another.

All numbers are little-endian. digest of the rest (16 bytes); length of the pickle, count of
storages (8 bytes each); length of each storage (8 bytes); pickle, storages.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import torch

from portus.engine.format.checksum import DIGEST_SIZE, digest
from portus.engine.state.walk import walk
from portus.errors import CorruptionError
from portus.reach.pools.weights_only import LoadCheck, pickle_for_pool, unpickle

_HEAD: Final = struct.Struct("<QQ")


def pack(state: object) -> bytes:
    """``state`` as bytes; waits for devices. Raises ``UsageError`` for what torch cannot pickle, or
    would not load with ``weights_only``; plain arrays of numpy are allowed."""
    pickled = pickle_for_pool(state)
    walk(state, pickled.storages).refuse_freed()
    LoadCheck().check(state, pickled)
    storages = [_bytes_of(storage) for storage in pickled.storages]
    lengths = np.array([len(storage) for storage in storages], "<u8").tobytes()
    head = _HEAD.pack(len(pickled.pickle), len(storages))
    body = b"".join([head, lengths, pickled.pickle, *storages])
    return digest(body) + body


def unpack(data: bytes) -> object:
    """What ``pack`` was given, on the CPU. Raises ``CorruptionError`` for anything else,
    ``UsageError`` for classes that this process does not allow (``add_safe_globals``)."""
    body = data[DIGEST_SIZE:]
    if len(body) < _HEAD.size or digest(body) != data[:DIGEST_SIZE]:
        raise CorruptionError(f"packed state: checksum of {len(data)} bytes does not match")
    size, count = _HEAD.unpack_from(body)
    place = _HEAD.size + 8 * count
    if place + size > len(body):
        raise CorruptionError("packed state: its lengths do not fit")
    pickled = body[place : place + size]
    place += size
    storages = []
    for length in np.frombuffer(body, "<u8", count, _HEAD.size).tolist():
        storages.append(_storage_of(body[place : place + length]))
        place += length
    return unpickle(pickled, storages)


def _bytes_of(storage: torch.UntypedStorage) -> bytes:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole.cpu().numpy().tobytes()


def _storage_of(data: bytes) -> torch.UntypedStorage:
    if not data:
        return torch.UntypedStorage(0)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()
