"""Saves that are planned as the one before: a look at the state tells, and never too little."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import portus
import portus.dcp
from portus.dcp import PortusStorageWriter
from portus.reach.shards.plans import look

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

State = dict[str, Any]


def state() -> State:
    weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    return {
        "model": OrderedDict(weight=weight, bias=torch.ones(4)),
        "moments": [{"step": torch.tensor(1.0), "betas": (0.9, 0.99)}, {"step": torch.zeros(2)}],
        "losses": [1.0, 2.0],
        "n": 1,
    }


def resized(found: State) -> None:
    found["model"]["bias"].resize_(7).fill_(3)


def at_the_same_address(found: State) -> None:
    """Another tensor over the same memory: as many bytes, and another shape."""
    found["model"]["bias"] = found["model"]["bias"].view(2, 2)


def of_another_dtype_at_the_same_address(found: State) -> None:
    found["model"]["bias"] = found["model"]["bias"].view(torch.int32)


def data_replaced(found: State) -> None:
    """The same Parameter, which shows other memory of another shape."""
    found["model"]["weight"].data = torch.full((5,), 2.0)


def another_key(found: State) -> None:
    found["model"]["bias2"] = found["model"].pop("bias")


def another_nesting(found: State) -> None:
    found["moments"] = {str(place): each for place, each in enumerate(found["moments"])}


def one_more_in_a_list(found: State) -> None:
    found["moments"].append({"step": torch.ones(3)})


def a_tensor_in_a_list_of_numbers(found: State) -> None:
    found["losses"].append(torch.ones(1))


def a_tensor_for_a_number(found: State) -> None:
    found["n"] = torch.ones(1)


def a_number_for_a_tensor(found: State) -> None:
    found["model"]["bias"] = 3


def no_gradient(found: State) -> None:
    found["model"]["weight"] = found["model"]["weight"].detach()


CHANGES = (
    resized,
    at_the_same_address,
    of_another_dtype_at_the_same_address,
    data_replaced,
    another_key,
    another_nesting,
    one_more_in_a_list,
    a_tensor_in_a_list_of_numbers,
    a_tensor_for_a_number,
    a_number_for_a_tensor,
    no_gradient,
)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every plan that torch makes."""
    made: list[int] = []
    create = DefaultSavePlanner.create_local_plan

    def counted(planner: DefaultSavePlanner) -> Any:
        made.append(1)
        return create(planner)

    monkeypatch.setattr(DefaultSavePlanner, "create_local_plan", counted)
    return made


def assert_loaded(expected: State, load_into: Callable[[State], object]) -> None:
    """That fills an empty state of this kind with these values."""
    target: State = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for name, value in expected.items()
    }
    load_into(target)
    for name, value in expected.items():
        is_tensor = isinstance(value, torch.Tensor)
        assert torch.equal(target[name], value) if is_tensor else target[name] == value, name


def assert_stock_loads(place: Path, found: State) -> None:
    """What is there is what torch takes that state apart into."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(found, is_coordinator=True)
    assert_loaded(planner.state_dict, lambda target: dcp.load(target, checkpoint_id=place))
    assert_loaded(planner.state_dict, lambda target: portus.dcp.load(target, place))


@pytest.mark.parametrize("change", CHANGES)
def test_a_directory_of_what_looks_another_way_is_planned_anew(
    tmp_path: Path, plans: list[int], change: Callable[[State], None]
) -> None:
    found = state()
    with closing(PortusStorageWriter()) as writer:
        for step in (1, 2):
            writer.save(found, tmp_path / f"{step}").wait()
        assert len(plans) == 1
        before = look(found)
        change(found)
        after = look(found)
        assert before is not None
        assert after is not None
        assert before.signs != after.signs
        writer.save(found, tmp_path / "3").wait()
    assert len(plans) > 1
    assert_stock_loads(tmp_path / "3", found)


def test_a_directory_of_what_looks_the_same_is_saved_without_a_plan(
    tmp_path: Path, plans: list[int]
) -> None:
    found = state()
    with closing(PortusStorageWriter()) as writer:
        writer.save(found, tmp_path / "1").wait()
        found["model"]["weight"].data = torch.rand(3, 4)
        found["model"]["bias"] = torch.rand(8)[::2]
        found["moments"] = [{"step": torch.rand(()), "betas": (1, 2)}, {"step": torch.rand(2)}]
        found["losses"], found["n"] = [3.0] * 2, -0.0
        writer.save(found, tmp_path / "2").wait()
    assert len(plans) == 1
    assert_stock_loads(tmp_path / "2", found)


def test_after_what_cannot_be_saved_was_refused_the_next_one_is_whole(tmp_path: Path) -> None:
    found = state()
    with closing(PortusStorageWriter()) as writer:
        writer.save(found, tmp_path / "1").wait()
        with pytest.raises(portus.UsageError):
            writer.save({**found, "n": lambda: None}, tmp_path / "2")
        writer.save(found, tmp_path / "3").wait()
    assert_stock_loads(tmp_path / "3", found)


def test_what_looks_the_same_is_saved_to_a_host_without_a_plan(
    host_pool: str, tmp_path: Path, plans: list[int]
) -> None:
    found = state()
    with closing(PortusStorageWriter(pool=host_pool)) as writer:
        for step in range(3):
            found["model"]["weight"].data = torch.full((3, 4), float(step))
            writer.save(found, tmp_path / f"{step}").wait()
    assert len(plans) == 1
    planner = DefaultSavePlanner()
    planner.set_up_planner(found, is_coordinator=True)
    assert_loaded(planner.state_dict, lambda target: portus.dcp.load(target, tmp_path / "2"))
