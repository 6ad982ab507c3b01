"""Schedulers of learning rates, and the settings of an optimizer that they change.

Torch has hooks for the steps of optimizers, and none for those of schedulers. So ``step`` of each
class of schedulers is wrapped, once in a process, and calls the registered functions.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Told = Callable[[Any, bool], None]
"""Receives a scheduler that stepped, and whether its constructor made the step."""

_told: Final[dict[SchedulerSteps, Told]] = {}
_within: Final = threading.local()
"""``depth``: how many steps of schedulers this thread is inside of. One may contain others."""


class SchedulerSteps:
    """A registration for the steps of all schedulers: each calls ``told``, until ``remove``."""

    def __init__(self, told: Told) -> None:
        _told[self] = told
        watch()

    def remove(self) -> None:
        """End the registration."""
        _told.pop(self, None)


def watch() -> None:
    """Wrap the steps of all existing classes of schedulers."""
    _watch(LRScheduler)


def _watch(kind: type) -> None:
    for name in ("step", "_initial_step"):  # the latter is called as one is made
        step = kind.__dict__.get(name)
        # Wrapped once, however often this is called.
        if callable(step) and not hasattr(step, "_tells_portus"):
            setattr(kind, name, _telling(step, is_made=name != "step"))
    kinds: list[type] = kind.__subclasses__()
    for each in kinds:
        _watch(each)


def _telling(step: Callable[..., object], *, is_made: bool) -> Callable[..., object]:
    @functools.wraps(step)
    def tell(scheduler: Any, *arguments: Any, **named: Any) -> object:
        depth = getattr(_within, "depth", 0)
        _within.depth = depth + 1
        try:
            result = step(scheduler, *arguments, **named)
        finally:
            _within.depth = depth
        if not depth:
            for each in list(_told.values()):
                each(scheduler, is_made)
        return result

    tell._tells_portus = True  # type: ignore[attr-defined]
    return tell


def optimizers_of(scheduler: Any) -> list[Any]:
    """Return the optimizer of a scheduler, and the optimizers that it is wrapped around."""
    found, each = list[Any](), getattr(scheduler, "optimizer", None)
    while each is not None and not any(each is other for other in found):
        found.append(each)
        each = getattr(each, "optimizer", None)
    return found


def settings_of(optimizers: Sequence[Optimizer]) -> str:
    """Return learning rates, momenta and other settings of the groups, for comparison."""
    return repr(
        [
            {key: _value(value) for key, value in group.items() if key != "params"}
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
    )


def _value(value: object) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else value
