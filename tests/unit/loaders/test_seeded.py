"""What a sample draws, whoever loads it."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
)

import portus

N = 12
Draws = tuple[int, float, float, float]


class Drawing(Dataset[Draws]):
    """Draws from every generator."""

    fingerprint = "twelve"

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Draws:
        if index == 7 and FAILS:
            raise ValueError("a bad sample")
        return int(index), random.random(), np.random.rand(), torch.rand(1).item()


FAILS: list[bool] = []


def seeded(epoch: int = 0, seed: int = 5) -> portus.SeededDataset[Draws]:
    data = portus.SeededDataset(Drawing(), seed)
    data.set_epoch(epoch)
    return data


def drawn(batches: Any) -> dict[int, Draws]:
    """By sample."""
    return {sample[0]: sample for batch in batches for sample in batch}


def loader(data: Any, **settings: Any) -> DataLoader[Any]:
    named: dict[str, Any] = {"batch_size": 2, "collate_fn": list}
    return DataLoader(data, **(named | settings))


def test_a_sample_draws_the_same_whichever_worker_or_rank_has_it_and_in_any_order() -> None:
    expected = drawn(loader(seeded()))
    assert len(expected) == N
    assert drawn(loader(seeded(), shuffle=True, num_workers=2)) == expected
    for ranks in (2, 3):
        found: dict[int, Draws] = {}
        for rank in range(ranks):
            sampler = DistributedSampler(range(N), ranks, rank)  # type: ignore[var-annotated, arg-type]
            found |= drawn(loader(seeded(), sampler=sampler))
        assert found == expected
    assert seeded()[np.int64(3)] == seeded()[torch.tensor(3)] == expected[3]


def test_what_is_drawn_differs_by_sample_epoch_seed_and_generator() -> None:
    found = [
        value
        for data in (seeded(), seeded(epoch=1), seeded(seed=6))
        for index in range(N)
        for value in data[index][1:]
    ]
    assert len(found) == len(set(found)) == 3 * N * 3


def test_the_generators_of_training_are_not_moved() -> None:
    device = torch.device("cpu")
    random.gauss(0, 1), np.random.standard_normal()
    before = portus.capture_randomness(device)
    data = seeded()
    data[0]
    FAILS.append(True)
    try:
        with pytest.raises(ValueError, match="a bad sample"):
            data[7]
    finally:
        FAILS.clear()
    assert torch.equal(portus.capture_randomness(device), before)


@pytest.mark.parametrize(
    "copied", [lambda it: it, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]
)
def test_workers_that_persist_learn_of_the_next_epoch(copied: Any) -> None:
    data = copied(seeded())
    batches = loader(data, num_workers=1, persistent_workers=True)
    found = []
    for epoch in range(2):
        data.set_epoch(epoch)
        found.append(drawn(batches))
    assert found == [drawn(loader(seeded(epoch))) for epoch in range(2)]


def test_it_is_the_dataset_for_everybody_else() -> None:
    data = seeded()
    assert (len(data), data.fingerprint, data.epoch) == (N, "twelve", 0)
    assert not hasattr(data, "state_dict")


@pytest.mark.parametrize(
    ("hidden", "inside"),
    [
        (Subset(seeded(), [1]), "Subset"),
        (ConcatDataset([Drawing(), Subset(seeded(), [1])]), "ConcatDataset"),
        (Subset(Drawing(), [1]), None),
        (portus.SeededDataset(Subset(seeded(), [1]), 5), None),
        (None, None),
    ],
)
def test_one_that_is_told_no_epoch_is_found(hidden: Any, inside: str | None) -> None:
    told = portus.SeededDataset.why_not_told(hidden)
    assert (f"put SeededDataset around {inside}" in told) if inside else told == ""


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(portus.UsageError, match="samples that have numbers, found Stream"):
        portus.SeededDataset(Stream(), 1)
    with pytest.raises(portus.UsageError, match=r"expected a whole number, found 1\.5"):
        portus.SeededDataset(Drawing(), 1.5)  # type: ignore[arg-type]


def test_random_numbers_of_another_portus_are_refused_and_change_nothing() -> None:
    device = torch.device("cpu")
    before = portus.capture_randomness(device)
    old = torch.zeros(16384, dtype=torch.uint8)
    old[:5] = torch.tensor([1, 0xD1, 0x09, 0, 0])  # a tag, and the length of Python's field
    for strange in (old, before[:4096]):
        with pytest.raises(portus.UsageError, match=r"another Portus.*PORTUS_DISABLE=1"):
            portus.restore_randomness(strange, device)
    assert torch.equal(portus.capture_randomness(device), before)
