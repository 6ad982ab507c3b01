"""What a pool says of a state is loaded by torch's rules for strangers."""

from __future__ import annotations

import os
import pickle
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from portus.engine.state.pickling import pickle_state
from portus.errors import CorruptionError, UsageError
from portus.reach.pools.weights_only import LoadCheck, pickle_for_pool, unpickle
from tests.same import assert_same


def state() -> dict[str, Any]:
    base = torch.arange(12.0)
    model = OrderedDict(weight=base.view(3, 4), tied=base[2:6])
    model._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    return {
        "model": model,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "halves": torch.ones(3, dtype=torch.bfloat16),
        "wide": torch.ones(3, dtype=torch.uint64),
        "lazy": torch.ones(2, dtype=torch.complex64).conj(),
        "empty": torch.empty(0),
        "plain": [1, 1 << 70, 0.5, float("nan"), "ä", None, True, (2, 3), {4}, b"five", 1 + 2j],
        "nothing": [b"", bytearray(), "", np.zeros(0), np.zeros((2, 0, 3)), np.array("")],
        "numpy": {
            "array": np.arange(6).reshape(2, 3),
            "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            "fields": np.zeros(2, [("a", "<i4"), ("b", "<f8", (2,))]),
            "when": np.array(["2026-11-29"], "M8[D]"),
            "text": np.array(["a"]),
            "one": np.half(1),
            "yes": np.bool_(True),
        },
        "randomness": random.getstate(),
        "of torch": [torch.float16, torch.Size([1]), torch.device("cpu")],
        "sparse": torch.eye(2).to_sparse(),
    }


def test_values_come_back_equal_in_value_and_type() -> None:
    found = pickle_for_pool(state())
    back = unpickle(found.pickle, [each.clone() for each in found.storages])
    wanted = state()
    assert torch.equal(back.pop("sparse").to_dense(), wanted.pop("sparse").to_dense())
    assert_same(back, wanted)
    assert back["model"]["weight"].data_ptr() + 8 == back["model"]["tied"].data_ptr()


def test_tensors_are_over_the_memory_that_was_given() -> None:
    found = pickle_for_pool(state())
    back = unpickle(found.pickle, found.storages)
    addresses = [each.data_ptr() for each in found.storages]
    assert back["model"]["weight"].data_ptr() in addresses


class Called:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_is_called_because_a_pickle_says_so(tmp_path: Path) -> None:
    made = pickle.dumps({"a": Called(tmp_path / "made")}, 2)
    with pytest.raises(UsageError, match="weights_only"):
        unpickle(made, [])
    assert not (tmp_path / "made").exists()


def test_any_bytes_are_an_error_or_a_state(seed: int) -> None:
    source, found = random.Random(seed), pickle_for_pool(state())
    for _ in range(300):
        data = bytearray(found.pickle)
        for _ in range(source.randrange(1, 4)):
            data[source.randrange(len(data))] = source.randrange(256)
        try:
            unpickle(bytes(data), [each.clone() for each in found.storages])
        except (CorruptionError, UsageError, MemoryError):
            continue
    with pytest.raises((CorruptionError, UsageError)):
        unpickle(b"", [])
    with pytest.raises(CorruptionError, match="no storage 0"):
        unpickle(pickle_state(torch.ones(1)).pickle, [])


def test_what_could_not_be_loaded_again_is_named_when_it_first_comes() -> None:
    loadable = LoadCheck()

    def check(state: object) -> None:
        loadable.check(state, pickle_for_pool(state))

    for lr in (0.1, 0.2):
        check({"groups": [{"lr": lr}], "extra": None})
    for odd in (frozenset({1}), Path("a"), 1 << 5000):
        with pytest.raises(UsageError, match=r"^extra\.odd: .*weights_only"):
            check({"groups": [{"lr": 0.3}], "extra": {"odd": odd}})
    check({"groups": [{"lr": 0.3}], "extra": np.ones(3)})
    with torch.serialization.safe_globals([frozenset]):
        check({"extra": frozenset({1})})


def test_no_array_holds_objects(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^a\.b: .*Python objects"):
        pickle_for_pool({"a": {"b": np.array([None, "x"], dtype=object)}})
    for data in (hostile(np.dtype("O"), tmp_path), hostile(np.dtype("f8"), tmp_path)):
        with pytest.raises(UsageError, match="weights_only"):
            unpickle(data, [])


def hostile(dtype: np.dtype[Any], root: Path) -> bytes:
    """A pickle of numpy's own, whose dtype says what it likes."""
    return pickle.dumps(np.zeros(1, [("a", dtype)]), 2)


def test_what_a_program_allows_torch_stays_allowed() -> None:
    def loads() -> bool:
        try:
            unpickle(pickle_state(Path("a")).pickle, [])
        except UsageError:
            return False
        return True

    kinds: list[Any] = [type(Path("a"))]
    assert not loads()
    with torch.serialization.safe_globals(kinds):
        for _ in range(2):
            assert loads()
            assert set(kinds) <= set(torch.serialization.get_safe_globals())


def test_what_is_allowed_is_looked_for_in_linear_time() -> None:
    """A text in which all letters may begin the name of a class."""
    loadable = LoadCheck()
    state: dict[str, Any] = {"text": "c" * (1 << 21)}
    loadable.check(state, pickle_for_pool(state))


def test_a_state_that_is_nested_too_deep_is_refused() -> None:
    deep: Any = {}
    for _ in range(20_000):
        deep = {"a": deep}
    with pytest.raises(UsageError, match=r"too deep|recursion"):
        pickle_for_pool(deep)


def test_arrays_and_numbers_of_numpy_are_pickled_for_any_numpy() -> None:
    pickled = pickle_for_pool({"a": np.arange(3), "b": np.float64(1.5)}).pickle
    assert b"numpy" not in pickled
    found = unpickle(pickled, [])
    assert found["a"].tolist() == [0, 1, 2]
    assert type(found["b"]) is np.float64
