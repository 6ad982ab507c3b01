"""What a restore puts into a state besides tensors: never a tensor that nobody filled."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import portus
from portus.engine.image.key_paths import is_ordinary, storage_places
from portus.engine.loading.patterns import Matcher, part_of
from portus.engine.state.pickling import pickle_state
from portus.engine.state.walk import walk
from portus.errors import UsageError

pytestmark = pytest.mark.usefixtures("own_saver")


def restored(root: Path, saved: object, state: Any, **settings: Any) -> Any:
    """``state``, with what was saved of ``saved``."""
    with contextlib.closing(portus.Checkpointer(root / "run")) as checkpointer:
        checkpointer.save(saved, 1).wait()
        checkpointer.restore_into(state, **settings)
    return state


ONES = torch.ones(3)
ZEROS = torch.zeros(3)


@pytest.mark.parametrize(
    ("saved", "state", "expected"),
    [
        ({"model": {"w": 1, "n": 3}}, {"model.w": 0}, {"model.w": 1, "model": {"n": 3}}),
        ({"state": {"0": {"w": 1, "n": 3}}}, {"state": {0: {"w": 0, "n": 2}}}, None),
        ({"l": [1, 1]}, {"l": [0], "l.1": 0}, {"l": [1], "l.1": 1}),
        ({"w": 1, "new": {"deep": [5, "a"]}}, {"w": 0}, {"w": 1, "new": {"deep": [5, "a"]}}),
    ],
)
def test_what_a_state_lacks_comes_without_tensors(
    tmp_path: Path, saved: Any, state: Any, expected: Any
) -> None:
    """Tensors are paired by the text of their key paths, all else by the keys themselves."""

    def made(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: made(each) for key, each in value.items()}
        if isinstance(value, list):
            return [made(each) for each in value]
        return {0: ZEROS.clone(), 1: ONES.clone()}.get(value, value)

    found = restored(tmp_path, made(saved), made(state))
    for _, tensor in tensors_in(found):
        assert torch.equal(tensor, ONES)
    if expected is not None:
        assert str(found) == str(made(expected))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_storage_that_is_in_no_tensor_comes_with_its_bytes(tmp_path: Path) -> None:
    saved: dict[str, Any] = {"bytes": torch.arange(4096.0).untyped_storage(), "w": ONES}
    # What torch frees it hands out again: memory that nobody fills is not zero.
    freed = [torch.full((4096,), 9.0) for _ in range(9)]
    del freed

    found = restored(tmp_path, saved, {"bytes": None, "w": ZEROS.clone()})

    assert bytes(found["bytes"].tolist()) == bytes(saved["bytes"].tolist())
    assert torch.equal(found["w"], ONES)


def test_an_ordinary_pickle_has_no_storage_that_is_read_before_the_others() -> None:
    """Also one that somebody made to look like one: each byte is changed to a few opcodes."""
    parameter = torch.nn.Parameter(ONES)
    ordinary = OrderedDict({"w": ONES, "p": parameter, "l": [1, 2.5, (True, None)], "t": (ZEROS,)})
    ordinary.__dict__["_metadata"] = {"": {"version": 1}}
    storage = ONES.untyped_storage()
    for other in ({"s": storage}, [storage, 1], ONES.to_sparse(), {torch.float32}, np.ones(2)):
        assert not is_ordinary(pickle_state(other).pickle)
    data = pickle_state(ordinary).pickle
    assert is_ordinary(data)
    found = 0
    for at in range(len(data)):
        for byte in (b"(", b".", b"Q", b"R", b"b", b"h", b"0", b"\x85", b"s", b"u"):
            changed = data[:at] + byte + data[at + 1 :]
            if is_ordinary(changed):
                found += 1
                assert all(place.is_plain for place in storage_places(changed)), (at, byte)
    assert found


def tensors_in(value: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    items: Any = value.items() if isinstance(value, dict) else []
    items = enumerate(value) if isinstance(value, list) else items
    return [each for key, inside in items for each in tensors_in(inside, f"{path}.{key}")]


def test_a_tuple_of_which_nothing_is_asked_for_stays_the_same(tmp_path: Path) -> None:
    pair = torch.max(torch.ones(2, 2), 0)
    state = {"a": torch.zeros(2), "pair": pair}
    saved = {"a": torch.ones(2), "pair": torch.max(torch.ones(2, 2), 0)}
    found = restored(tmp_path, saved, state, names="a", weights_only=False)
    assert found["pair"] is pair
    assert torch.equal(found["a"], torch.ones(2))


def test_a_row_is_asked_for_as_one_value() -> None:
    state = {"a": [1, None], "b": [torch.ones(1), 2]}
    assert part_of(state, Matcher(["a"])) == {"a": [1, None]}
    assert part_of(state, Matcher(["b.1"])) == {"b": [None, 2]}


def test_memory_that_was_freed_is_refused() -> None:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UsageError, match=r"^f: needs 16 bytes.*freed"):
        walk({"f": tensor}, pickle_state({"f": tensor}).storages).refuse_freed()
    assert not tensor.untyped_storage().nbytes()
