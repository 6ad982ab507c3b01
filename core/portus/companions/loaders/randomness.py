"""The random number generators of one process as bytes, and back.

Python's, numpy's global one, torch's of the CPU and of one CUDA device: a training loop draws from
these. Stored as a tensor of plain bytes, so a checkpoint needs no pickle for it: a map in
MessagePack. A generator that the map does not have stays as it is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import numpy as np
import torch

from portus.errors import UsageError

SEED_BYTES: Final = 56
"""The number of bytes that ``seed_inside`` takes."""


def capture_randomness(device: torch.device) -> torch.Tensor:
    """Return the state of all generators, as bytes: uint8, on the CPU.

    device: the one whose CUDA generator is included.
    """
    states: dict[str, Any] = {
        "python": random.getstate(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    numpy = np.random.get_state(legacy=False)
    # Another bit generator, which a user may have set, stays as it is.
    if numpy["bit_generator"] == "MT19937":
        states["numpy"] = numpy
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return _tensor_of(msgspec.msgpack.encode(states, enc_hook=np.ndarray.tolist))


def restore_randomness(state: torch.Tensor, device: torch.device) -> None:
    """Restore all generators to the moment when ``capture_randomness`` returned ``state``.

    Unknown generators are ignored. Raises ``UsageError`` for other bytes, as Portus 0.1 wrote.
    """
    try:
        states = msgspec.msgpack.decode(state.cpu().numpy().tobytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise UsageError(
            "the random numbers of this checkpoint are of another Portus, perhaps an older one "
            f"({error}): load it with that, or set PORTUS_DISABLE=1, and the run continues with "
            "other random numbers"
        ) from error
    if "python" in states:
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "torch" in states:
        torch.set_rng_state(_tensor_of(states["torch"]))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(_tensor_of(states["cuda"]), device)


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


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
