"""The fence: who waits, when, for what, for how long; and that torch is left as it was."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from portus.engine.fence import fence as fences
from portus.engine.fence import guards, writers
from portus.engine.fence.fence import Fence, before_write
from portus.engine.pipeline.run import Save
from tests.moments import Lines
from tests.unit.fence.late_copy import FENCE_S_MAX, LateCopy
from tests.unit.fence.scenarios import OnlySteps, loss_of, perceptron, step

WAIT_S_MAX = 20.0


class HeldCopy(Save):
    """A save whose copy ends when the test says so."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.storages = frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)
        self.asked = threading.Event()
        self.copied = threading.Event()
        self.given_up = False
        self.allowed_s = 0.0

    @property
    def over(self) -> bool:
        return self.copied.is_set() or self.given_up

    def release(self, timeout_s: float) -> bool:
        self.asked.set()
        self.allowed_s = timeout_s
        self.given_up = not self.copied.wait(timeout_s)
        return not self.given_up


class Writer(threading.Thread):
    """Something that writes, on a thread of its own, so that it can be seen waiting."""

    def __init__(self, write: Any, *arguments: Any) -> None:
        super().__init__(daemon=True)
        self._write, self._arguments = write, arguments
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._write(*self._arguments)
        except BaseException as error:
            self.error = error

    def ended(self) -> bool:
        self.join(WAIT_S_MAX)
        if self.error is not None:
            raise self.error
        return not self.is_alive()


@pytest.fixture
def fence() -> Iterator[Fence]:
    fence = Fence(FENCE_S_MAX)
    yield fence
    fence.close()


@pytest.fixture
def model() -> nn.Sequential:
    return perceptron()


def with_gradients(model: nn.Module) -> torch.optim.AdamW:
    loss_of(model).backward()
    return torch.optim.AdamW(model.parameters())


def copy_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def unchanged(model: nn.Module, before: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, model.parameters(), before))


# Steps.


def test_a_step_waits_until_the_copy_ends(fence: Fence, model: nn.Sequential) -> None:
    optimizer, before = with_gradients(model), copy_of(model)
    save = HeldCopy(*model.parameters())
    fence.guard(save)
    stepping = Writer(optimizer.step)
    assert save.asked.wait(WAIT_S_MAX)
    assert unchanged(model, before)
    save.copied.set()
    assert stepping.ended()
    assert not unchanged(model, before)


@pytest.mark.parametrize("named", [True, False])
def test_forward_and_backward_in_a_closure_run_before_the_wait(
    fence: Fence, model: nn.Sequential, named: bool
) -> None:
    optimizer, before = torch.optim.AdamW(model.parameters()), copy_of(model)
    save = LateCopy({"model": model.state_dict()}, everything_late=True)
    fence.guard(save)
    waits_at_the_end_of_the_closure = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        waits_at_the_end_of_the_closure.append(save.waits)
        return loss

    loss = optimizer.step(closure=closure) if named else optimizer.step(closure)
    assert waits_at_the_end_of_the_closure == [0]
    assert save.waits == 1
    assert save.torn == set()
    assert not unchanged(model, before)
    assert isinstance(loss, torch.Tensor)


def test_a_save_made_inside_a_closure_is_waited_for(fence: Fence, model: nn.Sequential) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    saves = []

    def closure() -> float:
        loss = loss_of(model)
        loss.backward()
        saves.append(LateCopy({"model": model.state_dict()}, everything_late=True))
        fence.guard(saves[-1])
        return loss.item()

    optimizer.step(closure)
    assert saves[0].waits == 1
    assert saves[0].torn == set()


def test_a_step_that_torch_did_not_write_waits_before_its_closure(
    fence: Fence, model: nn.Sequential
) -> None:
    optimizer = OnlySteps(model.parameters())
    save = LateCopy({"model": model.state_dict()}, everything_late=True)
    fence.guard(save)
    waits = []

    def closure() -> float:
        waits.append(save.waits)
        return 0.0

    optimizer.step(closure)
    assert waits == [1]


def test_a_step_waits_once_for_a_save(fence: Fence, model: nn.Sequential) -> None:
    optimizer = with_gradients(model)
    save = LateCopy({"model": model.state_dict()}, everything_late=True)
    fence.guard(save)
    for _ in range(3):
        optimizer.step()
    assert save.waits == 1


def test_two_trainers_do_not_wait_for_each_other(fence: Fence, model: nn.Sequential) -> None:
    other = perceptron()
    optimizer, before = with_gradients(other), copy_of(other)
    save = HeldCopy(*model.parameters())
    fence.guard(save)
    assert Writer(optimizer.step).ended()
    assert not unchanged(other, before)
    assert not save.asked.is_set()
    save.copied.set()


def test_an_optimizer_whose_state_alone_is_saved_waits(fence: Fence, model: nn.Sequential) -> None:
    optimizer = with_gradients(model)
    optimizer.step()
    save = LateCopy({"optimizer": optimizer.state_dict()}, everything_late=True)
    fence.guard(save)
    optimizer.step()
    assert save.waits == 1
    assert save.torn == set()


def test_every_fence_is_asked(fence: Fence, model: nn.Sequential) -> None:
    optimizer = with_gradients(model)
    second = Fence(FENCE_S_MAX)
    saves = [LateCopy({"model": model.state_dict()}, everything_late=True) for _ in range(3)]
    for own, save in zip((fence, second, fence), saves, strict=True):
        own.guard(save)
    optimizer.step()
    assert [save.waits for save in saves] == [1, 1, 1]
    second.close()


def test_an_optimizer_that_cannot_be_understood_waits_for_everything(fence: Fence) -> None:
    class Odd(torch.optim.SGD):
        @property
        def state(self) -> Any:
            raise AttributeError("no state here")

        @state.setter
        def state(self, value: object) -> None: ...

        def step(self, closure: object = None) -> None: ...  # type: ignore[override]

    optimizer = Odd([nn.Parameter(torch.ones(2))], lr=0.1)
    save = LateCopy({"x": torch.ones(3)}, everything_late=True)
    fence.guard(save)
    optimizer.step()
    assert save.waits == 1


# Time.


def test_a_wait_ends_with_the_time_out_and_the_step_goes_on(model: nn.Sequential) -> None:
    fence = Fence(0.05)
    optimizer, before = with_gradients(model), copy_of(model)
    saves = [HeldCopy(*model.parameters()) for _ in range(2)]
    for save in saves:
        fence.guard(save)
    start = time.perf_counter()
    optimizer.step()
    took = time.perf_counter() - start
    assert all(save.given_up for save in saves)
    assert saves[0].allowed_s > saves[1].allowed_s == 0.0, "the time-out is for both together"
    assert not unchanged(model, before)
    assert took >= 0.05
    fence.close()


def test_a_fault_in_a_save_does_not_reach_training(
    fence: Fence, model: nn.Sequential, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(HeldCopy):
        def release(self, timeout_s: float) -> bool:
            raise ZeroDivisionError

    optimizer, before = with_gradients(model), copy_of(model)
    fence.guard(Broken(*model.parameters()))
    optimizer.step()
    assert not unchanged(model, before)
    assert "bug in portus" in caplog.text


def test_ctrl_c_during_a_wait_is_the_users(fence: Fence, model: nn.Sequential) -> None:
    class Interrupted(HeldCopy):
        def release(self, timeout_s: float) -> bool:
            if not self.asked.is_set():
                self.asked.set()
                raise KeyboardInterrupt
            return True

    optimizer, before = with_gradients(model), copy_of(model)
    fence.guard(Interrupted(*model.parameters()))
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert unchanged(model, before)
    assert fence._saves, "the save is still guarded"


@pytest.mark.parametrize("in_closure", [True, False])
def test_a_step_costs_a_few_lines_when_nothing_is_in_flight(
    fence: Fence, model: nn.Sequential, in_closure: bool
) -> None:
    """About two microseconds; lines are counted, which no busy machine changes."""
    optimizer = with_gradients(model)
    named: dict[str, object] = {"closure": lambda: 0.0} if in_closure else {}
    fences._before_step(optimizer, (optimizer,), named)
    with Lines() as ran:
        fences._before_step(optimizer, (optimizer,), named)
    print(f"{ran.count} lines")
    assert ran.count < 40


# Waiting by hand.


def test_wait_asks_only_the_saves_that_read_those_storages(fence: Fence) -> None:
    first, second = torch.ones(3), torch.ones(3)
    saves = [LateCopy({"x": each}, everything_late=True) for each in (first, second)]
    for save in saves:
        fence.guard(save)
    fence.wait({first.data_ptr()})
    assert [save.waits for save in saves] == [1, 0]
    before_write({first.data_ptr()})
    assert [save.waits for save in saves] == [1, 0]
    before_write()
    assert [save.waits for save in saves] == [1, 1]


def test_saves_that_are_over_are_forgotten(fence: Fence) -> None:
    for _ in range(5):
        save = LateCopy({"x": torch.ones(3)}, everything_late=True)
        fence.guard(save)
        save.finish()
    assert len(fence._saves) == 1


def test_closing_waits_for_what_is_in_flight() -> None:
    fence = Fence(FENCE_S_MAX)
    save = LateCopy({"x": torch.ones(3)}, everything_late=True)
    fence.guard(save)
    fence.close()
    fence.close()
    assert save.waits == 1
    before_write()
    assert save.waits == 1, "nothing is in flight any more"


# The guarded functions.


def test_memory_that_moves_to_another_process_moves_after_the_copy(fence: Fence) -> None:
    tensor = torch.ones(1000)
    before = tensor.data_ptr()
    save = LateCopy({"x": tensor}, everything_late=True)
    fence.guard(save)
    tensor.share_memory_()
    assert save.waits == 1
    assert tensor.data_ptr() != before


@pytest.mark.parametrize(
    "resize",
    [
        lambda tensor: tensor.untyped_storage().resize_(1 << 20),
        lambda tensor: tensor.data.resize_(1 << 18),
        lambda tensor: tensor.resize_as_(torch.ones(1 << 18)),
        lambda tensor: torch.resize_as_(tensor, torch.ones(1 << 18)),
    ],
    ids=["storage", "resize_", "resize_as_", "torch.resize_as_"],
)
def test_memory_that_is_resized_is_freed_after_the_copy(
    fence: Fence, resize: Callable[[torch.Tensor], object]
) -> None:
    tensor, other = torch.ones(1000), torch.ones(1000)
    before = tensor.data_ptr()
    save = LateCopy({"x": tensor}, everything_late=True)
    fence.guard(save)
    resize(other)
    assert save.waits == 0
    resize(tensor)
    assert save.waits == 1
    assert tensor.data_ptr() != before


def test_averaging_over_processes_waits(fence: Fence) -> None:
    from torch.distributed.algorithms.model_averaging import averagers

    save = LateCopy({"x": torch.ones(3)}, everything_late=True)
    fence.guard(save)
    averager = averagers.PeriodicModelAverager(period=2, process_group=object())  # type: ignore[arg-type]
    with pytest.raises(Exception):  # noqa: B017, PT011 - there is no process group
        averager.average_parameters([nn.Parameter(torch.ones(3))])
    assert save.waits == 1


def test_loading_another_module_does_not_wait(fence: Fence, model: nn.Sequential) -> None:
    save = LateCopy({"x": torch.ones(3)}, everything_late=True)
    fence.guard(save)
    model.load_state_dict(perceptron().state_dict())
    assert save.waits == 0


def names_of_guarded() -> dict[str, object]:
    """What stands at every guarded place that is loaded."""
    found = {}
    for guarded in guards.GUARDED:
        module, _, path = guarded.place.partition(":")
        owner: Any = sys.modules.get(module)
        *outer, name = path.split(".")
        if owner is not None:
            for part in outer:
                owner = getattr(owner, part)
            found[guarded.place] = vars(owner).get(name)
    return found


def test_every_guarded_function_exists() -> None:
    """A new torch or Lightning that renames one must be noticed here."""
    for guarded in guards.GUARDED:
        importlib.import_module(guarded.place.partition(":")[0])
    fence = Fence(FENCE_S_MAX)
    assert fences._patched.keys() == set(guards.GUARDED)
    fence.close()


def test_the_last_fence_leaves_torch_as_it_was() -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    before = names_of_guarded()
    hooks = dict(_global_optimizer_pre_hooks)
    first, second = Fence(FENCE_S_MAX), Fence(FENCE_S_MAX)
    assert len(_global_optimizer_pre_hooks) == len(hooks) + 1
    assert names_of_guarded() != before
    first.close()
    assert len(_global_optimizer_pre_hooks) == len(hooks) + 1
    second.close()
    assert dict(_global_optimizer_pre_hooks) == hooks
    assert names_of_guarded() == before
    assert "resize_" not in vars(torch.UntypedStorage), "inherited again"
    assert "resize_" not in vars(torch.Tensor), "inherited again"
    assert writers.live_optimizers() == []


def test_a_patch_of_somebody_else_is_left_to_them(
    monkeypatch: pytest.MonkeyPatch, model: nn.Sequential
) -> None:
    before = nn.Module.load_state_dict
    fence = Fence(FENCE_S_MAX)
    ours = nn.Module.load_state_dict

    def theirs(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        return ours(self, *arguments, **named)

    monkeypatch.setattr(nn.Module, "load_state_dict", theirs)
    fence.close()
    assert nn.Module.load_state_dict is theirs
    model.load_state_dict(perceptron().state_dict())
    monkeypatch.undo()
    assert nn.Module.load_state_dict is ours
    nn.Module.load_state_dict = before  # type: ignore[method-assign]


def test_fences_open_and_close_from_many_threads() -> None:
    before = names_of_guarded()

    def open_and_close() -> None:
        for _ in range(50):
            fence = Fence(FENCE_S_MAX)
            fence.guard(LateCopy({"x": torch.ones(3)}, everything_late=True))
            before_write()
            fence.close()

    threads = [Writer(open_and_close) for _ in range(4)]
    assert all(thread.ended() for thread in threads)
    assert names_of_guarded() == before
    assert fences._fences == ()
    assert fences._in_flight == 0


# Other places where Python runs.


def _step_in_child(optimizer: torch.optim.Optimizer) -> None:
    start = time.perf_counter()
    optimizer.step()
    os._exit(0 if time.perf_counter() - start < FENCE_S_MAX / 2 else 1)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_its_parents_copies(
    fence: Fence, model: nn.Sequential
) -> None:
    optimizer = with_gradients(model)
    save = HeldCopy(*model.parameters())
    fence.guard(save)
    child = multiprocessing.get_context("fork").Process(target=_step_in_child, args=(optimizer,))
    child.start()
    child.join(FENCE_S_MAX / 2)
    assert child.exitcode == 0
    save.copied.set()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_waits_too(fence: Fence, model: nn.Sequential) -> None:
    optimizer = with_gradients(model)
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        loss_of(model).backward()
        save = LateCopy({"model": model.state_dict()}, everything_late=True)
        fence.guard(save)
        compiled()
        assert save.waits == 1
        assert save.torn == set()
    assert optimizer in writers.live_optimizers()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_compiled_step_with_a_closure_waits_after_it(fence: Fence, model: nn.Sequential) -> None:
    optimizer = with_gradients(model)

    def closure() -> torch.Tensor:
        loss = loss_of(model)
        loss.backward()
        return loss

    compiled = torch.compile(lambda: optimizer.step(closure), backend="eager")
    for _ in range(3):
        save = LateCopy({"model": model.state_dict()}, everything_late=True)
        fence.guard(save)
        compiled()
        assert save.waits == 1
        assert save.torn == set()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_step_compiled_before_the_fence_was_opened_waits_too(model: nn.Sequential) -> None:
    optimizer = with_gradients(model)
    compiled = torch.compile(optimizer.step, backend="eager")
    compiled()
    for _ in range(2):
        fence = Fence(FENCE_S_MAX)
        optimizer.step()
        save = LateCopy({"model": model.state_dict()})
        assert len(save.late_names) == 4
        fence.guard(save)
        compiled()
        assert save.waits == 1
        assert save.torn == set()
        fence.close()


@pytest.mark.long
def test_an_open_fence_does_not_import_the_compiler() -> None:
    code = "\n".join(
        [
            "import sys, torch",
            "from portus.engine.fence.fence import Fence",
            "Fence(1.0)",
            "assert 'torch._dynamo' not in sys.modules",
        ]
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_optimizers_that_die_are_forgotten(fence: Fence, model: nn.Sequential) -> None:
    for _ in range(10):
        step(torch.optim.SGD(model.parameters(), lr=0.1), lambda: loss_of(model), in_closure=True)
    gc.collect()
    assert writers.live_optimizers() == []
    assert writers._known == {}
