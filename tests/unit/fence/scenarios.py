"""Training loops in which somebody writes what is being saved: a row of docs/writers.md each."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.unit.fence.late_copy import Scenario, State

STEPS = 3
Loss = Callable[[], Tensor]


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.randn(5, 6)).square().mean()
    return loss


def step(optimizer: torch.optim.Optimizer, loss: Loss, *, in_closure: bool) -> None:
    def forward_and_backward() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value.item()

    if in_closure:
        optimizer.step(forward_and_backward)
    else:
        forward_and_backward()
        optimizer.step()


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    in_closure: bool = False,
    loss: Callable[[nn.Module], Tensor] = loss_of,
    after: Callable[[], None] = lambda: None,
) -> Iterator[State]:
    """Steps, with a save after each; ``after`` runs between a step and its save."""
    for _ in range(STEPS):
        step(optimizer, lambda: loss(model), in_closure=in_closure)
        after()
        yield {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


# Optimizers of torch.

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "adam": functools.partial(torch.optim.Adam, amsgrad=True),
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "asgd": torch.optim.ASGD,
    "lbfgs": torch.optim.LBFGS,
    "muon": torch.optim.Muon,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "rprop": torch.optim.Rprop,
    "sgd": functools.partial(torch.optim.SGD, lr=0.05),
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "sparse-adam": torch.optim.SparseAdam,
}
IMPLEMENTATIONS = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "plain": {},
}
_ONE_WAY = {"lbfgs", "muon", "sparse-adam"}
_FUSED = {"adagrad", "adam", "adamw", "sgd", "sgd-momentum"}


def implementations(name: str) -> list[str]:
    """The ways in which an optimizer of torch can step on the CPU."""
    if name in _ONE_WAY:
        return ["plain"]
    return ["single", "foreach", *(["fused"] if name in _FUSED else [])]


def every_torch_optimizer() -> Iterator[tuple[str, str, bool]]:
    for name in OPTIMIZERS:
        for implementation in implementations(name):
            for in_closure in (True, False):
                if name != "lbfgs" or in_closure:
                    yield name, implementation, in_closure


def with_optimizer(name: str, implementation: str, in_closure: bool) -> Iterator[State]:
    model, loss = perceptron(), loss_of
    parameters: list[nn.Parameter] = list(model.parameters())
    if name == "muon":
        parameters = [parameter for parameter in parameters if parameter.dim() == 2]
    if name == "sparse-adam":
        model = nn.Sequential(nn.Embedding(7, 4, sparse=True))
        parameters, loss = list(model.parameters()), lookup_loss
    optimizer = OPTIMIZERS[name](parameters, **IMPLEMENTATIONS[implementation])
    return trained(model, optimizer, in_closure=in_closure, loss=loss)


def lookup_loss(model: nn.Module) -> Tensor:
    """Rows of the table grow, so that a norm has something to do."""
    loss: Tensor = (model(torch.arange(7)) - 5.0).square().mean()
    return loss


# Writers other than an optimizer's step.


def batch_norm() -> Iterator[State]:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    yield from trained(model, torch.optim.AdamW(model.parameters()), in_closure=True)


def ema_in_a_plain_loop() -> Iterator[State]:
    model = perceptron()
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for state in trained(model, optimizer):
        yield {**state, "average": average.state_dict()}
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 0.1)


def averaged_model() -> Iterator[State]:
    model = perceptron()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for state in trained(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)):
        yield {**state, "average": average.state_dict()}
        average.update_parameters(model)


def max_norm_embedding() -> Iterator[State]:
    model = nn.Sequential(nn.Embedding(7, 4, max_norm=0.01), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    yield from trained(model, optimizer, in_closure=True, loss=lookup_loss)


class NormalisedLookup(nn.Module):
    """Renormalises through ``functional.embedding``; no module says ``max_norm``."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 4))

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.embedding(rows, self.table, None, 0.01)


def max_norm_in_a_function() -> Iterator[State]:
    model = NormalisedLookup()
    optimizer = torch.optim.AdamW(model.parameters())
    yield from trained(model, optimizer, in_closure=True, loss=lookup_loss)


class Moco(nn.Module):
    """A momentum encoder among its parameters, moved in forward; both are in the optimizer."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.query, self.key = perceptron(), perceptron()
        self.key.requires_grad_(not frozen)

    @torch.no_grad()
    def _move(self) -> None:
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.mul_(0.9).add_(query, alpha=0.1)

    def forward(self, batch: Tensor) -> Tensor:
        self._move()
        with torch.no_grad():
            target = self.key(batch)
        found: Tensor = self.query(batch) - target
        return found


def momentum_encoder(*, frozen: bool) -> Iterator[State]:
    model = Moco(frozen=frozen)
    yield from trained(model, torch.optim.AdamW(model.parameters()), in_closure=True)


def load_state_dict_after_a_save() -> Iterator[State]:
    model = perceptron()
    other = perceptron().state_dict()
    for state in trained(model, torch.optim.AdamW(model.parameters())):
        yield state
        model.load_state_dict(other)


def grad_scaler() -> Iterator[State]:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
        }


def optimizer_in_backward() -> Iterator[State]:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = perceptron()
    _apply_optimizer_in_backward(
        torch.optim.SGD, list(model.parameters()), {"lr": 0.1, "momentum": 0.9}
    )
    for _ in range(STEPS):
        loss_of(model).backward()
        yield {"model": model.state_dict()}


def functional_optimizer() -> Iterator[State]:
    """What DDP runs in backward when it overlaps the optimizer: no class of optimizer at all."""
    from torch.distributed.optim.functional_sgd import _FunctionalSGD

    model = perceptron()
    parameters: list[Tensor] = list(model.parameters())
    optimizer = _FunctionalSGD(parameters, lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        loss_of(model).backward()
        optimizer.step([parameter.grad for parameter in parameters])
        yield {"model": model.state_dict()}


class SharpnessAware(torch.optim.Optimizer):
    """Climbs before it descends: ``first_step`` writes the parameters, and is no step."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                climb = 0.1 * parameter.grad
                parameter.add_(climb)
                self.state[parameter]["climb"] = climb

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(self.state[parameter]["climb"])
        self.base.step()


def sharpness_aware() -> Iterator[State]:
    model = perceptron()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = SharpnessAware(base)
    for _ in range(STEPS):
        loss_of(model).backward()
        optimizer.first_step()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.second_step()
        yield {"model": model.state_dict(), "optimizer": base.state_dict()}


class ScheduleFree(torch.optim.SGD):
    """Two sets of weights, swapped in place by ``train`` and ``eval``."""

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(2.0)


def schedule_free() -> Iterator[State]:
    model = perceptron()
    optimizer = ScheduleFree(model.parameters(), lr=0.1, momentum=0.9)
    for state in trained(model, optimizer):
        yield state
        optimizer.eval()
        optimizer.train()
        optimizer.eval()


class OnlySteps(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)

    def _prepare(self) -> None: ...


class WritesBeforeItsClosure(torch.optim.Optimizer):
    """Not torch's, and no respecter of closures."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(0.01)
        return closure() if closure is not None else None


def writes_before_its_closure() -> Iterator[State]:
    model = perceptron()
    yield from trained(model, WritesBeforeItsClosure(model.parameters()), in_closure=True)


def pre_hook_that_writes() -> Iterator[State]:
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters())

    def clamp(*_: object) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.01, 0.01)

    optimizer.register_step_pre_hook(clamp)
    yield from trained(model, optimizer, in_closure=True)


def lightning_swaps_averaged_weights() -> Iterator[State]:
    from lightning.pytorch.callbacks import WeightAveraging

    model = perceptron()
    callback = WeightAveraging()
    callback._average_model = AveragedModel(model)
    for state in trained(model, torch.optim.AdamW(model.parameters())):
        callback._average_model.update_parameters(model)
        yield state
        callback._swap_models(model)  # type: ignore[arg-type]


def lightning_ends_with_averaged_weights() -> Iterator[State]:
    from lightning.pytorch.callbacks import WeightAveraging

    model = perceptron()
    callback = WeightAveraging()
    callback._average_model = AveragedModel(perceptron())
    for state in trained(model, torch.optim.AdamW(model.parameters())):
        yield state
        callback._copy_average_to_current(model)  # type: ignore[arg-type]


def lightning_ends_with_stochastic_averaging() -> Iterator[State]:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    model, average = perceptron(), perceptron()
    for state in trained(model, torch.optim.AdamW(model.parameters())):
        yield state
        StochasticWeightAveraging.transfer_weights(average, model)  # type: ignore[arg-type]


def loaded_by_torch_dcp() -> Iterator[State]:
    import tempfile

    import torch.distributed.checkpoint as dcp

    model = perceptron()
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"model": perceptron().state_dict()}, checkpoint_id=folder, no_dist=True)
        for state in trained(model, torch.optim.AdamW(model.parameters())):
            yield state
            dcp.load({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)


def loaded_by_portus_dcp() -> Iterator[State]:
    import tempfile

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.planner import ReadItem

    from portus.dcp import PortusStorageReader

    class Planner(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> Tensor:
            return self.lookup_tensor(read_item.dest_index)

    model = perceptron()
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"model": perceptron().state_dict()}, checkpoint_id=folder, no_dist=True)
        for state in trained(model, torch.optim.AdamW(model.parameters())):
            yield state
            reader, planner = PortusStorageReader(folder), Planner()
            into = {"model": model.state_dict()}
            dcp.load(into, storage_reader=reader, planner=planner, no_dist=True)


def swapped_by_torch_ema() -> Iterator[State]:
    from torch_ema import ExponentialMovingAverage

    model = perceptron()
    average = ExponentialMovingAverage(model.parameters(), decay=0.5)
    for state in trained(model, torch.optim.AdamW(model.parameters())):
        yield {**state, "average": average.state_dict()}
        with average.average_parameters():
            yield state
        average.update()


def swapped_by_diffusers() -> Iterator[State]:
    from diffusers.training_utils import EMAModel

    model = perceptron()
    average = EMAModel(model.parameters(), decay=0.5)
    for state in trained(model, torch.optim.AdamW(model.parameters())):
        yield {**state, "average": average.state_dict()}
        average.store(model.parameters())
        average.copy_to(model.parameters())
        yield state
        average.restore(model.parameters())
        average.step(model.parameters())


OTHERS: dict[str, Scenario] = {
    "batch norm": batch_norm,
    "ema in a plain loop": ema_in_a_plain_loop,
    "AveragedModel": averaged_model,
    "max_norm embedding": max_norm_embedding,
    "max_norm in a function": max_norm_in_a_function,
    "momentum encoder": functools.partial(momentum_encoder, frozen=True),
    "momentum encoder that asks for gradients": functools.partial(momentum_encoder, frozen=False),
    "load_state_dict": load_state_dict_after_a_save,
    "GradScaler": grad_scaler,
    "optimizer in backward": optimizer_in_backward,
    "functional optimizer": functional_optimizer,
    "sharpness-aware": sharpness_aware,
    "schedule-free": schedule_free,
    "writes before its closure": writes_before_its_closure,
    "pre-hook that writes": pre_hook_that_writes,
    "Lightning WeightAveraging, swap": lightning_swaps_averaged_weights,
    "Lightning WeightAveraging, end": lightning_ends_with_averaged_weights,
    "Lightning StochasticWeightAveraging": lightning_ends_with_stochastic_averaging,
    "torch DCP load": loaded_by_torch_dcp,
    "Portus DCP load": loaded_by_portus_dcp,
    "torch-ema": swapped_by_torch_ema,
}
if sys.version_info >= (3, 11):  # as newer releases of diffusers
    OTHERS["diffusers EMAModel"] = swapped_by_diffusers
