"""Whatever a run does between saves, restarts and kills, an epoch has each sample once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler

import portus

ROWS = 24
RUNS = 40


class Rows(Dataset[int]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> int:
        return index


def shuffled(ranks: int, rank: int) -> DataLoader[int]:
    return DataLoader(Rows(), batch_size=2, shuffle=True)


def generated(ranks: int, rank: int) -> DataLoader[int]:
    generator = torch.Generator().manual_seed(random.randrange(100))
    return DataLoader(Rows(), batch_size=2, shuffle=True, generator=generator)


def batched(ranks: int, rank: int) -> DataLoader[int]:
    sampler = BatchSampler(RandomSampler(Rows()), 2, drop_last=False)
    return DataLoader(Rows(), batch_sampler=sampler)


def with_worker(ranks: int, rank: int) -> DataLoader[int]:
    return DataLoader(Rows(), batch_size=2, shuffle=True, num_workers=1)


def distributed(ranks: int, rank: int) -> DataLoader[int]:
    sampler: DistributedSampler[int] = DistributedSampler(Rows(), ranks, rank, shuffle=True, seed=3)
    return DataLoader(Rows(), batch_size=2, sampler=sampler)


@dataclass
class Process:
    """One process of a run, from its start to its end: the loaders of all ranks."""

    kind: Any
    ranks: int
    state: Any
    before: list[int]
    delivered: int = 0
    seen: list[int] = field(default_factory=list)
    iterators: list[Iterator[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(random.randrange(1 << 30))
        loaders = [self.kind(self.ranks, rank) for rank in range(self.ranks)]
        self.loaders = loaders
        self.cursors = [portus.DataCursor(each, ranks=self.ranks) for each in loaders]
        self.seen = list(self.before)
        if self.state is not None:
            assert [each.load_state_dict(self.state) for each in self.cursors] == [""] * self.ranks
            self.delivered = self.state["position"]["batches"]

    def save(self) -> Any:
        iterator = self.iterators[0] if self.iterators else None
        return self.cursors[0].state_dict(self.delivered, iterator=iterator)

    def begin(self) -> None:
        if not self.iterators:
            self.iterators = [iter(each) for each in self.loaders]

    def train(self) -> bool:
        """One batch; False at the end of the epoch."""
        self.begin()
        batches = [next(each, None) for each in self.iterators]
        if batches[0] is None:
            return False
        self.seen += [row for each in batches if each is not None for row in each.tolist()]
        self.delivered += 1
        return True

    def end(self) -> None:
        """The process ends; its workers too."""
        for each in self.iterators:
            getattr(each, "_shutdown_workers", lambda: None)()

    def validate(self) -> None:
        for _ in DataLoader(Rows(), batch_size=8, shuffle=True):
            torch.rand(3)


def epoch(kind: Any, source: random.Random, ranks: list[int]) -> list[int]:
    """The samples of one epoch, of a run that is killed again and again."""
    random.seed(source.random())
    state: Any = None
    kept: list[int] = []
    process = Process(kind, source.choice(ranks), state, kept)
    for _ in range(200):
        process.end()
        process = Process(kind, source.choice(ranks), state, kept)
        for _ in range(source.randrange(8)):
            act = source.choice(["train", "train", "save", "validate", "begin"])
            if act == "train" and not process.train():
                return process.seen
            if act == "save":
                state, kept = process.save(), list(process.seen)
            if act == "validate":
                process.validate()
            if act == "begin":
                process.begin()
    while process.train():
        pass
    return process.seen


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("kind", [shuffled, generated, batched, distributed])
def test_an_epoch_has_each_sample_once_whatever_happens_between_saves_and_kills(kind: Any) -> None:
    source = random.Random(kind.__name__)
    for _ in range(RUNS):
        assert sorted(epoch(kind, source, [1])) == list(range(ROWS))


@pytest.mark.long
def test_so_it_has_with_workers_that_fetch_ahead() -> None:
    source = random.Random(5)
    for _ in range(2):
        assert sorted(epoch(with_worker, source, [1])) == list(range(ROWS))


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("ranks", [[2], [1, 2], [1, 2, 3]])
def test_so_it_has_with_other_numbers_of_ranks_after_each_restart(ranks: list[int]) -> None:
    source = random.Random(str(ranks))
    for _ in range(RUNS):
        found = epoch(distributed, source, ranks)
        assert set(found) == set(range(ROWS))
        assert len(found) - ROWS < max(ranks), "the last step of an epoch is filled up, as by stock"
