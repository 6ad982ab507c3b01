"""The random number generators of one process as bytes, and back.

Python's, numpy's global one, torch's of the CPU and of one CUDA device: a training loop draws from
these. Stored as a tensor of plain bytes, so a checkpoint needs no pickle for it.

Each generator is one field: a tag (1 byte), a length (4 bytes, little-endian), and that many
bytes. The rest of the room is zero. A field that is missing leaves its generator as it is.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

RANDOMNESS_BYTES: Final = 16384
"""The bytes for one process: as many for all, so ranks can gather them as one tensor."""

SEED_BYTES: Final = 56
"""The number of bytes that ``seed_inside`` takes."""

_FIELD: Final = struct.Struct("<BI")
_PYTHON: Final = struct.Struct("<625I?d")
_NUMPY: Final = struct.Struct("<624II?d")
_TAG_PYTHON, _TAG_NUMPY, _TAG_TORCH, _TAG_CUDA = 1, 2, 3, 4


def capture_randomness(device: torch.device) -> torch.Tensor:
    """Return the state of all generators: (RANDOMNESS_BYTES,), uint8, on the CPU.

    device: the one whose CUDA generator is included.
    """
    # With tags and lengths an older Portus skips fields that it does not know.
    fields = b"".join(_FIELD.pack(tag, len(data)) + data for tag, data in _states(device))
    assert len(fields) <= RANDOMNESS_BYTES
    return torch.frombuffer(bytearray(fields.ljust(RANDOMNESS_BYTES, b"\0")), dtype=torch.uint8)


def no_randomness() -> torch.Tensor:
    """Return a state with which ``restore_randomness`` leaves all generators as they are."""
    return torch.zeros(RANDOMNESS_BYTES, dtype=torch.uint8, device="cpu")


def restore_randomness(state: torch.Tensor, device: torch.device) -> None:
    """Restore all generators to the moment when ``capture_randomness`` returned ``state``.

    Unknown fields are ignored.
    """
    data = state.cpu().numpy().tobytes()
    place = 0
    while place + _FIELD.size <= len(data):
        tag, length = _FIELD.unpack_from(data, place)
        place += _FIELD.size
        if tag == 0:
            return
        _restore_field(tag, data[place : place + length], device)
        place += length


@contextmanager
def seed_inside(seed: bytes) -> Iterator[None]:
    """Start the generators of the CPU at ``seed`` inside; restore their states at the end.

    seed: SEED_BYTES. Each generator has bytes of its own: Python's and numpy's are the same
    algorithm, and would draw the same.
    """
    python, numpy, own = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed[:24])
    np.random.seed(np.frombuffer(seed, "<u4", count=6, offset=24))
    # Not torch.manual_seed, which seeds all CUDA devices too.
    torch.default_generator.manual_seed(int.from_bytes(seed[48:SEED_BYTES], "little") >> 1)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(own)


def _states(device: torch.device) -> Iterator[tuple[int, bytes]]:
    version, words, gauss = random.getstate()
    if version == 3:
        yield _TAG_PYTHON, _PYTHON.pack(*words, gauss is not None, gauss or 0.0)
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    # Another bit generator, which a user may have set, stays as it is.
    if name == "MT19937":
        words = np.asarray(keys).tolist()
        yield _TAG_NUMPY, _NUMPY.pack(*words, position, bool(has_gauss), cached)
    yield _TAG_TORCH, torch.get_rng_state().numpy().tobytes()
    if device.type == "cuda":
        yield _TAG_CUDA, torch.cuda.get_rng_state(device).numpy().tobytes()


def _restore_field(tag: int, data: bytes, device: torch.device) -> None:
    if tag == _TAG_PYTHON:
        *words, has_gauss, gauss = _PYTHON.unpack(data)
        random.setstate((3, tuple(words), gauss if has_gauss else None))
    elif tag == _TAG_NUMPY:
        *keys, position, has_gauss, cached = _NUMPY.unpack(data)
        np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, cached))
    elif tag == _TAG_TORCH:
        torch.set_rng_state(_bytes(data))
    elif tag == _TAG_CUDA and device.type == "cuda":
        torch.cuda.set_rng_state(_bytes(data), device)


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
