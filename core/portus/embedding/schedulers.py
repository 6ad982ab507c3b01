"""Schedulers: they change optimizers after the update, and so after a batch seems to be over.

A loop calls ``optimizer.step()`` and then ``scheduler.step()``. What a batch saves of the
optimizer, and of the scheduler by ``extra``, must be as it is after both.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


def have_schedulers(optimizers: Sequence[Optimizer]) -> bool:
    """Return whether a scheduler of torch is there for one of the optimizers. Looks at all objects
    of the process, which takes tens of milliseconds."""
    ours = {id(each) for each in optimizers}
    return any(
        issubclass(type(each), LRScheduler) and id(vars(each).get("optimizer")) in ours
        for each in gc.get_objects()
    )


def settings_of(optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """Return what the optimizers are set to, such as learning rates, group by group."""
    return [
        {name: each for name, each in group.items() if isinstance(each, int | float | tuple | str)}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
