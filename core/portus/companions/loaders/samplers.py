"""What decides the order of a loader's samples: the states of its samplers, and sequences made of
them again.

Only numbers, texts and tensors are kept, so that a checkpoint with them needs no pickle.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

_LAYERS_MAX: Final = 8
"""Samplers around samplers are not followed further."""

_SEEDS: Final = ("seed", "initial_seed")
_NUMBERS: Final = ("epoch", *_SEEDS)
"""What samplers call the numbers that their order follows from."""

_SEEDABLE: Final = ("accelerate.data_loader", "SeedableRandomSampler")


def chain(outermost: object) -> list[Any]:
    """A sampler, the one that it takes samples from, and so on."""
    found: list[Any] = []
    sampler: Any = outermost
    while sampler is not None and len(found) < _LAYERS_MAX:
        found.append(sampler)
        sampler = _inside(sampler)
    return found


def state_of(sampler: object) -> dict[str, Any]:
    """What the sampler's next order follows from: its ``state_dict`` if it has one, else its
    generators and seeds."""
    own = getattr(sampler, "state_dict", None)
    is_own = callable(own) and callable(getattr(sampler, "load_state_dict", None))
    # torchdata's say where their last order ended, not what the next one follows from.
    if is_own and not is_torchdatas(sampler, "state_dict"):
        return {"own": deepcopy(own())}  # type: ignore[misc]  # it may go on changing what it gave
    numbers = {name: getattr(sampler, name, None) for name in _NUMBERS}
    return {
        "numbers": {name: each for name, each in numbers.items() if isinstance(each, int)},
        "generators": generators_of(sampler),
    }


def put(sampler: Any, state: Mapping[str, Any]) -> None:
    """Put back what ``state_of`` gave."""
    if "own" in state:
        sampler.load_state_dict(deepcopy(state["own"]))
        return
    _put_numbers(sampler, state, _NUMBERS)
    put_generators(sampler, state["generators"])


def _put_numbers(sampler: Any, state: Mapping[str, Any], names: Iterable[str]) -> None:
    for name, value in state.get("numbers", {}).items():
        if name in names and hasattr(sampler, name) and not _is_fixed(sampler, name):
            setattr(sampler, name, value)


def mismatched_number(sampler: Any, state: Mapping[str, Any]) -> str:
    """The name of a number that the sampler has otherwise than in ``state``, and that nobody can
    set; nothing if there is none."""
    numbers = state.get("numbers", {})
    names = (each for each in numbers if _is_fixed(sampler, each))
    return next((each for each in names if getattr(sampler, each) != numbers[each]), "")


def put_seed(sampler: Any, state: Mapping[str, Any]) -> None:
    """Put back the seed that the order of all epochs follows from, of a framework's sampler."""
    if isinstance(sampler, DistributedSampler) or _is_seedable(sampler):
        _put_numbers(sampler, state, _SEEDS)


def generators_of(owner: object) -> dict[str, Any]:
    """The states of the generators that are attributes of a loader or sampler."""
    return {name: _take(each) for name, each in _generators(owner)}


def put_generators(owner: object, states: Mapping[str, Any]) -> None:
    """Put back what ``generators_of`` gave."""
    for name, each in _generators(owner):
        if name in states:
            _set(each, states[name])


def is_same(state: object, other: object) -> bool:
    """True if two of these states, or dicts and lists of them, say the same."""
    if isinstance(state, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(state, other)
    if isinstance(state, dict):
        if not isinstance(other, dict) or state.keys() != other.keys():
            return False
        return all(is_same(each, other[name]) for name, each in state.items())
    if isinstance(state, list | tuple):
        if not isinstance(other, list | tuple) or len(state) != len(other):
            return False
        return all(is_same(*each) for each in zip(state, other, strict=True))
    return np.array_equal(state, other)  # type: ignore[arg-type]


def sequence_of(sampler: Any) -> dict[str, Any] | None:
    """Return what the whole sequence of the sampler's next epoch can be made from, in any process;
    None if its kind is not known. The global generator's state is not included."""
    kind = type(sampler)
    # The very class: a subclass may order samples in another way.
    if kind is SequentialSampler:
        return {"kind": "sequential", "samples": len(sampler)}
    is_torchdatas_own = _is_torchdatas_random(sampler)
    if kind is RandomSampler or _is_seedable(sampler) or is_torchdatas_own:
        generator = sampler.generator
        if _is_seedable(sampler):
            generator = torch.Generator().manual_seed(sampler.initial_seed + sampler.epoch)
        return {
            "kind": "torchdata random" if is_torchdatas_own else "random",
            "data": len(sampler.data_source),
            "samples": sampler.num_samples,
            "replacement": sampler.replacement,
            "generator": None if generator is None else generator.get_state(),
        }
    if not isinstance(sampler, DistributedSampler):
        return None
    dealt = {
        "kind": "distributed",
        "samples": len(sampler.dataset),  # type: ignore[arg-type]
        "shuffle": sampler.shuffle,
        "seed": sampler.seed,
        "epoch": sampler.epoch,
    }
    inside = _inside(sampler)
    if inside is None:
        return dealt if kind is DistributedSampler or is_torchdatas(sampler, "__iter__") else None
    inner = sequence_of(inside) if kind.__name__ == "DistributedSamplerWrapper" else None
    return None if inner is None else {**dealt, "of": inner}


def sequence(made_of: Mapping[str, Any]) -> list[int]:
    """The sequence again, by the stock sampler itself. A random one without a generator of its own
    draws from torch's, which has to stand where it did."""
    if made_of["kind"] == "sequential":
        return list(range(made_of["samples"]))
    if made_of["kind"] in ("random", "torchdata random"):
        return list(_random(made_of))
    assert made_of["kind"] == "distributed", made_of["kind"]
    inner = None if made_of.get("of") is None else sequence(made_of["of"])
    data: Any = range(made_of["samples"])
    # One rank of one: all samples, in the order from which ranks are dealt.
    dealt: DistributedSampler[int] = DistributedSampler(
        data, 1, 0, shuffle=made_of["shuffle"], seed=made_of["seed"]
    )
    dealt.set_epoch(made_of["epoch"])
    return list(dealt) if inner is None else [inner[number] for number in dealt]


def _random(made_of: Mapping[str, Any]) -> Iterable[int]:
    generator = None if made_of["generator"] is None else torch.Generator()
    if generator is not None:
        generator.set_state(made_of["generator"])
    samples = None if made_of["samples"] == made_of["data"] else made_of["samples"]
    kind: Any = RandomSampler
    if made_of["kind"] == "torchdata random":
        kind = importlib.import_module("torchdata.stateful_dataloader.sampler").RandomSampler
    found: Iterable[int] = kind(range(made_of["data"]), made_of["replacement"], samples, generator)
    return found


def _is_torchdatas_random(sampler: object) -> bool:
    return type(sampler).__name__ == "RandomSampler" and is_torchdatas(sampler, "__iter__")


def is_torchdatas(what: object, method: str) -> bool:
    """True if ``what`` has this method from torchdata's stateful loaders and samplers, whose own
    classes leave it alone."""
    found = getattr(type(what), method, None)
    return str(getattr(found, "__module__", "")).startswith("torchdata.stateful_dataloader")


def _is_fixed(sampler: object, name: str) -> bool:
    """True for a property that cannot be set."""
    found = getattr(type(sampler), name, None)
    return isinstance(found, property) and found.fset is None


def _is_seedable(sampler: object) -> bool:
    """Accelerate's, which begins each epoch with a seed of its own; no framework is imported."""
    kind = type(sampler)
    return (kind.__module__, kind.__qualname__) == _SEEDABLE


def _inside(sampler: object) -> Any:
    for name in ("batch_sampler", "sampler", "_sampler"):
        found = getattr(sampler, name, None)
        if found is not None:
            return found
    # What Lightning puts around another sampler deals its samples as if they were a dataset.
    return getattr(getattr(sampler, "dataset", None), "_sampler", None)


def _generators(owner: object) -> Iterator[tuple[str, Any]]:
    kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    for name, value in getattr(owner, "__dict__", {}).items():
        if isinstance(value, kinds):
            yield name, value


def _take(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return json.dumps(generator.getstate())
    return json.dumps(_bits(generator).state, default=np.ndarray.tolist)


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, words, gauss = json.loads(state)
        generator.setstate((version, tuple(words), gauss))
    else:
        bits = _bits(generator)
        bits.state = _arrays(json.loads(state), bits.state)


def _bits(generator: Any) -> Any:
    """numpy's bit generator, whose state is a dict."""
    own = getattr(generator, "bit_generator", None)
    return generator._bit_generator if own is None else own


def _arrays(values: Any, like: Any) -> Any:
    """JSON's lists as arrays, where ``like`` has them."""
    if isinstance(like, np.ndarray):
        return np.array(values, like.dtype)
    if isinstance(like, dict):
        return {name: _arrays(values[name], each) for name, each in like.items()}
    return values
