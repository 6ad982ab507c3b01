"""Writers that nobody fences, at every moment of a save: what commits is the state at the call.

A case is a seed: sizes, the page kind, an optimizer of torch, who writes what, and when. There are
no threads, so a case that failed is repeated by its number. Without an audit some are torn, or the
search shows nothing.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from portus.engine.fence.fence import Fence
from portus.engine.fence.snapshot import Suspects, copy_order
from portus.engine.media import write_watch
from portus.engine.pipeline.audit import AuditMethod
from portus.engine.pipeline.run import Save
from portus.engine.settings.keep import Keep
from portus.engine.state.contents import JoinedStorages
from portus.engine.state.pickling import pickle_state
from portus.errors import AbandonedError
from portus.reach.format.layout import DATA_START
from portus.reach.versions.pool_draft import PoolDraft
from tests.depth import deep
from tests.unit.fence.late_copy import FENCE_S_MAX
from tests.unit.pipeline.bench import WAYS, Bench, Gate, Owner

Write = Callable[[torch.Tensor, random.Random], None]
Optimizers = dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]]

ROOM = 64 << 20
STORES = 8
"""Moments of a copy that are tried: before each of so many stores."""

SIZES = (1, 15, 1000, 16 << 10, (16 << 10) + 1, 100_000, 270_000)

OPTIMIZERS: Optimizers = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}


def swap(tensor: torch.Tensor, rng: random.Random) -> None:
    tensor.copy_(torch.rand_like(tensor) + 2)


def clamp(tensor: torch.Tensor, rng: random.Random) -> None:
    least = 2 * abs(tensor.max().item()) + 1  # above all of it, or it is like a row
    if least < 1e6:
        tensor.data.clamp_(min=least)
    else:  # a bit was flipped before: above such numbers, and above no number, there are few
        tensor.data.fill_(rng.random())


def noise(tensor: torch.Tensor, rng: random.Random) -> None:
    tensor.data.add_(torch.rand_like(tensor) + 1)


def zero(tensor: torch.Tensor, rng: random.Random) -> None:
    tensor.zero_()


def row(tensor: torch.Tensor, rng: random.Random) -> None:
    tensor[rng.randrange(len(tensor))] += 3


def row_of_data(tensor: torch.Tensor, rng: random.Random) -> None:
    tensor.data[rng.randrange(len(tensor))] += 3


def numpy_element(tensor: torch.Tensor, rng: random.Random) -> None:
    tensor.detach().numpy()[rng.randrange(len(tensor))] += 3


def one_bit(tensor: torch.Tensor, rng: random.Random) -> None:
    at = ctypes.c_uint8.from_address(tensor.data_ptr() + rng.randrange(tensor.nbytes))
    at.value ^= 1 << rng.randrange(8)


WRITERS: dict[str, Write] = {
    "swap": swap,
    "clamp": clamp,
    "noise": noise,
    "zero": zero,
    "row": row,
    "row of .data": row_of_data,
    "element by numpy": numpy_element,
    "one bit": one_bit,
}

MISSED_BY_PROBES = {"row of .data", "element by numpy", "one bit"}
"""What is written there is neither at a probe nor counted by torch."""


class Model:
    """Parameters of an optimizer that was seen stepping, on pages of one kind."""

    def __init__(self, rng: random.Random) -> None:
        sizes = rng.choices(SIZES, k=rng.randrange(1, 4))
        self.parameters = [torch.nn.Parameter(torch.rand(size)) for size in sizes]
        self.optimizer = OPTIMIZERS[rng.choice(sorted(OPTIMIZERS))](self.parameters)
        self.step()
        if rng.random() < 0.5:
            places = [(each.data_ptr(), each.nbytes) for each in self.tensors()]
            address, length = np.array(places, np.int64).T
            for _ in write_watch.make_huge(address, length):
                pass

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        """All that may be written late: not the counts of steps."""
        states = (value for state in self.optimizer.state.values() for value in state.values())
        found = [*self.parameters, *(each for each in states if isinstance(each, torch.Tensor))]
        return [each.detach() for each in found if each.ndim]


class _Owner(Owner):
    """Shares nothing."""

    def before(self) -> None:
        return None


@dataclass
class Search:
    """Saves into one pool, one case after another."""

    way: AuditMethod | None
    medium: Gate = field(default_factory=lambda: Gate(DATA_START + ROOM))
    torn: collections.Counter[str] = field(default_factory=collections.Counter)
    voided: int = 0
    cases: int = 0

    def __post_init__(self) -> None:
        self.bench = Bench(self.medium)
        self.suspects = Suspects()

    def model(self, rng: random.Random, cases: int) -> None:
        """Some cases with one model; each steps, saves, and is written to meanwhile."""
        model = Model(rng)
        for _ in range(cases):
            model.step()
            self.case(model, rng)

    def case(self, model: Model, rng: random.Random) -> None:
        self.cases += 1
        state = {"parameters": model.parameters, "optimizer": model.optimizer.state_dict()}
        joined = JoinedStorages([pickle_state(state)])
        wanted = [_bytes(storage) for storage in joined.storages]
        order = copy_order(joined.storages, joined.owned_storages, {}, self.suspects.turn())
        assert order.late.any()
        snapshot = replace(
            order,
            model="m",
            step=self.cases,
            token=rng.randbytes(16),
            changes=joined.changes,
            keep=Keep(last=1),
        )
        owner = _Owner(self.bench, self.way)
        save = Save(snapshot, PoolDraft(self.bench.pool, snapshot.length), owner)
        name = rng.choice(sorted(WRITERS))
        save.copy_now()
        with self.written(WRITERS[name], rng.choice(model.tensors()), rng):
            save.run()
        try:
            save.result(0)
        except AbandonedError:
            self.voided += 1
            return
        if self.bench.holds(save) != wanted:
            self.torn[name] += 1

    @contextlib.contextmanager
    def written(self, write: Write, target: torch.Tensor, rng: random.Random) -> Iterator[None]:
        """Inside, ``target`` is written before or between two stores, and perhaps put back as it
        was before another one."""
        own, first = target.clone(), rng.choice([-1, -1, rng.randrange(STORES)])
        back = rng.choice([None, None, rng.randrange(max(first, 0), STORES) + 1])
        acts: dict[int, Callable[[], object]] = {first: lambda: write(target, rng)}
        if back is not None:
            acts[back] = lambda: target.copy_(own)
        stores = itertools.count()

        def on_store() -> None:
            acts.get(next(stores), lambda: None)()

        self.medium.on_store = on_store
        with torch.no_grad():
            if first < 0:
                acts[first]()
            yield
        self.medium.on_store = lambda: None


def _bytes(storage: torch.UntypedStorage) -> bytes:
    return bytes(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())


def searched(way: AuditMethod | None, seed: int, cases: int) -> Search:
    """The outcome of so many cases."""
    torch.manual_seed(seed)
    search, fence = Search(way), Fence(FENCE_S_MAX)
    try:
        for number in itertools.count():
            if search.cases >= cases:
                break
            search.model(random.Random(f"{seed} {number}"), 50)
    finally:
        fence.close()
    name = way.value if way else None
    print(f"{name}: {search.cases} cases, {search.voided} voided, torn {search.torn}")
    return search


def check(way: AuditMethod | None, seed: int, cases: int) -> None:
    search = searched(way, seed, cases)
    if way is None:
        assert search.torn.total() > cases // 10, "the search could not have failed"
        assert not search.voided
    elif way is AuditMethod.PROBE:
        assert set(search.torn) <= MISSED_BY_PROBES
        assert search.voided > cases // 10
    else:
        assert not search.torn
        assert search.voided > cases // 10


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("way", [*WAYS, None])
def test_no_writer_tears_what_an_audit_lets_through(way: AuditMethod | None, seed: int) -> None:
    check(way, seed, 100)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", [*WAYS, None])
def test_thousands_of_writers_tear_nothing_that_an_audit_lets_through(
    way: AuditMethod | None, seed: int
) -> None:
    check(way, seed, deep(2500))
