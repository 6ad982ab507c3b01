"""What torch calls in a training: before and after a step and a lookup, and around states; and
what the steps of schedulers call.

The hooks of steps are torch's own, for the optimizers of the whole process: one that was not passed
to ``protect`` must not update a table either.
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
from portus.companions.embedding.others import OtherStates
from portus.companions.embedding.schedulers import SchedulerSteps, optimizers_of, watch
from portus.companions.embedding.tables import check_ids
from portus.companions.embedding.training import ProtectedTraining
from portus.errors import PortusError


class Hooks:
    """The hooks of one training, until ``remove``. What torch keeps of them holds none of it: a
    training that nobody holds any more ends, and a copy of a module has no part in it."""

    def __init__(self, training: ProtectedTraining, batches: Batches, states: OtherStates) -> None:
        self._training: Final = training
        self._batches: Final = batches
        self._states: Final = states
        self._handles: list[Any] = []
        self._hook_steps()
        self._hook_modules()
        self._hook_optimizers()
        self._hook_schedulers()

    def remove(self) -> None:
        """Torch calls none of them any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook_steps(self) -> None:
        known = weakref.ref(self)

        def before(
            optimizer: Optimizer, arguments: tuple[object, ...], named: dict[str, object]
        ) -> tuple[tuple[object, ...], dict[str, object]] | None:
            owner = known()
            return None if owner is None else owner._before_step(optimizer, arguments, named)

        def after(optimizer: Optimizer, _: tuple[object, ...], __: dict[str, object]) -> None:
            owner = known()
            if owner is not None and owner._training.has(optimizer):
                watch()  # what a scheduler that was made since is a subclass of
                owner._batches.after_update(optimizer)

        self._handles.append(register_optimizer_step_pre_hook(before))
        self._handles.append(register_optimizer_step_post_hook(after))

    def _hook_modules(self) -> None:
        known = weakref.ref(self)

        def looked_up(module: torch.nn.Module, _: object) -> None:
            owner = known()
            if owner is not None:
                owner._training.check_lookup(module)

        def begun(module: torch.nn.Module, _: object) -> None:
            """Training calls it, and not an evaluation: the next batch has begun."""
            owner = None if torch.compiler.is_compiling() else known()
            if owner is None or not module.training or not torch.is_grad_enabled():
                return
            if module is owner._training.model or owner._training.table_of(module) is not None:
                with contextlib.suppress(PortusError):  # the update raises it
                    owner._batches.begin()

        def shown(
            module: torch.nn.Module, state: dict[str, Any], prefix: str, about: dict[str, Any]
        ) -> None:
            owner = known()
            table = None if owner is None else owner._training.table_of(module)
            if owner is not None and table is not None:
                owner._states.leave_out(table, state, prefix, about)

        def taken(
            module: torch.nn.Module,
            state: dict[str, Any],
            prefix: str,
            about: dict[str, Any],
            *_: object,
        ) -> None:
            owner = known()
            if owner is not None:
                table = owner._training.table_of(module)
                state.update(owner._states.fill(state, resumes=table is not None))
                if table is not None and prefix + "weight" in state:
                    owner._batches.before_others_write(table)
                    owner._states.go_on_from(about)

        model = self._training.model
        self._handles.append(model.register_forward_pre_hook(_Hook(begun)))
        for module, table in self._training.modules:
            self._handles += [
                module.register_forward_pre_hook(_Hook(begun)),
                module.register_forward_pre_hook(_Hook(_ids_hook(table.name, table.shape[0]))),
                module.register_forward_pre_hook(_Hook(looked_up)),
                module.register_state_dict_post_hook(_Hook(shown)),
                module.register_load_state_dict_pre_hook(_Hook(taken)),
            ]

    def _hook_optimizers(self) -> None:
        known = weakref.ref(self)

        def shown_by(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
            owner = known()
            return None if owner is None else owner._states.leave_out_rows(optimizer, state)

        def taken_by(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
            owner = known()
            return None if owner is None else owner._states.fill(state)

        def loaded(_: Optimizer) -> None:
            owner = known()
            if owner is not None:
                owner._batches.note_settings()

        for optimizer in self._training.optimizers:
            self._handles += [
                optimizer.register_load_state_dict_post_hook(loaded),
                optimizer.register_state_dict_post_hook(shown_by),
                optimizer.register_load_state_dict_pre_hook(taken_by),
            ]

    def _hook_schedulers(self) -> None:
        known = weakref.ref(self)

        def stepped(scheduler: object, is_made: bool) -> None:
            owner = known()
            if owner is not None and any(map(owner._training.has, optimizers_of(scheduler))):
                owner._batches.after_schedule(scheduler, is_made=is_made)

        self._handles.append(SchedulerSteps(stepped))

    def _before_step(
        self, optimizer: Optimizer, arguments: tuple[object, ...], named: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """An optimizer writes once its closure is over, if it has one: see ``Batches``."""
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
    """What torch calls of a module. What ``pickle`` makes of it does nothing: a module that went
    through a file is one like any other. A ``deepcopy`` of a module has the hook itself."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call: Final = call

    def __call__(self, *arguments: object) -> None:
        self._call(*arguments)

    def __deepcopy__(self, _: object) -> _Hook:
        return self

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _copy_hook, ()


def _copy_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: object) -> None: ...


def _ids_hook(name: str, rows: int) -> Callable[[torch.nn.Module, tuple[object, ...]], None]:
    def check(module: torch.nn.Module, arguments: tuple[object, ...]) -> None:
        if arguments:
            check_ids(name, rows, arguments[0])

    return check
