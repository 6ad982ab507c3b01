"""The origin of a loader's order: the states of its samplers, the sequences made from them, and how
the known index samplers distribute these to ranks.

Frameworks' samplers are recognized by their names: this layer imports none of them.

Only numbers, texts and tensors are kept, so a checkpoint with them needs no pickle.

A resumed epoch asks its sampler again for the delivered samples. A sampler with its own counter
gives other samples then, which only a digest of the order reveals. The digest after each of the
last batches is kept, because loaders request more than they deliver.
"""

from __future__ import annotations

import importlib
import json
import operator
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import msgspec
import numpy as np
import torch
import xxhash
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from portus.companions.samples.deal import Deal, Tail

_LAYERS_MAX: Final = 8
"""The most samplers inside of samplers that are followed."""

_SEEDS: Final = ("seed", "initial_seed")
_NUMBERS: Final = ("epoch", *_SEEDS)
"""The names of samplers' numbers that decide their order."""

_SEEDABLE: Final = ("accelerate.data_loader", "SeedableRandomSampler")


def chain(outermost: object) -> list[Any]:
    """Return a sampler, the one that it takes samples from, and so on."""
    found: list[Any] = []
    sampler: Any = outermost
    while sampler is not None and len(found) < _LAYERS_MAX:
        found.append(sampler)
        sampler = _inside(sampler)
    return found


def state_of(sampler: object) -> dict[str, Any]:
    """Return the state that decides the sampler's next order: its ``state_dict`` if it has one,
    else its generators and seeds."""
    own = getattr(sampler, "state_dict", None)
    is_own = callable(own) and callable(getattr(sampler, "load_state_dict", None))
    # torchdata's have the end of their last order, not the origin of the next one.
    if is_own and not is_torchdatas(sampler, "state_dict"):
        return {"own": deepcopy(own())}  # type: ignore[misc]  # it may change later
    numbers = {name: getattr(sampler, name, None) for name in _NUMBERS}
    return {
        "numbers": {name: each for name, each in numbers.items() if isinstance(each, int)},
        "generators": generators_of(sampler),
    }


def put(sampler: Any, state: Mapping[str, Any]) -> None:
    """Restore a state from ``state_of``."""
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
    """Return the name of a number of the sampler that differs from ``state``, and cannot be set; ""
    if there is none."""
    numbers = state.get("numbers", {})
    names = (each for each in numbers if _is_fixed(sampler, each))
    return next((each for each in names if getattr(sampler, each) != numbers[each]), "")


def put_seed(sampler: Any, state: Mapping[str, Any]) -> None:
    """Restore the seed of all epochs' orders, in a framework's sampler."""
    if isinstance(sampler, DistributedSampler) or _is_seedable(sampler):
        _put_numbers(sampler, state, _SEEDS)


def generators_of(owner: object) -> dict[str, Any]:
    """Return the states of the generators that are attributes of a loader or sampler."""
    return {name: _take(each) for name, each in _generators(owner)}


def put_generators(owner: object, states: Mapping[str, Any]) -> None:
    """Restore states from ``generators_of``."""
    for name, each in _generators(owner):
        if name in states:
            _set(each, states[name])


def is_same(state: object, other: object) -> bool:
    """Return True if two of these states, or dicts and lists of them, are equal."""
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
    """Return the description from which any process can make the whole sequence of the sampler's
    next epoch; None for an unknown kind. It excludes the global generator's state."""
    kind = type(sampler)
    # The very class: a subclass may order samples in another way.
    if kind is SequentialSampler:
        return {"kind": "sequential", "samples": len(sampler)}
    is_torchdatas_own = kind.__name__ == "RandomSampler" and is_torchdatas(sampler, "__iter__")
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
    """Return the sequence again, by the stock sampler itself. A random one without a generator
    draws from torch's, whose state has to be the same."""
    if made_of["kind"] == "sequential":
        return list(range(made_of["samples"]))
    if made_of["kind"] in ("random", "torchdata random"):
        return list(_random(made_of))
    assert made_of["kind"] == "distributed", made_of["kind"]
    inner = None if made_of.get("of") is None else sequence(made_of["of"])
    data: Any = range(made_of["samples"])
    # One rank of one: all samples, in the order from which ranks get theirs.
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


def is_torchdatas(what: object, method: str) -> bool:
    """Return True if ``what`` has this method from torchdata's stateful loaders and samplers, and
    no class of its own overrides it."""
    found = getattr(type(what), method, None)
    return str(getattr(found, "__module__", "")).startswith("torchdata.stateful_dataloader")


def _is_fixed(sampler: object, name: str) -> bool:
    """Return True for a property that cannot be set."""
    found = getattr(type(sampler), name, None)
    return isinstance(found, property) and found.fset is None


def _is_seedable(sampler: object) -> bool:
    """Return True for Accelerate's seedable sampler, by its name: no framework is imported."""
    kind = type(sampler)
    return (kind.__module__, kind.__qualname__) == _SEEDABLE


def _inside(sampler: object) -> Any:
    for name in ("batch_sampler", "sampler", "_sampler"):
        found = getattr(sampler, name, None)
        if found is not None:
            return found
    # Lightning's wrapper of another sampler distributes its samples as if they were a dataset.
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
    if isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
    else:
        state = generator.bit_generator.state
    return json.dumps(state, default=np.ndarray.tolist)


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, words, gauss = json.loads(state)
        generator.setstate((version, tuple(words), gauss))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(json.loads(state))
    else:
        generator.bit_generator.state = json.loads(state)


_KEPT: Final = 65536
"""The most batches that a loader may be ahead of training."""


class DeliveredOrder:
    """The order of one epoch so far. Samples are numbers, texts, or tuples, arrays and tensors of
    these; others have no digest."""

    def __init__(self) -> None:
        self._asked = 0
        self._digests: deque[bytes] = deque([b""], maxlen=_KEPT)
        self._is_known = True

    def add(self, batch: Any) -> None:
        """Count one more batch, or sample, in the order in which the sampler gave them."""
        self._asked += 1
        try:
            said = _ENCODER.encode(batch)
        except (TypeError, ValueError, OverflowError, RecursionError):
            self._is_known = False
        else:
            self._digests.append(xxhash.xxh3_64_digest(self._digests[-1] + said))

    def after(self, asked: int) -> str | None:
        """Return the digest of the first ``asked`` batches, in hex; None if it is not known."""
        behind = self._asked - asked
        if not self._is_known or not 0 <= behind < len(self._digests):
            return None
        return self._digests[-1 - behind].hex()


def _plain(value: Any) -> Any:
    """Return a plain value for a number, an array or a tensor."""
    return value.tolist() if hasattr(value, "tolist") else operator.index(value)


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_plain)


Dispatch = Literal["batches", "pieces"]
"""The parts that a process that loads for all ranks gives them: batches, or pieces of one batch."""

_SHARD: Final = ("accelerate.data_loader", "BatchSamplerShard")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochDealing:
    """The distribution of one epoch."""

    batches: BatchSampler | None
    """The sampler that makes batches; None if samples come one by one."""
    dealt: Any
    """The sampler whose samples they contain."""
    samples: int
    """The number of samples in the whole sequence."""
    rank: int = 0
    ranks: int = 1
    tail: Tail = Tail.EVEN
    pieces: int = 1
    """The number of ranks that share a batch of ``batches``."""
    for_all: bool = False
    """Whether the loader gives the samples of all ranks, to be dispatched."""

    @property
    def batch(self) -> int:
        """Return the samples that a rank gets in a step."""
        return 1 if self.batches is None else self.batches.batch_size // self.pieces

    @property
    def at_once(self) -> int:
        """Return the batches that the loader gives in a step."""
        return self.ranks // self.pieces if self.for_all else 1

    def deal(self, delivered: int = 0) -> Deal:
        """Return the distribution of the samples after ``delivered`` to all ranks."""
        return Deal(
            samples=self.samples,
            delivered=delivered,
            ranks=self.ranks,
            batch=self.batch,
            tail=self.tail,
            drop_last=self.batches is not None and self.batches.drop_last,
        )

    def of_loader(self, deal: Deal) -> tuple[Deal, int]:
        """Return the same distribution as this rank's loader does it, and this rank in it."""
        if not self.for_all:
            return deal, self.rank
        together = Deal(
            samples=deal.samples,
            delivered=deal.delivered,
            batch=deal.batch * self.pieces,
            drop_last=deal.drop_last,
        )
        return together, 0


def way_of(stock: Any, ranks: int, dispatch: Dispatch | None) -> EpochDealing | None:
    """Return the distribution of a loader; None if it is unknown. ranks: processes that train
    together."""
    if (type(stock).__module__, type(stock).__qualname__) == _SHARD:
        return _of_one_sequence(
            stock.batch_sampler,
            rank=stock.process_index,
            ranks=stock.num_processes,
            tail=Tail.FULL if stock.even_batches else Tail.ASIS,
            pieces=stock.num_processes if stock.split_batches else 1,
        )
    if dispatch is not None:
        pieces = ranks if dispatch == "pieces" else 1
        return _of_one_sequence(stock, ranks=ranks, tail=Tail.ASIS, pieces=pieces, for_all=True)
    return _of_torch(stock, ranks)


def change_batch(stock: Any, way: EpochDealing, batch: int) -> None:
    """Let each rank get ``batch`` samples in a step, from the next epoch on."""
    for each in chain(stock):
        if isinstance(each, BatchSampler) and hasattr(each, "batch_size"):
            each.batch_size = batch * way.pieces


def _of_torch(stock: Any, ranks: int) -> EpochDealing | None:
    is_batched = isinstance(stock, BatchSampler)
    is_stock = type(stock).__iter__ is BatchSampler.__iter__
    if is_batched and not (is_stock or is_torchdatas(stock, "__iter__")):
        return None
    dealt = stock.sampler if is_batched else stock
    batches = stock if is_batched else None
    if isinstance(dealt, DistributedSampler):
        samples = length(dealt.dataset)
        if samples is None:
            return None
        return EpochDealing(
            batches=batches,
            dealt=dealt,
            samples=samples,
            rank=dealt.rank,
            ranks=dealt.num_replicas,
            tail=Tail.CUT if dealt.drop_last else Tail.EVEN,
        )
    samples = length(dealt)
    if samples is None or isinstance(dealt, BatchSampler):
        return None
    if ranks > 1 and sequence_of(dealt) is None:
        return None  # it may give each rank its own part
    return EpochDealing(batches=batches, dealt=dealt, samples=samples)


def _of_one_sequence(stock: Any, **by_ranks: Any) -> EpochDealing | None:
    """Return the batching by ``stock`` of the whole sequence, which other code distributes to ranks
    as ``by_ranks`` says; None if it does not, if that is unknown, or if pieces would differ in
    size."""
    way = _of_torch(stock, 1)
    if way is None or way.batches is None or isinstance(way.batches.sampler, DistributedSampler):
        return None
    size, way = way.batches.batch_size, replace(way, **by_ranks)
    return None if size % way.pieces or way.ranks % way.pieces else way


def length(what: object) -> int | None:
    """Return the length of a loader; None if it has none."""
    try:
        return len(what)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
