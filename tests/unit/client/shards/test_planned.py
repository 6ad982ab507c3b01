"""Saves that are planned as the one before: a look at the state tells, and never too little."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import portus
import portus.dcp
from portus.client.paths.pooled import PoolCheckpointer
from portus.client.shards.planned import look
from portus.dcp import GroupReader, GroupWriter, PortusStorageWriter, load

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


def assert_saved(place: str, found: State) -> None:
    """What is in the pool is what torch takes that state apart into."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(found, is_coordinator=True)
    _, expected = planner.create_global_plan([planner.create_local_plan()])
    metadata = GroupReader(place, "run").read_metadata()
    assert dict(metadata.state_dict_metadata) == expected.state_dict_metadata
    assert metadata.planner_data == expected.planner_data
    assert_loaded(planner.state_dict, lambda target: load(target, GroupReader(place, "run")))


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


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_in_what_a_state_looks_like_is_planned_anew(
    host_pool: str, plans: list[int], change: Callable[[State], None]
) -> None:
    found = state()
    with closing(GroupWriter(host_pool, "run")) as writer:
        for step in (1, 2):
            writer.save(found, step=step).wait()
        assert len(plans) == 1
        before = look(found)
        assert before is not None
        change(found)
        after = look(found)
        assert after is not None
        assert before.signs != after.signs
        writer.save(found, step=3).wait()
    assert_saved(host_pool, found)


def test_other_objects_that_look_the_same_are_saved_without_a_plan(
    host_pool: str, plans: list[int]
) -> None:
    """Values, addresses and objects change; nothing that a plan is made of does."""
    found = state()
    with closing(GroupWriter(host_pool, "run")) as writer:
        writer.save(found, step=1).wait()
        found["model"]["weight"].data = torch.rand(3, 4)
        found["model"]["bias"] = torch.rand(8)[::2]
        found["moments"] = [{"step": torch.rand(()), "betas": (1, "x")}, {"step": torch.rand(2)}]
        found["losses"] = [3.0] * 5
        found["n"] = {1, 2}
        writer.save(found, step=2).wait()
    assert len(plans) == 1
    assert_saved(host_pool, found)


def test_what_cannot_be_saved_is_refused_without_a_plan(host_pool: str, plans: list[int]) -> None:
    found = state()
    with closing(GroupWriter(host_pool, "run")) as writer:
        writer.save(found, step=1).wait()
        with pytest.raises(portus.UsageError, match="cannot be saved"):
            writer.save({**found, "n": object()}, step=2)
        assert len(plans) == 1
        writer.save(found, step=3).wait()
    assert_saved(host_pool, found)


def test_what_the_other_ranks_hear_of_is_not_raised_on_one_rank_alone(tmp_path: Path) -> None:
    """A part that fails after the ranks told each other: they would wait for this rank."""
    found = {"t": torch.zeros(1 << 18)}
    checkpointer = PoolCheckpointer(tmp_path, "run", keep=None, max_bytes=5 << 20, on_error="raise")
    checkpointer.part.is_heard_of = True
    handles = []
    for step in range(8):
        found["t"].fill_(step)
        handles.append(checkpointer.save(found, step))
        handles[-1].join()
    assert [handle.committed for handle in handles] == [True] * 4 + [False] * 4
    with pytest.raises(portus.MediumError, match="max_bytes"):
        checkpointer.wait()
    with pytest.raises(portus.MediumError, match="max_bytes"):
        checkpointer.close()


def test_what_other_ranks_planned_is_planned_anew(host_pool: str, plans: list[int]) -> None:
    with closing(GroupWriter(host_pool, "run")) as writer:
        for step in (1, 2):
            writer.save(state(), step=step).wait()
        assert len(plans) == 1
        assert writer._planned is not None
        writer._planned = replace(writer._planned, count=2)
        writer.save(state(), step=3).wait()
        assert len(plans) == 2
        assert_saved(host_pool, state())


# The same for directories.


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
        change(found)
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
