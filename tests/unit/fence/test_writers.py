"""V7: what may be copied late is never written before a fence (docs/writers.md, row by row)."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from portus.engine.fence import writers
from portus.engine.fence.fence import Fence
from portus.engine.fence.writers import classify, live_optimizers
from tests.moments import Lines
from tests.unit.fence.late_copy import FENCE_S_MAX, played, torn_in
from tests.unit.fence.scenarios import (
    IMPLEMENTATIONS,
    OPTIMIZERS,
    OTHERS,
    STEPS,
    OnlySteps,
    ScheduleFree,
    SharpnessAware,
    every_torch_optimizer,
    implementations,
    loss_of,
    perceptron,
    step,
    with_optimizer,
)

ROOT = Path(__file__).resolve().parents[3]
STABLE, VOLATILE = True, False


@pytest.fixture
def fence() -> Iterator[Fence]:
    fence = Fence(FENCE_S_MAX)
    yield fence
    fence.close()


def adamw(model: nn.Module, steps: int = 1) -> torch.optim.Optimizer:
    """An optimizer that has stepped, so that it is known."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        step(optimizer, lambda: loss_of(model), in_closure=False)
    return optimizer


def stability(*tensors: torch.Tensor) -> list[int]:
    return list(classify([tensor.untyped_storage() for tensor in tensors]))


# The table.


def _in_turn() -> list[Any]:
    """Each optimizer of torch. `make test` tries its first implementation, within a closure."""
    found = []
    for name, way, in_closure in every_torch_optimizer():
        is_first = in_closure and way == implementations(name)[0]
        marks = () if is_first else pytest.mark.long
        found.append(pytest.param(name, way, in_closure, marks=marks))
    return found


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(("name", "implementation", "in_closure"), _in_turn())
def test_no_step_of_a_torch_optimizer_tears_a_save(
    name: str, implementation: str, in_closure: bool
) -> None:
    scenario = functools.partial(with_optimizer, name, implementation, in_closure)
    saves = played(scenario, guarded=True)
    assert len(saves) == STEPS
    assert torn_in(saves) == set()
    assert torn_in(played(scenario, guarded=False)), "the test could not have failed"


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_that_a_torch_optimizer_trains_is_copied_late(name: str) -> None:
    scenario = functools.partial(with_optimizer, name, implementations(name)[0], True)
    save = played(scenario, guarded=True)[-1]
    assert "['model']['0.weight']" in save.late_names
    assert ("['model']['2.weight']" in save.late_names) == (name != "sparse-adam")
    states = {each for each in save.late_names if each.startswith("['optimizer']['state']")}
    assert bool(states) == (name != "sgd")


def test_every_optimizer_of_torch_is_in_the_table() -> None:
    classes = {
        cls
        for cls in vars(torch.optim).values()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    }
    tried = {type(make([nn.Parameter(torch.ones(2, 2))])) for make in OPTIMIZERS.values()}
    assert len(tried) >= 14
    assert classes - {torch.optim.Optimizer} == tried


@pytest.mark.long(every_case=True)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`TorchScript`:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_no_other_writer_tears_a_save(name: str) -> None:
    assert torn_in(played(OTHERS[name], guarded=True)) == set()
    assert torn_in(played(OTHERS[name], guarded=False)), "the test could not have failed"


@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, implementation) for name in OPTIMIZERS for implementation in implementations(name)],
)
def test_no_torch_optimizer_writes_before_its_closure_returned(
    name: str, implementation: str
) -> None:
    """What lets forward and backward, Lightning's closure, overlap with the copy."""
    parameter = nn.Parameter(torch.randn(3, 3))
    optimizer = OPTIMIZERS[name]([parameter], **IMPLEMENTATIONS[implementation])
    gradient = torch.ones(3, 3)

    def closure() -> float:
        seen.append([tensor.clone() for tensor in writers._tensors_written_by(optimizer)])
        parameter.grad = gradient.to_sparse() if name == "sparse-adam" else gradient.clone()
        return 1.0

    for _ in range(3):
        seen: list[list[torch.Tensor]] = []
        before = [tensor.clone() for tensor in writers._tensors_written_by(optimizer)]
        optimizer.step(closure)
        assert all(map(torch.equal, seen[0], before))
        assert not torch.equal(parameter, before[0])
        assert writers.updates_after_closure(optimizer)


# The document.


def test_the_table_names_every_row_and_no_test_that_is_not_there() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    table = (ROOT / "docs" / "writers.md").read_text()
    assert set(re.findall(r"test_\w+(?=`)", table)) <= set(re.findall(r"def (test_\w+)", tests))
    assert {name for name in OTHERS if f'"{name}"' not in table} == set()


# What is stable.


def test_nothing_is_stable_before_its_optimizer_was_seen_stepping(fence: Fence) -> None:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters())
    assert stability(*model.parameters()) == [VOLATILE] * 4
    step(optimizer, lambda: loss_of(model), in_closure=False)
    assert stability(*model.parameters()) == [STABLE] * 4


def test_nothing_is_stable_while_no_fence_is_open() -> None:
    model = perceptron()
    optimizer = adamw(model)
    assert stability(*model.parameters()) == [VOLATILE] * 4
    with_fence = Fence(FENCE_S_MAX)
    step(optimizer, lambda: loss_of(model), in_closure=False)
    assert stability(*model.parameters()) == [STABLE] * 4
    with_fence.close()
    assert stability(*model.parameters()) == [VOLATILE] * 4


@pytest.mark.long
def test_an_optimizer_that_died_keeps_nothing_stable(fence: Fence) -> None:
    model = perceptron()
    optimizer = adamw(model)
    assert optimizer in live_optimizers()
    del optimizer
    gc.collect()
    assert stability(*model.parameters()) == [VOLATILE] * 4


def test_buffers_and_strangers_are_volatile(fence: Fence) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    optimizer = adamw(model)
    assert stability(*model.buffers(), torch.ones(3)) == [VOLATILE] * 4
    assert optimizer.state


def test_frozen_and_untrained_parameters_are_volatile(fence: Fence) -> None:
    model = perceptron()
    weight, bias, *_ = model.parameters()
    extra = nn.Parameter(torch.ones(3))
    weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([*model.parameters(), extra])
    step(optimizer, lambda: loss_of(model), in_closure=False)
    assert stability(weight, bias, extra) == [VOLATILE, STABLE, VOLATILE]
    bias.requires_grad_(False)
    assert stability(weight, bias, extra) == [VOLATILE] * 3


def test_the_state_of_an_optimizer_is_stable_also_after_it_was_loaded(fence: Fence) -> None:
    model = perceptron()
    optimizer = adamw(model)
    loaded = {**optimizer.state_dict()}
    loaded["state"] = {
        index: {name: value.clone() for name, value in state.items()}
        for index, state in loaded["state"].items()
    }
    old = [value for state in optimizer.state.values() for value in state.values()]
    assert set(stability(*old)) == {STABLE}
    optimizer.load_state_dict(loaded)
    new = [value for state in optimizer.state.values() for value in state.values()]
    assert set(stability(*new)) == {STABLE}
    assert set(stability(*old)) == {VOLATILE}


def test_a_parameter_that_moved_is_known_at_its_new_place(fence: Fence) -> None:
    model = perceptron()
    optimizer = adamw(model)
    weight = next(model.parameters())
    old = weight.data
    weight.data = old.clone()
    assert stability(weight, old) == [STABLE, VOLATILE]
    assert optimizer.state


def test_a_view_of_a_parameter_changes_nothing(fence: Fence) -> None:
    model = perceptron()
    optimizer = adamw(model)
    assert stability(next(model.parameters())[1:3]) == [STABLE]
    assert optimizer.state


def test_a_storage_that_others_share_is_stable_only_if_parameters_fill_it(fence: Fence) -> None:
    memory = torch.zeros(10)
    first, second = nn.Parameter(memory[:4]), nn.Parameter(memory[4:10])
    for parameters, expected in (([first], VOLATILE), ([first, second], STABLE)):
        optimizer = torch.optim.AdamW(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert stability(memory) == [expected]


def test_overlapping_views_do_not_fill_a_storage(fence: Fence) -> None:
    memory = torch.zeros(10)
    parameters = [nn.Parameter(memory[:6]), nn.Parameter(memory[1:6])]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert stability(memory) == [VOLATILE]


def test_private_copies_are_stable_and_the_guilty_never_are(fence: Fence) -> None:
    model = perceptron()
    optimizer = adamw(model)
    storages = [parameter.untyped_storage() for parameter in model.parameters()]
    mine = torch.ones(5).untyped_storage()
    flags = classify([*storages, mine], owned={4}, guilty={storages[1].data_ptr()})
    assert list(flags) == [STABLE, VOLATILE, STABLE, STABLE, STABLE]
    assert optimizer.state


def test_empty_and_meta_tensors_are_no_obstacle(fence: Fence) -> None:
    empty = nn.Parameter(torch.empty(0))
    meta = nn.Parameter(torch.empty(3, device="meta"))
    full = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([empty, meta, full], lr=0.1)
    for parameter in (empty, meta, full):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert stability(empty, full) == [VOLATILE, STABLE]
    assert writers.owns(optimizer, {full.data_ptr()})
    assert not writers.owns(optimizer, {full.data_ptr() + 1})


def test_max_norm_set_later_is_seen(fence: Fence) -> None:
    table = nn.Embedding(7, 4)
    model = nn.Sequential(table, nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    model(torch.arange(7)).sum().backward()
    optimizer.step()
    assert stability(*model.parameters()) == [STABLE] * 3
    table.max_norm = 1.0
    assert stability(*model.parameters()) == [VOLATILE, STABLE, STABLE]


def test_the_search_for_other_writers_runs_only_when_what_is_trained_changed(fence: Fence) -> None:
    model = perceptron()
    optimizer = adamw(model)
    stability(*model.parameters())
    first = writers._surroundings
    stability(*model.parameters(), torch.ones(3))
    assert writers._surroundings is first
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    stability(*model.parameters())
    assert writers._surroundings is not first


# Whom we trust.


class Restores(torch.optim.AdamW):
    def load_state_dict(self, state_dict: object) -> None:
        """Some copy master weights here."""


class HasAStaticWriter(torch.optim.AdamW):
    @staticmethod
    def swap(parameters: list[torch.Tensor]) -> None: ...


def test_a_class_from_elsewhere_is_trusted_if_it_adds_no_public_method() -> None:
    believed = (torch.optim.AdamW, torch.optim.Muon, OnlySteps)
    assert all(map(writers.writes_only_in_step, believed))
    assert not any(map(writers.writes_only_in_step, (Restores, HasAStaticWriter, SharpnessAware)))


def test_only_a_step_that_torch_wrote_is_fenced_after_its_closure() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    assert writers.updates_after_closure(Restores(parameters))
    assert not writers.updates_after_closure(OnlySteps(parameters))
    hooked = torch.optim.AdamW(parameters)
    hooked.register_step_pre_hook(lambda *_: None)
    assert not writers.updates_after_closure(hooked)


def test_wrappers_of_lightning_change_nothing(fence: Fence) -> None:
    from lightning.fabric import Fabric
    from lightning.pytorch.core.optimizer import LightningOptimizer

    model = perceptron()
    optimizer = adamw(model)
    wrapped = LightningOptimizer(optimizer)
    fabric_model, fabric_optimizer = Fabric(accelerator="cpu").setup(model, optimizer)
    step(fabric_optimizer, lambda: loss_of(fabric_model), in_closure=False)
    writers.forget()
    step(optimizer, lambda: loss_of(model), in_closure=False)
    assert stability(*model.parameters()) == [STABLE] * 4
    assert wrapped.optimizer is optimizer


def test_an_optimizer_that_ddp_steps_is_not_trusted(fence: Fence) -> None:
    model = perceptron()
    optimizer = adamw(model)
    assert stability(*model.parameters()) == [STABLE] * 4
    optimizer._overlap_with_ddp = True  # type: ignore[attr-defined]
    assert stability(*model.parameters()) == [VOLATILE] * 4


def test_an_optimizer_that_was_recorded_into_a_graph_is_not_trusted(fence: Fence) -> None:
    """Without a GPU: as if the hook had seen the recording."""
    model = perceptron()
    optimizer = adamw(model)
    assert stability(*model.parameters()) == [STABLE] * 4
    writers._recorded.add(optimizer)
    assert stability(*model.parameters()) == [VOLATILE] * 4


def test_a_sharpness_aware_wrapper_never_stepped_is_found(fence: Fence) -> None:
    model = perceptron()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapper = SharpnessAware(base)
    step(base, lambda: loss_of(model), in_closure=False)
    assert live_optimizers() == [base]
    assert stability(*model.parameters()) == [VOLATILE] * 4
    assert wrapper.base is base


def test_an_optimizer_with_writers_of_its_own_is_barred_from_its_first_step(fence: Fence) -> None:
    model = perceptron()
    optimizer = adamw(model)
    assert stability(*model.parameters()) == [STABLE] * 4
    other = ScheduleFree(model.parameters(), lr=0.1)
    step(other, lambda: loss_of(model), in_closure=False)
    assert stability(*model.parameters()) == [VOLATILE] * 4
    assert optimizer in live_optimizers()


# Cost.


def test_classifying_costs_a_few_lines_a_storage_however_many_there_are(fence: Fence) -> None:
    """About a microsecond each; lines are counted, which no busy machine changes."""
    lines = []
    for storages in (1_000, 10_000):
        parameters = [nn.Parameter(torch.ones(8)) for _ in range(storages // 4)]
        optimizer = torch.optim.AdamW(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones(8)
        optimizer.step()
        all_storages = [
            tensor.untyped_storage() for tensor in writers._tensors_written_by(optimizer)
        ]
        assert len(all_storages) == storages
        classify(all_storages)  # what is known of an optimizer is found once
        with Lines() as ran:
            flags = classify(all_storages)
        assert set(flags) == {STABLE}
        lines.append(ran.count / storages)
        print(f"{storages} storages: {ran.count} lines")
        del optimizer
        gc.collect()
    assert max(lines) < 40


def test_a_small_state_is_copied_at_once_and_nobody_is_searched_for(
    fence: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writers, "_surroundings", None)
    model = perceptron()
    optimizer = adamw(model)
    weights = optimizer.param_groups[0]["params"]
    size = sum(weight.nbytes for weight in weights)
    monkeypatch.setattr(writers, "SMALL", size)
    assert stability(*weights) == [VOLATILE] * len(weights)
    assert writers._surroundings is None
    owned = classify([weight.untyped_storage() for weight in weights], owned=[1])
    assert list(owned) == [VOLATILE, STABLE] + [VOLATILE] * (len(weights) - 2)
    monkeypatch.setattr(writers, "SMALL", size - 1)
    assert stability(*weights) == [STABLE] * len(weights)
    assert writers._surroundings is not None
