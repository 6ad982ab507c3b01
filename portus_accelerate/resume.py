"""Data order and random numbers after a resume, as if there had been no interruption.

Theory. Accelerate restores the generators as they were at the save. But in the middle of an epoch
the script then makes a new iterator, which draws from them: a seed for workers, and without a
generator of its own the order of the samples. So another order comes out, and all that is drawn
later is shifted. What repeats the other run is: put the generators where they were when *that
epoch's* iterator was made, make the new one (the loader skips what was done: ``StatefulDataLoader``
by its state, others by ``skip_first_batches``), and then put the generators where they were at the
save, before the first batch is handed out.

At an epoch's end there is less to undo: the other run made its next iterator after the save.
What Accelerate forgets is put back: generators of samplers, and how many epochs were done. A
``StatefulDataLoader`` first makes the iterator of the epoch that is over, from its state, which
draws; so the generators are put where they were before that.

Not repeated: what a dataset draws in the training process itself for the batches that had been
fetched ahead (one, or two) when the save was called.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

KEY: Final = "portus"
"""Where this is in the file of random states; Accelerate looks at keys that it knows only."""

_END: Final = object()


@dataclass(frozen=True)
class _Resumed:
    """A loader that is to go on: in the middle of an epoch, if there is a ``start`` of it, where
    ``now`` is to hold; else after an epoch's end."""

    loader: Any
    start: dict[str, Any] | None = None
    now: dict[str, Any] | None = None


_waiting: list[_Resumed] = []


def positions(accelerator: Any, *, with_states: bool) -> dict[str, Any]:
    """Where this process is in its data. with_states: states of stateful loaders too, which are
    not the main process's."""
    loaders = accelerator._dataloaders
    active = accelerator.gradient_state.active_dataloader
    found: dict[str, Any] = {
        "format": 1,
        "processes": accelerator.num_processes,
        "loaders": [_position(each) for each in loaders],
    }
    index = None if active is None else _index_of(active, loaders)
    if index is not None:
        epochs = getattr(active, "iteration", None)
        if epochs is not None:  # counted only when the loop comes back after the last batch
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


def go_back(accelerator: Any, saved: Any) -> None:
    """Let the loaders go on where ``positions`` was called; the generators have been restored."""
    _waiting.clear()
    if not isinstance(saved, dict) or saved.get("format") != 1:
        return
    loaders = accelerator._dataloaders
    if len(saved["loaders"]) != len(loaders):
        return  # another script; Accelerate has done what it does
    for loader, position in zip(loaders, saved["loaders"], strict=True):
        _put(loader, position)
    for loader, state in zip(loaders, saved.get("states", ()), strict=False):
        if state is not None and getattr(loader, "use_stateful_dataloader", False):
            loader.load_state_dict(state)
    running = saved.get("running")
    if running is not None:
        loader = loaders[running["index"]]
        _waiting.append(_Resumed(loader, running["start"], _randomness()))
    for loader in loaders:
        if _is_finished(loader):
            _waiting.append(_Resumed(loader))


def iteration(stock: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """In place of ``__iter__`` of Accelerate's loaders."""

    def iterate(loader: Any) -> Iterator[Any]:
        resumed = _resumed(loader)
        if resumed is not None:
            _rewind(loader, resumed)
        loader._portus_start = _start(loader)
        batches = stock(loader)
        first = next(batches, _END)
        if resumed is not None and resumed.now is not None:
            _restore_randomness(resumed.now)
        if first is not _END:
            yield first
            yield from batches
        if resumed is not None and resumed.loader is not loader:
            # The script went on with a loader of skip_first_batches; its own has to follow.
            resumed.loader.iteration = getattr(loader, "iteration", 0)

    return iterate


def _resumed(loader: Any) -> _Resumed | None:
    for each in _waiting:
        if each.loader is loader or each.loader.dataset is loader.dataset:
            _waiting.remove(each)
            return each
    return None


def _rewind(loader: Any, resumed: _Resumed) -> None:
    """Put the generators where they were when this epoch's iterator was made."""
    if resumed.start is not None:
        _restore(loader, resumed.start)
    elif _is_finished(loader):
        start = _start(loader)
        iter(loader.base_dataloader)  # takes the state of the epoch that is over
        _restore(loader, start)


def _is_finished(loader: Any) -> bool:
    """True for a stateful loader that was given the state of an epoch's end."""
    base = getattr(loader, "base_dataloader", None)
    state = getattr(base, "next_iter_state", None)
    return isinstance(state, dict) and bool(state.get("_iterator_finished"))


def _index_of(active: Any, loaders: list[Any]) -> int | None:
    """Which of ``loaders`` the active one is, or was made from by ``skip_first_batches``."""
    for index, each in enumerate(loaders):
        if each is active:
            return index
    for index, each in enumerate(loaders):
        if each.dataset is active.dataset:
            return index
    return None


def _position(loader: Any) -> dict[str, Any]:
    position = {
        "iteration": getattr(loader, "iteration", None),
        "generators": {name: each.get_state() for name, each in _generators(loader).items()},
    }
    sampler = _sampler(loader)
    if hasattr(sampler, "initial_seed") and isinstance(sampler.initial_seed, int):
        position["seed"] = sampler.initial_seed
    return position


def _put(loader: Any, position: dict[str, Any]) -> None:
    if position["iteration"] is not None and hasattr(loader, "iteration"):
        loader.iteration = position["iteration"]
    _put_generators(loader, position["generators"])
    sampler = _sampler(loader)
    if "seed" in position and hasattr(sampler, "initial_seed"):
        sampler.initial_seed = position["seed"]


def _start(loader: Any) -> dict[str, Any]:
    generators = {name: each.get_state() for name, each in _generators(loader).items()}
    return {"random": _randomness(), "generators": generators}


def _restore(loader: Any, start: dict[str, Any]) -> None:
    _restore_randomness(start["random"])
    _put_generators(loader, start["generators"])


def _put_generators(loader: Any, states: dict[str, Any]) -> None:
    for name, generator in _generators(loader).items():
        if name in states:
            generator.set_state(states[name])


def _generators(loader: Any) -> dict[str, torch.Generator]:
    """The loader's own generators, which draw the order of samples and the seed of workers."""
    found = {
        "sampler": getattr(_sampler(loader), "generator", None),
        "loader": getattr(loader, "generator", None),
    }
    return {name: each for name, each in found.items() if isinstance(each, torch.Generator)}


def _sampler(loader: Any) -> Any:
    """The innermost sampler: what decides the order."""
    sampler = getattr(loader, "batch_sampler", None) or getattr(loader, "sampler", None)
    for _ in range(8):
        inner = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        if inner is None:
            return sampler
        sampler = inner
    return sampler


def _randomness() -> dict[str, Any]:
    found = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def _restore_randomness(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
