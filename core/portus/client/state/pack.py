"""A small state as bytes, and back: for what one process hands to another. No pickle.

All numbers are little-endian. digest of the rest (16 bytes); length of the tree, of the layout,
count of storages (8 bytes each); length of each storage (8 bytes); tree, layout, storages.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import torch

from portus.client.state.state import flatten, unflatten
from portus.errors import CorruptionError
from portus.format.checksum import DIGEST_SIZE, digest
from portus.index.records import decode_layout, encode_layout

_HEAD: Final = struct.Struct("<QQQ")


def pack(state: object) -> bytes:
    """``state`` as bytes; waits for devices. Raises ``UsageError`` as ``Checkpointer.save``."""
    flat = flatten(state)
    layout = encode_layout(flat.tensors)
    storages = [_bytes_of(storage) for storage in flat.storages]
    lengths = np.array([len(storage) for storage in storages], "<u8").tobytes()
    head = _HEAD.pack(len(flat.tree), len(layout), len(storages))
    body = b"".join([head, lengths, flat.tree, layout, *storages])
    return digest(body) + body


def unpack(data: bytes) -> object:
    """What ``pack`` was given, on the CPU. Raises ``CorruptionError`` for anything else."""
    body = data[DIGEST_SIZE:]
    if len(body) < _HEAD.size or digest(body) != data[:DIGEST_SIZE]:
        raise CorruptionError(f"packed state: checksum of {len(data)} bytes does not match")
    tree_length, layout_length, count = _HEAD.unpack_from(body)
    place = _HEAD.size + 8 * count
    if place + tree_length + layout_length > len(body):
        raise CorruptionError("packed state: its lengths do not fit")
    lengths = np.frombuffer(body, "<u8", count, _HEAD.size).tolist()
    tree = body[place : place + tree_length]
    place += tree_length
    layout = decode_layout(memoryview(body[place : place + layout_length]))
    place += layout_length
    storages = []
    for length in lengths:
        storages.append(_storage_of(body[place : place + length]))
        place += length
    return unflatten(tree, layout, storages)


def _bytes_of(storage: torch.UntypedStorage) -> bytes:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole.cpu().numpy().tobytes()


def _storage_of(data: bytes) -> torch.UntypedStorage:
    if not data:
        return torch.UntypedStorage(0)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()
