"""Data order and random numbers after a resume, as if there had been no interruption.

Accelerate restores the generators as they were at the save. Portus follows plain loaders of
map-style datasets, which continue where they were (``data``). Other loaders, a
``StatefulDataLoader`` or one of an ``IterableDataset``, or their script skip the data themselves;
this module makes them draw the same numbers.

In the middle of an epoch the script makes a new iterator, which draws from the generators: a seed
for workers, and with workers the order. So the order differs, and all later draws are shifted. To
repeat the other run: restore the generators as they were when *that epoch's* iterator was made,
make the new one (the loader skips the delivered batches), and restore the generators of the save
before the first batch.

At an epoch's end there is less to undo: the other run made its next iterator after the save. Portus
restores what Accelerate does not: generators of samplers, and the number of epochs done. A
``StatefulDataLoader`` first makes the iterator of the old epoch, from its state, which draws; so
the generators are restored to the moment before that.

The first iterator of a ``StatefulDataLoader`` is made when Accelerate wraps it, long before the
epoch that uses it: it is asked for its state then. It draws there, with workers the order too. So
Portus remembers that moment as well, and makes an iterator as of then, in place of the first one;
with the sampler of then, too, which Accelerate may replace afterwards.

Not repeated: draws of such a dataset in the training process itself for the batches (one or two)
that were prefetched at the call of the save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch

import portus
from portus_accelerate import data
from portus_accelerate.settings import ACCELERATE

_log: Final = logging.getLogger("portus_accelerate")

KEY: Final = "portus"
"""The key in the file of random states; Accelerate reads only the keys that it knows."""

FORMAT: Final = 2

_FIRST_WAITS: Final = "_initial_iter_for_state_dict"
"""The attribute of a ``StatefulDataLoader`` that is True if its iterator was made for a state."""

_OTHER_KIND: Final = (
    "its loader was of another kind at the save, as with use_stateful_dataloader or without: "
    "prepare it as it was"
)

_SAMPLERS_MAX: Final = 8
_END: Final = object()


@dataclass(frozen=True)
class _ResumedLoader:
    """A loader to resume: in the middle of an epoch, from ``start``, with the generators ``now``
    after it; or without ``start``, after an epoch's end."""

    loader: Any
    prepared: list[Any]
    start: dict[str, Any] | None = None
    now: torch.Tensor | None = None

    def is_of(self, loader: Any) -> bool:
        """Return True if ``loader`` is this one, or ``skip_first_batches`` made it from this one:
        then it is none of the prepared ones, which may have the same data."""
        if any(each is loader for each in self.prepared):
            return loader is self.loader
        return loader.dataset is self.loader.dataset


_waiting: list[_ResumedLoader] = []


def positions(accelerator: Any, *, with_states: bool) -> dict[str, Any]:
    """Return this process's position in its data. with_states: states of stateful loaders too,
    which differ from the main process's."""
    loaders = accelerator._dataloaders
    active = accelerator.gradient_state.active_dataloader
    found: dict[str, Any] = {
        "format": FORMAT,
        "processes": accelerator.num_processes,
        "loaders": [_position(each) for each in loaders],
    }
    index = None if active is None else _index_of(active, loaders)
    if index is not None and data.of(active) is None:
        epochs = getattr(active, "iteration", None)
        if epochs is not None:  # counted only when the loop asks for one more batch
            found["loaders"][index]["iteration"] = epochs + active.end_of_dataloader
        start = getattr(active, "_portus_start", None)
        if start is not None and not active.end_of_dataloader:
            found["running"] = {"index": index, "start": start}
    if with_states:
        found["states"] = [
            each.state_dict() if getattr(each, "use_stateful_dataloader", False) else None
            for each in loaders
        ]
    return found


def go_back(accelerator: Any, saved: Any, of_main: Any) -> None:
    """Let the loaders continue where ``positions`` was called; the generators have been restored.

    of_main: the positions of the main process; ``saved`` is the same after saves of another number
    of processes. Raises ``UsageError`` for those of a newer Portus, and as ``portus.DataCursor``.
    """
    _waiting.clear()
    loaders = accelerator._dataloaders
    for followed in filter(None, map(data.of, loaders)):
        followed.forget()
    if not isinstance(saved, dict):
        return
    ACCELERATE.require_format("positions in data", saved["format"], FORMAT)
    then = portus.capture_randomness(data.drawing_device())
    if len(saved["loaders"]) != len(loaders) and accelerator.is_main_process:
        _log.warning(
            "Portus: %d data loaders were prepared when this state was saved, and %d are now. "
            "Each resumes from the loader that was prepared at the same place in the order; "
            "others begin their epoch. Prepare the same ones, in the same order, before load_state",
            len(saved["loaders"]),
            len(loaders),
        )
    running = saved.get("running")
    for number, (loader, *both) in enumerate(
        zip(loaders, saved["loaders"], of_main["loaders"], strict=False)
    ):
        plain = data.of(loader)
        # The main process's, if that alone loads.
        own = both[plain is not None and plain.is_dispatched]
        _put(loader, own)
        told = ""
        if plain is not None and "plain" in own:
            told = plain.load_state_dict(own["plain"])
        elif plain is None:
            told = _OTHER_KIND if data.is_within(own.get("plain")) else ""
        elif running is not None and running["index"] == number:
            told = _OTHER_KIND
        if told and accelerator.is_main_process:
            data.tell(told)
    for loader, state in zip(loaders, saved.get("states", ()), strict=False):
        if state is not None and getattr(loader, "use_stateful_dataloader", False):
            loader.load_state_dict(state)
    for loader, position in zip(loaders, saved["loaders"], strict=False):
        if position.get("made") is not None:
            _make_first(loader, position["made"])
            _put_generators(loader, position["generators"])
            portus.restore_randomness(then, data.drawing_device())
    if running is not None and running["index"] < len(loaders):
        loader = loaders[running["index"]]
        now = portus.capture_randomness(data.drawing_device())
        _waiting.append(_ResumedLoader(loader, loaders, running["start"], now))
    for loader in loaders:
        if _is_finished(loader):
            _waiting.append(_ResumedLoader(loader, loaders))


def iterate(stock: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
    """Yield the batches of a loader of Accelerate, from where it resumes."""
    resumed, plain = next((each for each in _waiting if each.is_of(loader)), None), data.of(loader)
    if resumed is not None:
        _waiting.remove(resumed)
    own = plain.loader if plain is not None else loader if resumed is None else resumed.loader
    if own is not loader:  # of skip_first_batches, at epoch 0 in older versions
        loader.iteration = own.iteration
    _tell_epoch(loader)
    if resumed is not None:
        _rewind(loader, resumed)
    if plain is None:
        loader._portus_start = {**_start(loader), "made": _first_made(loader)}
        batches = stock(loader)
    else:
        batches = plain.iterate(loader, stock)
    first = next(batches, _END)
    if resumed is not None and resumed.now is not None:
        portus.restore_randomness(resumed.now, data.drawing_device())
    if first is not _END:
        yield first
        yield from batches
    if resumed is not None and resumed.loader is not loader:
        # The script continued with a loader of skip_first_batches; its own has to follow.
        resumed.loader.iteration = getattr(loader, "iteration", 0)


def make_loader(
    stock: Callable[..., None],
    self: Any,
    dataset: Any,
    use_stateful_dataloader: bool = False,
    batch_sampler: Any = None,
    **named: Any,
) -> None:
    """Initialize a loader, as Accelerate's base class does, and note the generators before."""
    to_be = SimpleNamespace(batch_sampler=batch_sampler, **named)
    before, sampler = _start(to_be), _sampler(to_be)
    stock(self, dataset, use_stateful_dataloader, batch_sampler, **named)
    self._portus_made, self._portus_sampler = before, sampler
    data.note_skipping(self)


def _tell_epoch(loader: Any) -> None:
    """Set the epoch of a seeded dataset: Accelerate does not if a sampler has ``set_epoch`` too,
    nor before a stateful loader gets its state."""
    if isinstance(loader.dataset, portus.SeededDataset):
        loader.dataset.set_epoch(loader.iteration)


def _rewind(loader: Any, resumed: _ResumedLoader) -> None:
    """Restore the generators of the moment when this epoch's iterator was made."""
    if resumed.start is not None:
        if resumed.start.get("made") is not None:
            _make_first(loader, resumed.start["made"])
        _restore(loader, resumed.start)
    elif _is_finished(loader):
        start = _start(loader)
        iter(loader.base_dataloader)  # takes the state of the epoch that has ended
        _restore(loader, start)


def _make_first(loader: Any, before: dict[str, Any]) -> None:
    """Make the iterator of a stateful loader again as the first one, when Accelerate asked for its
    state: with the generators ``before``. The loader uses it next."""
    if not hasattr(getattr(loader, "base_dataloader", None), _FIRST_WAITS):
        return
    samplers, first = _samplers(loader), getattr(loader, "_portus_sampler", None)
    now = samplers[-1] if samplers else None
    holders = [
        each for each in samplers if first is not None and getattr(each, "sampler", None) is now
    ]
    for each in holders:
        each.sampler = first
    _restore(loader, before)
    # Not for the state: asked for one, the loader makes its first iterator.
    loader.base_dataloader.state_dict()
    for each in holders:
        each.sampler = now
    loader._portus_made = before


def _first_made(loader: Any) -> dict[str, Any] | None:
    """Return the generators before the first iterator was made, if that is still to be used."""
    waits = getattr(getattr(loader, "base_dataloader", None), _FIRST_WAITS, False)
    return getattr(loader, "_portus_made", None) if waits else None


def _is_finished(loader: Any) -> bool:
    """Return True for a stateful loader with the state of an epoch's end."""
    base = getattr(loader, "base_dataloader", None)
    state = getattr(base, "next_iter_state", None)
    return isinstance(state, dict) and bool(state.get("_iterator_finished"))


def _index_of(active: Any, loaders: list[Any]) -> int | None:
    """Return the index in ``loaders`` of the active one, or of the one that ``skip_first_batches``
    made it from; None if neither is in it."""
    same = [index for index, each in enumerate(loaders) if each is active]
    alike = [index for index, each in enumerate(loaders) if each.dataset is active.dataset]
    return next(iter(same + alike), None)


def _position(loader: Any) -> dict[str, Any]:
    plain = data.of(loader)
    if plain is not None:
        return {"iteration": plain.iteration, "plain": plain.state_dict()}
    position = {
        "iteration": getattr(loader, "iteration", None),
        "generators": {name: each.get_state() for name, each in _generators(loader).items()},
        "made": _first_made(loader),
    }
    sampler = _sampler(loader)
    if hasattr(sampler, "initial_seed") and isinstance(sampler.initial_seed, int):
        position["seed"] = sampler.initial_seed
    return position


def _put(loader: Any, position: dict[str, Any]) -> None:
    if position["iteration"] is not None and hasattr(loader, "iteration"):
        loader.iteration = position["iteration"]
        _tell_epoch(loader)
    _put_generators(loader, position.get("generators", {}))
    sampler = _sampler(loader)
    if "seed" in position and hasattr(sampler, "initial_seed"):
        sampler.initial_seed = position["seed"]


def _start(loader: Any) -> dict[str, Any]:
    generators = {name: each.get_state() for name, each in _generators(loader).items()}
    return {"random": portus.capture_randomness(data.drawing_device()), "generators": generators}


def _restore(loader: Any, start: dict[str, Any]) -> None:
    portus.restore_randomness(start["random"], data.drawing_device())
    _put_generators(loader, start["generators"])


def _put_generators(loader: Any, states: dict[str, Any]) -> None:
    for name, generator in _generators(loader).items():
        if name in states:
            generator.set_state(states[name])


def _generators(loader: Any) -> dict[str, torch.Generator]:
    """Return the loader's own generators: of the order of samples and the seed of workers."""
    found = {
        "sampler": getattr(_sampler(loader), "generator", None),
        "loader": getattr(loader, "generator", None),
    }
    return {name: each for name, each in found.items() if isinstance(each, torch.Generator)}


def _sampler(loader: Any) -> Any:
    """Return the innermost sampler, which decides the order."""
    found = _samplers(loader)
    return found[-1] if found else None


def _samplers(loader: Any) -> list[Any]:
    """Return the loader's sampler, that one's, and so on."""
    # No test of their truth: that would test whether they are empty, and those of an
    # ``IterableDataset`` have no length.
    found: list[Any] = []
    inner = loader
    while inner is not None and len(found) <= _SAMPLERS_MAX:
        found.append(inner)
        batches = getattr(inner, "batch_sampler", None)
        inner = getattr(inner, "sampler", None) if batches is None else batches
    return found[1:]
