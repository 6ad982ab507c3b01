"""Key paths: what in a state has one, and how it is written."""

from __future__ import annotations

import argparse
import dataclasses
from collections import OrderedDict, deque, namedtuple
from typing import Any

import pytest
import torch

from portus.engine.format.dtypes import ITEM_SIZES
from portus.engine.spec import TensorKind
from portus.engine.state.walk import DTYPES, Elsewhere, leaves, walk
from portus.errors import UsageError

Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Settings:
    rate: float
    weight: torch.Tensor


def test_a_key_path_joins_the_keys_on_the_way() -> None:
    zero = torch.zeros(1)
    place = Elsewhere("pool", "token", 1, ("model",))
    state = {
        "model": OrderedDict({"0.weight": zero}),
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
        1: {(0, 1): None, True: "x"},
        "settings": Settings(0.5, zero),
        "point": Point(zero, 2),
        "arguments": argparse.Namespace(a=1),
        "queue": deque([zero, 3]),
        "empty": {"dict": {}, "list": []},
        "place": place,
        "object": object,
    }
    assert dict(leaves(state)) == {
        "model.0.weight": zero,
        "groups.0.lr": 0.1,
        "groups.0.betas": (0.9, 0.99),
        "groups.0.params": [0, 1],
        "1.(0, 1)": None,
        "1.True": "x",
        "settings.rate": 0.5,
        "settings.weight": zero,
        "point.x": zero,
        "point.y": 2,
        "arguments.a": 1,
        "queue.0": zero,
        "queue.1": 3,
        "empty.dict": {},
        "empty.list": [],
        "place": place,
        "object": object,
    }
    assert leaves(zero) == [("", zero)]


def test_paths_are_distinct() -> None:
    state = {"a.b": 1, "a": {"b": 2, "b#2": 3}, 0: 4, "0": 5}
    assert [path for path, _ in leaves(state)] == ["a.b", "a.b#2", "a.b#2#2", "0", "0#2"]


def test_a_state_that_contains_itself_is_refused() -> None:
    inner = {"t": torch.zeros(1)}
    state: dict[str, Any] = {"a": inner, "b": inner}
    assert [path for path, _ in leaves(state)] == ["a.t", "b.t"]
    state["a"]["again"] = state
    with pytest.raises(UsageError, match=r"^a\.again: the state contains itself"):
        leaves(state)


def test_plain_tensors_are_described_and_others_are_leaves() -> None:
    base = torch.zeros(6)
    sparse = torch.eye(2).to_sparse()
    state = {
        "view": base[1:5].view(2, 2).t(),
        "parameter": torch.nn.Parameter(base),
        "buffer": torch.nn.Buffer(torch.zeros(2)),
        "lazy": torch.zeros(2, dtype=torch.complex64).conj(),
        "meta": torch.empty(2, device="meta"),
        "sparse": sparse,
    }
    first = torch.zeros(1).untyped_storage()
    found = walk(state, [first])
    view, parameter, buffer, lazy, meta = found.tensors
    assert (view.shape, view.strides, view.offset, view.storage) == ((2, 2), (1, 2), 1, 1)
    assert (parameter.kind, parameter.storage, parameter.requires_grad) == (
        TensorKind.PARAMETER,
        1,
        True,
    )
    assert (buffer.kind, lazy.conjugate, meta.storage) == (TensorKind.BUFFER, True, -1)
    assert [each.nbytes() for each in found.storages] == [4, 24, 8, 16]
    assert found.others == [("sparse", sparse)]


def test_all_dtypes_of_tensors_have_a_size() -> None:
    assert DTYPES.keys() <= ITEM_SIZES.keys()
