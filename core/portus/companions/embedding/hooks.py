"""Hooks that torch calls in a training: around steps, lookups and states; and around the steps of
schedulers.

The hooks of steps are torch's own, for the optimizers of the whole process: an optimizer that was
not passed to ``protect`` must not update a table either. Torch has no hooks for the steps of
schedulers. So ``step`` of each class of schedulers is wrapped, once in a process.

States for ordinary checkpoints have no tables, but a mark in place of each. So a checkpoint beside
the tables is as small as the dense part, and a training that loads it continues with the tables of
that very batch.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from portus.companions.embedding.batches import Batches
from portus.companions.embedding.committer import Marks
from portus.companions.embedding.tables import ProtectedTraining
from portus.engine.state.walk import Elsewhere
from portus.errors import PortusError
from portus.reach.pools.elsewhere import replace_elsewhere

_ABOUT: Final = "portus.embedding"
"""The key for the pool and the batch in the metadata of a module's state (``_metadata``)."""

_open: Final[weakref.WeakSet[Hooks]] = weakref.WeakSet()
"""Hooks that are told of the steps of schedulers."""

_within: Final = threading.local()
"""``depth``: how many steps of schedulers this thread is inside of. One may contain others."""


class Hooks:
    """The hooks of one training, until ``remove``. Torch's references do not keep the training
    alive: an unused training ends, and a copy of a module has no part in it."""

    def __init__(self, training: ProtectedTraining, batches: Batches, marks: Marks) -> None:
        self._training: Final = training
        self._batches: Final = batches
        self._marks: Final = marks
        _open.add(self)
        _wrap_steps(LRScheduler)
        self._handles: list[Any] = [
            register_optimizer_step_pre_hook(_Hook(self, Hooks._before_step)),
            register_optimizer_step_post_hook(_Hook(self, Hooks._after_step)),
            training.model.register_forward_pre_hook(_Hook(self, Hooks._begin)),
        ]
        for module, _ in training.modules:
            self._handles += [
                module.register_forward_pre_hook(_Hook(self, Hooks._look_up)),
                module.register_state_dict_post_hook(_Hook(self, Hooks._leave_out)),
                module.register_load_state_dict_pre_hook(_Hook(self, Hooks._take)),
            ]
        for optimizer in training.optimizers:
            self._handles += [
                optimizer.register_load_state_dict_post_hook(_Hook(self, Hooks._after_load)),
                optimizer.register_state_dict_post_hook(_Hook(self, Hooks._leave_out_rows)),
                optimizer.register_load_state_dict_pre_hook(_Hook(self, Hooks._take_rows)),
            ]

    def remove(self) -> None:
        """Remove all hooks."""
        _open.discard(self)
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

    def _leave_out(
        self, module: torch.nn.Module, state: dict[str, Any], prefix: str, about: dict[str, Any]
    ) -> None:
        """Put a mark in place of the table in a module's state. about: receives the origin of the
        table, for a file that has the table filled in."""
        table = self._training.table_of(module)
        if table is not None and self._batches.may_mark:
            place = self._elsewhere("model", table.key)
            state[prefix + "weight"] = place
            about[_ABOUT] = {"pool": self._training.identity, "batch": place.batch}

    def _take(
        self,
        module: torch.nn.Module,
        state: dict[str, Any],
        prefix: str,
        about: dict[str, Any],
        *_: object,
    ) -> None:
        """Fill in the marks of a state that is about to be loaded. Continue at its batch, or at the
        one that the metadata of a loaded table name, if they are of this training."""
        table = self._training.table_of(module)
        state.update(self._fill(state, resumes=table is not None))
        if table is not None and prefix + "weight" in state:
            self._batches.before_others_write(table)
            known = about.get(_ABOUT)
            if isinstance(known, Mapping) and known.get("pool") == self._training.identity:
                batch = known.get("batch")
                if type(batch) is int and batch >= 0:
                    self._batches.go_on_from_mark(batch)

    # --- optimizers, and their schedulers -------------------------------------------------------

    def _leave_out_rows(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Return an optimizer's state with marks in place of its row tensors."""
        if not self._batches.may_mark:
            return None
        optimizers = self._training.optimizers
        number = next(i for i, each in enumerate(optimizers) if each is optimizer)
        rows = {
            tensor.data_ptr()
            for table in self._training.tables
            for tensor in table.tensors()[1:]
            if table.optimizer is optimizer
        }
        kept = {
            index: {
                key: self._elsewhere("optimizers", number, "state", index, key)
                if isinstance(value, torch.Tensor) and value.data_ptr() in rows
                else value
                for key, value in each.items()
            }
            for index, each in state["state"].items()
        }
        return {**state, "state": kept}

    def _take_rows(self, _: Optimizer, state: dict[str, Any]) -> Any:
        return self._fill(state)

    def _after_load(self, _: Optimizer) -> None:
        self._batches.note_settings()

    def after_schedule(self, scheduler: Any, is_made: bool) -> None:
        """Note the step of a scheduler of these optimizers, or of one around them."""
        seen, each = set[int](), getattr(scheduler, "optimizer", None)
        while each is not None and id(each) not in seen:
            seen.add(id(each))
            if self._training.has(each):
                self._batches.after_schedule(scheduler, is_made=is_made)
                return
            each = getattr(each, "optimizer", None)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._training.has(optimizer):
            _wrap_steps(LRScheduler)  # of classes that were defined since
            self._batches.after_update(optimizer)

    def _before_step(
        self, optimizer: Optimizer, arguments: tuple[object, ...], named: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Prepare the update of an optimizer after its closure, if it has one: see ``Batches``."""
        if not self._training.has(optimizer):
            self._training.check_update(optimizer)
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

    # --- marks ----------------------------------------------------------------------------------

    def _fill(self, state: Any, *, resumes: bool = True) -> Any:
        """Return a state with its marks filled in; ``resumes``: training continues from there."""
        places: list[Elsewhere] = []

        def of(place: Elsewhere, path: str) -> object:
            places.append(place)
            return self._marks.read(place)

        filled = replace_elsewhere(state, of)
        if places and resumes:
            self._batches.go_on_from_mark(places[0].batch)
        return filled

    def _elsewhere(self, *path: str | int) -> Elsewhere:
        batch, token = self._batches.mark()
        return Elsewhere(self._training.name, token, batch, path)


class _Hook:
    """A hook that calls its training as long as that exists. A pickled hook does nothing, since a
    module from a file is an ordinary one. A ``deepcopy`` of a module has the hook itself."""

    def __init__(self, owner: Hooks | None = None, call: Callable[..., Any] | None = None) -> None:
        self._known: Final = None if owner is None else weakref.ref(owner)
        self._call: Final = call

    def __call__(self, *arguments: Any) -> Any:
        owner = None if self._known is None else self._known()
        return None if owner is None or self._call is None else self._call(owner, *arguments)

    def __deepcopy__(self, _: object) -> _Hook:
        return self

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def _wrap_steps(kind: type) -> None:
    """Wrap the steps of a class of schedulers, and of all existing classes below it."""
    for name in ("step", "_initial_step"):  # the latter is called as one is made
        step = kind.__dict__.get(name)
        # Wrapped once, however often this is called.
        if callable(step) and not hasattr(step, "_tells_portus"):
            setattr(kind, name, _wrap_step(step, is_made=name != "step"))
    kinds: list[type] = kind.__subclasses__()
    for each in kinds:
        _wrap_steps(each)


def _wrap_step(step: Callable[..., object], *, is_made: bool) -> Callable[..., object]:
    @functools.wraps(step)
    def tell(scheduler: Any, *arguments: Any, **named: Any) -> object:
        depth = getattr(_within, "depth", 0)
        _within.depth = depth + 1
        try:
            result = step(scheduler, *arguments, **named)
        finally:
            _within.depth = depth
        if not depth:
            for each in list(_open):
                each.after_schedule(scheduler, is_made)
        return result

    tell._tells_portus = True  # type: ignore[attr-defined]
    return tell
