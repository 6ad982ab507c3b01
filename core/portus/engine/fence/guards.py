"""The functions of torch and Lightning that write parameters outside of an optimizer's step.

While any fence is open, each of them waits, before it writes, for the saves in flight that still
read the memory. The table has names, so that it imports nothing: the next save finds a module that
was loaded later. When the last fence closes, every function is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

import torch

from portus.engine.fence.writers import pointer

Arguments = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class GuardedFunction:
    """A function that writes. ``place`` is ``module:name`` or ``module:class.name``. ``written``
    returns the written storages (data pointers; None: any), from its positional arguments."""

    place: str
    written: Callable[[Arguments], Collection[int] | None]


def _of_module(arguments: Arguments) -> Collection[int]:
    module = arguments[0]
    assert isinstance(module, torch.nn.Module)
    return {pointer(parameter) for parameter in module.parameters()}


def _of_tensor(arguments: Arguments) -> Collection[int] | None:
    tensor = arguments[0] if arguments else None
    return (pointer(tensor),) if isinstance(tensor, torch.Tensor) else None


def _of_storage(arguments: Arguments) -> Collection[int]:
    storage = arguments[0]
    assert isinstance(storage, torch.UntypedStorage)
    try:
        return (storage.data_ptr(),)
    except RuntimeError:  # a storage without memory
        return ()


def _of_any(arguments: Arguments) -> None:
    return None


_LIGHTNING: Final = tuple(
    f"{package}.callbacks.{method}"
    for package in ("lightning.pytorch", "pytorch_lightning")
    for method in (
        "weight_averaging:WeightAveraging._swap_models",
        "weight_averaging:WeightAveraging._copy_average_to_current",
        "stochastic_weight_avg:StochasticWeightAveraging.transfer_weights",
    )
)

_AVERAGES: Final = tuple(
    f"{place}.{method}"
    for place in ("torch_ema.ema:ExponentialMovingAverage", "diffusers.training_utils:EMAModel")
    for method in ("copy_to", "restore")
)

GUARDED: Final = (
    GuardedFunction("torch.nn.modules.module:Module.load_state_dict", _of_module),
    GuardedFunction("torch.nn.functional:_no_grad_embedding_renorm_", _of_tensor),
    # These move a storage's memory and free the old one under a copy that reads it.
    GuardedFunction("torch.storage:UntypedStorage.resize_", _of_storage),
    GuardedFunction("torch:Tensor.resize_", _of_tensor),
    GuardedFunction("torch:Tensor.resize_as_", _of_tensor),
    GuardedFunction("torch:resize_as_", _of_tensor),
    GuardedFunction("torch.storage:UntypedStorage._share_fd_cpu_", _of_storage),
    GuardedFunction("torch.storage:UntypedStorage._share_filename_cpu_", _of_storage),
    GuardedFunction(
        "torch.distributed.algorithms.model_averaging.utils:average_parameters_or_parameter_groups",
        _of_any,
    ),
    GuardedFunction(
        "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.resolve_tensor", _of_any
    ),
    *(GuardedFunction(place, _of_any) for place in (*_LIGHTNING, *_AVERAGES)),
)
