"""Shards that go straight from the pool to where they belong are verified first, and on arrival."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

import portus
from portus.client.shards.group_reader import reason_of
from portus.client.shards.grouped import fill_part
from portus.dcp import GroupReader, GroupWriter, load
from portus.format.checksum import UNIT
from tests.unit.client.test_dcp import run

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable or uninitialized"),
]

COUNT = 300_000
"""Elements of a tensor that is not among the few bytes that a load keeps once it checked them."""


class OwnTensor(torch.Tensor):
    """Of a class of the user's."""


def save(place: Path, state: dict[str, Any]) -> Path:
    """The pool file in which ``state`` is, as step 1."""
    writer = GroupWriter(place, "run")
    writer.save(state, step=1)
    writer.close()
    (pool,) = place.glob("*.portus")
    return pool


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(COUNT)


STRAIGHT: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.zeros(COUNT),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(COUNT)),
    "part of another": lambda: torch.zeros(2 * COUNT)[7 : 7 + COUNT],
    "inference": inference,
}
CONVERTED: dict[str, Callable[[], torch.Tensor]] = {
    "spread out": lambda: torch.zeros(COUNT, 2)[:, 1],
    "negative": lambda: torch._neg_view(torch.zeros(COUNT)),
    "of another dtype": lambda: torch.zeros(COUNT, dtype=torch.int32),
    "of another class": lambda: torch.zeros(COUNT).as_subclass(OwnTensor),
}


def test_whatever_is_loaded_into_holds_what_was_saved(tmp_path: Path) -> None:
    names = [*STRAIGHT, *CONVERTED, "one", "over one", "no element"]
    saved = {name: torch.arange(COUNT) + 1.0 * number for number, name in enumerate(names)}
    saved["no element"], saved["number"] = torch.zeros(0, 3), torch.tensor(5.0)
    save(tmp_path, saved)
    made = {name: make() for name, make in (STRAIGHT | CONVERTED).items()}
    both = torch.zeros(COUNT + 9)
    state = {**made, "one": both[:COUNT], "over one": both[9:], "number": torch.tensor(0.0)}
    state["no element"] = torch.zeros(0, 3)
    reader = GroupReader(tmp_path, "run")
    load(dict(state), reader)
    for name in (*made, "number"):
        assert (state[name].dtype == torch.int32) == (name == "of another dtype")
        assert torch.equal(state[name].to(torch.float32), saved[name]), name
    assert torch.equal(both[9:], saved["over one"]), "what comes later wins"

    assert reader.group is not None
    keys = {index.fqn: f"items.{placed.key}" for index, placed in reader._placed.items()}
    targets = {keys[name]: target.detach().zero_() for name, target in state.items()}
    filled = fill_part(reader.group, 0, targets)
    expected = {*STRAIGHT, "number", "no element"}
    assert filled == {keys[name] for name in expected}
    assert all(torch.equal(targets[keys[name]], saved[name]) for name in expected)
    assert not any(targets[keys[name]].any() for name in {*state} - expected)


def test_autograd_hears_of_what_was_copied_behind_its_back(tmp_path: Path) -> None:
    save(tmp_path, {"weight": torch.ones(COUNT)})
    weight = torch.zeros(COUNT, requires_grad=True)
    loss = weight.square().sum()
    load({"weight": weight}, GroupReader(tmp_path, "run"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Between(DefaultLoadPlanner):
    """Does something once all ranks have checked what they are going to read."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._act = act

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self._act()
        return new_plan


@pytest.mark.parametrize("unit", range(3))
@pytest.mark.parametrize("when", ["before", "after the check"])
def test_each_damaged_unit_is_found_before_it_is_told_to_be_loaded(
    when: str, unit: int, big: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    place, shard = big
    (pool,) = place.glob("*.portus")
    start = pool.read_bytes().index(shard.numpy().tobytes()[:4096])
    at = start + min(unit * UNIT + 12345, shard.nbytes - 1)

    def flip() -> None:
        with open(pool, "r+b") as file:
            file.seek(at)
            (found,) = file.read(1)
            file.seek(at)
            file.write(bytes([found ^ 16]))

    target, small = torch.zeros(shard.shape), torch.zeros(3)
    state = {"net": {"weight": target, "bias": small}}
    told = rf"'run', step 1.*rank 0.*net\.weight is damaged within 16 MiB from byte {unit * UNIT} "
    if when == "before":
        flip()
    planner = Between(flip if when != "before" else lambda: None)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=GroupReader(place, "run"), planner=planner)
    flip()
    found = reason_of(caught.value)
    assert isinstance(found, portus.CorruptionError)
    with pytest.raises(portus.CorruptionError, match=told):
        raise found
    if when == "before":
        assert not target.any()
        assert not small.any()
    load(state, GroupReader(place, "run"))
    assert torch.equal(target, shard)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """Where a shard of three units is, the last one short; and the shard."""
    place = tmp_path_factory.mktemp("big")
    shard = torch.rand(2 * UNIT // 4 + 3)
    save(place, {"net": {"weight": shard, "bias": torch.ones(3)}})
    return place, shard


@pytest.mark.long
@pytest.mark.parametrize("ranks", [(2, 3), (4, 2, 3)])
def test_big_shards_are_bit_equal_at_other_numbers_of_ranks(
    ranks: Sequence[int], tmp_path: Path
) -> None:
    run(tmp_path, *(f"big:{count}:{step}" for step, count in enumerate(ranks, 1)))
