from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import portus


def test_a_state_comes_back_from_its_bytes() -> None:
    tied = torch.rand(5)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "tied": [tied, tied[1:3]],
        "none": {},
        "empty": torch.zeros(0),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    back = portus.unpack(portus.pack(state))
    assert isinstance(back, dict)
    assert back.keys() == state.keys()
    assert back["python"] == state["python"]
    assert np.array_equal(back["numpy"][1], state["numpy"][1])
    back["tied"][0][1] = 7
    assert back["tied"][1][0] == 7
    assert torch.equal(back["half"], torch.ones(3, dtype=torch.bfloat16))
    assert back["empty"].shape == (0,)


def test_damaged_bytes_are_refused() -> None:
    data = portus.pack({"a": torch.arange(4), "b": "text"})
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises(portus.CorruptionError):
            portus.unpack(bytes(damaged))
    for length in range(len(data)):
        with pytest.raises(portus.CorruptionError):
            portus.unpack(data[:length])


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(portus.UsageError, match=r"a\.b"):
        portus.pack({"a": {"b": object()}})
