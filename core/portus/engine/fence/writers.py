"""The writers that can change a tensor, and whether a storage may be copied late (V7).

Theory. A storage is *stable* when the only expected writer is the step of an optimizer whose steps
pass our hook: then the fence keeps the step back until the copy has ended. All others are
*volatile* and are copied before save returns. So a storage is stable only if all of this holds:

1. it is the memory of a parameter in the groups of a live optimizer that our hook has seen
   stepping, or of a tensor in that optimizer's state;
2. the parameter requires a gradient, and it was trained: it has optimizer state, or a gradient
   (an optimizer that keeps no state, or one that keeps all of it at its first parameter);
3. those tensors fill the storage: no other tensor has bytes in it (a view of them may);
4. the optimizer writes in ``step`` only. Torch's own do. A class from elsewhere is trusted if it
   adds no public method (schedule-free ``train`` and ``eval``, SAM's ``first_step``, Lookahead's
   ``sync``, swaps of averaged weights: all of them write parameters outside of ``step``);
5. its step is not recorded into a CUDA graph (a replay calls no hook), nor done by DDP;
6. no module renormalises the parameter in forward (``max_norm``), and no audit found it torn in
   the last saves.

All of this takes a walk over the objects of the process, 30 to 100 ms for each training. A state
that is copied in less than a millisecond is all volatile: ``SMALL``.

Writes that cannot be known (``p.data.clamp_()`` in a callback) are left to the audit.
``docs/writers.md`` lists every writer, its guard, and the test.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

import torch
from torch.optim.optimizer import Optimizer

SMALL: int = 4 << 20
"""Bytes of a state up to which its writers are not searched for: save copies it at once."""


def classify(
    storages: Sequence[torch.UntypedStorage],
    owned: Collection[int] = (),
    guilty: Collection[int] = (),
) -> bytearray:
    """Return one flag per storage, in order: whether it is stable. Copies and reads nothing; takes
    milliseconds.

    storages: those of a state, distinct. owned: indices of private copies, which no other code
    refers to: always stable. guilty: data pointers of torn storages, as audits found: not stable.

    The first call after the trained parameters changed walks the objects of the process for modules
    and optimizers that write parameters in other ways. A state of ``SMALL`` bytes is not worth
    that: all of it is volatile, except ``owned``.
    """
    cover = _Cover(storages)
    if cover.size > SMALL:
        _find_stable(cover, guilty)
    flags = cover.flags()
    for index in owned:
        flags[index] = True
    return flags


def _find_stable(cover: _Cover, guilty: Collection[int]) -> None:
    """Add the stable tensors to the cover, and bar the storages that are not stable."""
    live = live_optimizers()
    trusted = [optimizer for optimizer in live if _is_trusted(optimizer)]
    trained = [parameter for optimizer in trusted for parameter in _parameters(optimizer)]
    if not trained:
        return
    for optimizer in trusted:
        cover.add(_tensors_changed_by(optimizer))
    around = _surroundings_of(trained)
    barred = [optimizer for optimizer in live if optimizer not in trusted]
    for optimizer in (*barred, *around.optimizers()):
        for tensor in _tensors_written_by(optimizer):
            cover.bar(pointer(tensor))
    for weight in around.renormalised_weights():
        cover.bar(pointer(weight))
    for address in guilty:
        cover.bar(address)


def pointer(tensor: torch.Tensor) -> int:
    """Return the data pointer of the tensor's storage; 0 if it has no memory of its own (meta,
    empty, wrapper subclasses)."""
    try:
        return local(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # torch's words for "has no storage"
        return 0


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard of a ``DTensor`` that is in this process; any other tensor itself."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    shard = getattr(tensor, "_local_tensor", None)
    return shard if isinstance(shard, torch.Tensor) else tensor


# The optimizers seen stepping.

_HAS_CUDA: Final = bool(torch.version.cuda or torch.version.hip)
_cuda_is_initialized: Final[Callable[[], bool]] = torch.cuda.is_initialized
_known: dict[int, weakref.ref[Optimizer]] = {}
_recorded: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def learn(optimizer: Optimizer) -> None:
    """Note that the hook saw an optimizer step. Any thread; repeats take under a microsecond."""
    key = id(optimizer)
    if key not in _known:
        _known[key] = weakref.ref(optimizer, lambda _: _known.pop(key, None))
    if _HAS_CUDA and _cuda_is_initialized() and torch.cuda.is_current_stream_capturing():
        _recorded.add(optimizer)


def forget() -> None:
    """Forget every optimizer: the hook is gone, so it no longer sees their steps."""
    _known.clear()


def live_optimizers() -> list[Optimizer]:
    """Return the live optimizers whose steps pass the hook, in the order of their first step."""
    return [optimizer for ref in list(_known.values()) if (optimizer := ref()) is not None]


def owns(optimizer: Optimizer, storages: Collection[int]) -> bool:
    """Return True if a parameter or a state tensor of ``optimizer`` is in one of these storages
    (data pointers). Ends at the first one found."""
    return any(pointer(tensor) in storages for tensor in _tensors_written_by(optimizer))


def with_kin(storages: frozenset[int]) -> frozenset[int]:
    """Return storages (data pointers), and all of each optimizer that has one of them."""
    if not storages:
        return storages
    every = ({pointer(each) for each in _tensors_written_by(known)} for known in live_optimizers())
    return storages.union(*(own for own in every if not storages.isdisjoint(own))) - {0}


def updates_after_closure(optimizer: Optimizer) -> bool:
    """Return True if the step of an optimizer changes nothing before its closure has returned.

    True of every optimizer in ``torch.optim`` (a test steps each of them). Lightning passes forward
    and backward as the closure, so this is where they overlap with the copy. Another pre-hook of
    this optimizer could write first, so with one it is False.
    """
    # torch calls these after the global hooks, ours among them, and before the closure.
    if optimizer.__dict__.get("_optimizer_step_pre_hooks"):
        return False
    for base in type(optimizer).__mro__:
        if "step" in vars(base):
            return _is_torch_optim(base) and _is_torch_optim(vars(base)["step"])
    return False


def _is_torch_optim(thing: object) -> bool:
    return f"{getattr(thing, '__module__', '')}.".startswith("torch.optim.")


def _tensors_written_by(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    yield from _parameters(optimizer)
    for state in list(optimizer.state.values()):
        yield from _tensors_in(state)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _tensors_in(state: object) -> list[torch.Tensor]:
    """Return the tensors in the state of one parameter: a dict, with lists in it for LBFGS."""
    if isinstance(state, torch.Tensor):
        return [state]
    if not isinstance(state, (dict, list, tuple)):
        return []
    found: list[torch.Tensor] = []
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (dict, list, tuple)):
            found += _tensors_in(value)
    return found


# Trust.


_USUAL: Final = frozenset({"step", "zero_grad", "add_param_group", "state_dict"})
"""Public methods that any optimizer may have. Not ``load_state_dict``: some classes from elsewhere
copy into their parameters there."""

_only_step: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def writes_only_in_step(cls: type[Optimizer]) -> bool:
    """Return True if, by its methods, an optimizer of this class writes only in ``step``."""
    found = _only_step.get(cls)
    if found is None:
        found = _only_step[cls] = not any(_own_methods(base) - _USUAL for base in cls.__mro__)
    return found


def _own_methods(base: type) -> set[str]:
    """Return the names of the public methods that a class from outside torch adds."""
    if base.__module__.partition(".")[0] in ("torch", "builtins", "abc", "typing"):
        return set()
    return {
        name
        for name, value in vars(base).items()
        if not name.startswith("_")
        and (callable(value) or isinstance(value, (staticmethod, classmethod)))
    }


def _is_trusted(optimizer: Optimizer) -> bool:
    cls = type(optimizer)
    return (
        getattr(cls.step, "hooked", False)  # otherwise torch calls no hook, also not ours
        and writes_only_in_step(cls)
        and optimizer not in _recorded
        and not optimizer.__dict__.get("_overlap_with_ddp", False)
    )


def _tensors_changed_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the tensors that the next step of a trusted optimizer changes, and its states."""
    states = optimizer.state
    changed: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        capturable = bool(group.get("capturable", False))
        for parameter in group["params"]:
            if capturable and parameter.is_cuda:
                continue  # made to be recorded into a graph; its replays call no hook
            if parameter.requires_grad and (states.get(parameter) or parameter.grad is not None):
                changed.append(parameter)
    for state in states.values():
        changed += _tensors_in(state)
    return changed


class _Cover:
    """The storages of a state, and how far the added tensors fill them."""

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        addresses = [storage.data_ptr() for storage in storages]
        self._index: Final = {address: index for index, address in enumerate(addresses) if address}
        self._room: Final = [storage.nbytes() for storage in storages]
        self._flags: Final = bytearray(len(self._room))
        self._parts: Final[dict[int, dict[int, int]]] = {}
        self._barred: Final[set[int]] = set()

    @property
    def size(self) -> int:
        return sum(self._room)

    def add(self, tensors: list[torch.Tensor]) -> None:
        index_of, room, flags = self._index.get, self._room, self._flags
        for tensor in tensors:  # tens of thousands: nothing here may cost a microsecond
            try:
                address = tensor.data_ptr()
            except (RuntimeError, NotImplementedError):  # no storage: it cannot be in the state
                continue
            if address == 0:
                tensor = local(tensor)
                address = tensor.data_ptr()
            index = index_of(address)
            if index is not None and tensor.nbytes >= room[index]:
                flags[index] = True
            else:
                self._add_part(tensor, address)

    def _add_part(self, tensor: torch.Tensor, address: int) -> None:
        index = self._index.get(pointer(tensor))
        if index is not None:
            parts = self._parts.setdefault(index, {})
            parts[address] = max(tensor.nbytes, parts.get(address, 0))

    def bar(self, address: int) -> None:
        index = self._index.get(address)
        if index is not None:
            self._barred.add(index)

    def flags(self) -> bytearray:
        """Return the answer. Call it once."""
        for index, parts in self._parts.items():
            if _union_size(parts) >= self._room[index]:
                self._flags[index] = True
        for index in self._barred:
            self._flags[index] = False
        return self._flags


def _union_size(parts: dict[int, int]) -> int:
    """Return the bytes under the union of runs, address -> size."""
    total = end = 0
    for address, size in sorted(parts.items()):
        total += max(0, address + size - max(address, end))
        end = max(end, address + size)
    return total


# Other objects of this process.


class _Surroundings:
    """Live modules and optimizers that may write parameters in ways of their own.

    ``of``: the identities of the parameters it was made for. Objects hidden by a frozen garbage
    collector (``gc.freeze``) are not found.
    """

    def __init__(self, of: list[int]) -> None:
        self.of: Final = of
        self._modules: Final[list[weakref.ref[torch.nn.Module]]] = []
        self._optimizers: Final[list[weakref.ref[Optimizer]]] = []
        modules, optimizers = _family(torch.nn.Module), _family(Optimizer)
        either = modules | optimizers
        # Never isinstance: it may run code of lazy proxies.
        for thing in [each for each in gc.get_objects() if type(each) in either]:
            if type(thing) in optimizers:
                if _is_suspect(thing):
                    self._optimizers.append(weakref.ref(thing))
            elif "max_norm" in thing.__dict__:
                self._modules.append(weakref.ref(thing))

    def renormalised_weights(self) -> Iterator[torch.Tensor]:
        """Yield the weights that a forward renormalises, now: ``max_norm`` may be set at any
        time."""
        for ref in self._modules:
            module = ref()
            if module is not None and module.__dict__.get("max_norm") is not None:
                yield from (weight for weight in module._parameters.values() if weight is not None)

    def optimizers(self) -> list[Optimizer]:
        """Return the live optimizers that may write outside of ``step``, stepped or not."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]


def _family(cls: type) -> set[type]:
    """Return the class and all classes that were ever derived from it."""
    found, left = {cls}, [cls]
    while left:
        new: set[type] = set(type.__subclasses__(left.pop())) - found
        found |= new
        left += new
    return found


def _is_suspect(optimizer: Optimizer) -> bool:
    """Return True for an optimizer with groups of its own that may write outside of ``step``.
    Wrappers that only pass calls on (Lightning's, Accelerate's) have none."""
    return "param_groups" in optimizer.__dict__ and not writes_only_in_step(type(optimizer))


_surroundings: _Surroundings | None = None


def _surroundings_of(trained: list[torch.Tensor]) -> _Surroundings:
    global _surroundings
    # The walk takes 30 to 100 ms: once, until other tensors are trained.
    identities = [id(parameter) for parameter in trained]
    found = _surroundings
    if found is None or found.of != identities:
        found = _surroundings = _Surroundings(identities)
    return found
