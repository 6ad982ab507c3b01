"""Tensors that share memory in a state get what was saved of each, or the state stays as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import portus
from portus.engine.loading import restore_over
from portus.engine.spec import TensorSpec
from portus.errors import UsageError

ONE, OTHER = torch.arange(12.0).view(4, 3), torch.arange(12.0).view(4, 3) + 100

State = dict[str, torch.Tensor]


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[portus.PoolCheckpointer]:
    with portus.PoolCheckpointer(tmp_path / "p.portus", "net", journal=False) as run:
        yield run


def tied() -> State:
    both = torch.full((4, 3), 7.0)
    return {"one": both, "other": both}


def shifted() -> State:
    memory = torch.full((15,), 7.0)
    return {"one": memory[:12].view(4, 3), "other": memory[3:].view(4, 3)}


def shifted_and_transposed() -> State:
    memory = torch.full((15,), 7.0)
    return {"one": memory[:12].view(4, 3), "other": memory[3:].view(3, 4).t()}


def one_byte() -> State:
    memory = torch.full((23,), 7.0)
    return {"one": memory[:12].view(4, 3), "other": memory[11:].view(4, 3)}


@pytest.mark.parametrize("make", [tied, shifted, shifted_and_transposed, one_byte])
def test_different_values_for_one_place_are_refused_and_nothing_is_written(
    saved: portus.PoolCheckpointer, make: Callable[[], State]
) -> None:
    saved.save({"one": ONE, "other": OTHER}, 1).wait()
    into = make()
    with pytest.raises(UsageError, match=r"(one and other|other and one) share memory"):
        saved.restore_into(into)
    assert all((each == 7.0).all() for each in into.values())
    saved.restore_into(into, names="other")
    assert torch.equal(into["other"], OTHER)


def test_elements_of_one_tensor_that_share_memory_are_refused(
    saved: portus.PoolCheckpointer,
) -> None:
    saved.save({"one": ONE}, 1).wait()
    memory = torch.full((12,), 7.0)
    with pytest.raises(UsageError, match="elements of one share memory"):
        saved.restore_into({"one": memory.as_strided((4, 3), (1, 1))})
    assert (memory == 7.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_values_for_one_place_are_taken(
    saved: portus.PoolCheckpointer, dtype: torch.dtype
) -> None:
    """Saved from tensors of their own, and bound for tied ones; NaN is the same as NaN."""
    value = ONE.clone()
    value[0, 0] = float("nan")
    saved.save({"one": value, "other": value.clone()}, 1).wait()
    both = torch.zeros(4, 3, dtype=dtype)
    saved.restore_into({"one": both, "other": both})
    assert torch.equal(both.nan_to_num(), value.to(dtype).nan_to_num())


def test_columns_that_lie_between_each_other_are_filled(saved: portus.PoolCheckpointer) -> None:
    saved.save({"one": ONE, "other": OTHER}, 1).wait()
    memory = torch.zeros(4, 6)
    saved.restore_into({"one": memory[:, ::2], "other": memory[:, 1::2]})
    assert torch.equal(memory[:, ::2], ONE)
    assert torch.equal(memory[:, 1::2], OTHER)


def tied_as_saved() -> tuple[State, State]:
    return tied(), tied()


def a_base_and_its_rows() -> tuple[State, State]:
    found = []
    for _ in range(2):
        memory = torch.zeros(6, 3)
        found.append({"base": memory, "rows": memory[1:4], "row": memory[2]})
    return found[0], found[1]


def of_one_flat_buffer() -> tuple[State, State]:
    buffer = torch.zeros(24)
    state = {"one": ONE, "other": OTHER}
    return state, {"one": buffer[:12].view(4, 3), "other": buffer[12:].view(3, 4).t()}


@pytest.mark.parametrize("make", [tied_as_saved, a_base_and_its_rows, of_one_flat_buffer])
def test_what_is_shared_as_it_was_or_not_at_all_costs_no_reading(
    saved: portus.PoolCheckpointer,
    make: Callable[[], tuple[State, State]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, into = make()
    saved.save(state, 1).wait()

    def unexpected(*_: object) -> None:
        raise AssertionError("values were read to be compared")

    monkeypatch.setattr(restore_over, "contradiction", unexpected)
    saved.restore_into(into)
    assert all(torch.equal(into[name], value) for name, value in state.items())


def test_lazy_bits_are_seen_in_what_is_compared() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    specs = [spec_of(name) for name in ("one", "other")]
    pairs = [(specs[0], values), (specs[1], values.conj())]
    assert [*restore_over.doubtful_pairs(pairs)] == [pairs]
    assert restore_over.contradiction(pairs, [values, values.conj().resolve_conj()]) is None
    assert restore_over.contradiction(pairs, [values, values]) == ("one", "other")


def spec_of(name: str) -> TensorSpec:
    storage = {"one": 0, "other": 1}[name]
    return TensorSpec(name, "complex64", (2,), (1,), storage, 0)
