"""Hooks that torch calls in a training: around steps, lookups and states; and around the steps of
schedulers.

The hooks of steps are torch's own, for the optimizers of the whole process: an optimizer that was
not passed to ``protect`` must not update a table either.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from portus.companions.embedding.batches import Batches
from portus.companions.embedding.ordinary_states import OtherStates
from portus.companions.embedding.schedulers import SchedulerSteps, optimizers_of, watch
from portus.companions.embedding.training import ProtectedTraining
from portus.errors import PortusError


class Hooks:
    """The hooks of one training, until ``remove``. Torch's references do not keep the training
    alive: an unused training ends, and a copy of a module has no part in it."""

    def __init__(self, training: ProtectedTraining, batches: Batches, states: OtherStates) -> None:
        self._training: Final = training
        self._batches: Final = batches
        self._states: Final = states
        self._handles: list[Any] = [
            register_optimizer_step_pre_hook(_Hook(self, Hooks._before_step)),
            register_optimizer_step_post_hook(_Hook(self, Hooks._after_step)),
            training.model.register_forward_pre_hook(_Hook(self, Hooks._begin)),
            SchedulerSteps(_Hook(self, Hooks._after_schedule)),
        ]
        for module, _ in training.modules:
            self._handles += [
                module.register_forward_pre_hook(_Hook(self, Hooks._look_up)),
                module.register_state_dict_post_hook(_Hook(self, Hooks._show)),
                module.register_load_state_dict_pre_hook(_Hook(self, Hooks._take)),
            ]
        for optimizer in training.optimizers:
            self._handles += [
                optimizer.register_load_state_dict_post_hook(_Hook(self, Hooks._after_load)),
                optimizer.register_state_dict_post_hook(_Hook(self, Hooks._show_rows)),
                optimizer.register_load_state_dict_pre_hook(_Hook(self, Hooks._take_rows)),
            ]

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # --- modules --------------------------------------------------------------------------------

    def _begin(self, module: torch.nn.Module, _: object) -> None:
        """Begin the next batch if training calls the module, and not evaluation."""
        if torch.compiler.is_compiling() or not module.training or not torch.is_grad_enabled():
            return
        if module is self._training.model or self._training.table_of(module) is not None:
            with contextlib.suppress(PortusError):  # the update raises it
                self._batches.begin()

    def _look_up(self, module: torch.nn.Module, arguments: tuple[object, ...]) -> None:
        if module is not self._training.model:  # whose batch began above
            self._begin(module, arguments)
        self._training.check_lookup(module, arguments)

    def _show(
        self, module: torch.nn.Module, state: dict[str, Any], prefix: str, about: dict[str, Any]
    ) -> None:
        table = self._training.table_of(module)
        if table is not None:
            self._states.leave_out(table, state, prefix, about)

    def _take(
        self,
        module: torch.nn.Module,
        state: dict[str, Any],
        prefix: str,
        about: dict[str, Any],
        *_: object,
    ) -> None:
        table = self._training.table_of(module)
        state.update(self._states.fill(state, resumes=table is not None))
        if table is not None and prefix + "weight" in state:
            self._batches.before_others_write(table)
            self._states.go_on_from(about)

    # --- optimizers, and their schedulers -------------------------------------------------------

    def _show_rows(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        return self._states.leave_out_rows(optimizer, state)

    def _take_rows(self, _: Optimizer, state: dict[str, Any]) -> Any:
        return self._states.fill(state)

    def _after_load(self, _: Optimizer) -> None:
        self._batches.note_settings()

    def _after_schedule(self, scheduler: object, is_made: bool) -> None:
        if any(map(self._training.has, optimizers_of(scheduler))):
            self._batches.after_schedule(scheduler, is_made=is_made)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._training.has(optimizer):
            watch()  # for classes of schedulers that were defined since
            self._batches.after_update(optimizer)

    def _before_step(
        self, optimizer: Optimizer, arguments: tuple[object, ...], named: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Prepare the update of an optimizer after its closure, if it has one: see ``Batches``."""
        if not self._training.has(optimizer):
            self._training.check_stranger(optimizer)
            return None
        closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)
        if not callable(closure):
            self._batches.before_update(optimizer)
            return None

        def evaluate() -> object:
            result = closure()
            self._batches.before_update(optimizer)
            return result

        if "closure" in named:
            return arguments, {**named, "closure": evaluate}
        return (arguments[0], evaluate, *arguments[2:]), named


class _Hook:
    """A hook that calls its training as long as that exists. A pickled hook does nothing, since a
    module from a file is an ordinary one. A ``deepcopy`` of a module has the hook itself."""

    def __init__(self, owner: Hooks, call: Callable[..., Any]) -> None:
        self._known: Final = weakref.ref(owner)
        self._call: Final = call

    def __call__(self, *arguments: Any) -> Any:
        owner = self._known()
        return None if owner is None else self._call(owner, *arguments)

    def __deepcopy__(self, _: object) -> _Hook:
        return self

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _copy_hook, ()


def _copy_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: object) -> None: ...
