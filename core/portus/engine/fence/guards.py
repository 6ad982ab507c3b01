"""The functions of torch and Lightning that write parameters and are no optimizer's step.

While any fence is open, each of them waits, before it writes, for the saves in flight that still
read what it is about to write. One table, by name, so that nothing is imported for it: a module
that is loaded later is found at the next save. When the last fence closes, every function is what
it was.
"""

from __future__ import annotations

import abc
import functools
import inspect
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

import torch

from portus.engine.fence.writers import pointer

Arguments = tuple[object, ...]
Written = Callable[[], "Collection[int] | None"]
"""The storages (data pointers) about to be written, None for any. Asked only if a save is in
flight."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """A function that writes. ``place`` is ``module:name`` or ``module:class.name``; ``written``
    says, from its positional arguments, which storages it writes (None: any of them)."""

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
    Guarded("torch.nn.modules.module:Module.load_state_dict", _of_module),
    Guarded("torch.nn.functional:_no_grad_embedding_renorm_", _of_tensor),
    # These move a storage's memory and free the old one under a copy that reads it.
    Guarded("torch.storage:UntypedStorage.resize_", _of_storage),
    Guarded("torch:Tensor.resize_", _of_tensor),
    Guarded("torch:Tensor.resize_as_", _of_tensor),
    Guarded("torch:resize_as_", _of_tensor),
    Guarded("torch.storage:UntypedStorage._share_fd_cpu_", _of_storage),
    Guarded("torch.storage:UntypedStorage._share_filename_cpu_", _of_storage),
    Guarded(
        "torch.distributed.algorithms.model_averaging.utils:average_parameters_or_parameter_groups",
        _of_any,
    ),
    Guarded(
        "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.resolve_tensor", _of_any
    ),
    *(Guarded(place, _of_any) for place in (*_LIGHTNING, *_AVERAGES)),
)


class Guards(abc.ABC):
    """The patched functions.

    Not for several threads at once: the fence's lock is held around it.
    """

    def __init__(self) -> None:
        self._missing: list[Guarded] = list(GUARDED)
        self._patches: list[_Patch] = []

    @abc.abstractmethod
    def wait(self, written: Written) -> None:
        """Wait before a write. Raises nothing."""

    def put_on(self) -> None:
        """Patch what is loaded by now. Calling it again costs microseconds."""
        missing = []
        for guarded in self._missing:
            patch = _patch(guarded, self)
            if patch is None:
                missing.append(guarded)
            else:
                self._patches.append(patch)
        self._missing = missing

    def take_off(self) -> None:
        """Put every function back. What somebody else has patched since is left to them; our
        part of it only passes calls on."""
        for patch in self._patches:
            patch.undo()
        self._patches = []
        self._missing = list(GUARDED)


@dataclass(frozen=True, slots=True)
class _Patch:
    owner: object
    name: str
    ours: object
    before: object
    inherited: bool

    def undo(self) -> None:
        # Somebody patched it since, over ours: to restore it would remove theirs.
        if vars(self.owner).get(self.name) is not self.ours:
            return
        # If it were set, the class would no longer see a change of its base.
        if self.inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


def _patch(guarded: Guarded, guards: Guards) -> _Patch | None:
    """Put the guard in place; None if the function is not loaded, or not in this version."""
    module_name, _, path = guarded.place.partition(":")
    owner: object = sys.modules.get(module_name)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part, None)
    # getattr would unwrap a staticmethod, and ``undo`` would put back a plain function.
    before = None if owner is None else inspect.getattr_static(owner, name, None)
    if before is None:
        return None
    inherited = name not in vars(owner)
    if isinstance(before, staticmethod):
        ours: object = staticmethod(_waiting(before.__func__, guarded, guards))
    else:
        assert callable(before), f"{guarded.place} is no function"
        ours = _waiting(before, guarded, guards)
    setattr(owner, name, ours)
    return _Patch(owner, name, ours, before, inherited)


def _waiting(
    function: Callable[..., object], guarded: Guarded, guards: Guards
) -> Callable[..., object]:
    @functools.wraps(function)
    def waits(*arguments: object, **named: object) -> object:
        # While torch.compile traces, nothing is written; the test is folded away.
        if not torch.compiler.is_compiling():
            guards.wait(lambda: guarded.written(arguments))
        return function(*arguments, **named)

    return waits
