"""Each sample once, whatever the numbers of ranks were; and where nothing was restarted, as the
stock samplers deal."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product
from typing import Any

import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from portus.companions.samples.deal import Deal, Tail, batch_of_ranks
from portus.errors import UsageError

SIZES = [*range(1, 14), 24, 25]


def test_the_whole_epoch_is_dealt_as_torch_deals_it() -> None:
    tried = 0
    for n, ranks, batch in product(SIZES, range(1, 5), range(1, 5)):
        for cut, drop_last in product((False, True), repeat=2):
            if cut and n < ranks:
                continue
            deal = Deal(
                samples=n,
                ranks=ranks,
                batch=batch,
                tail=Tail.CUT if cut else Tail.EVEN,
                drop_last=drop_last,
            )
            for rank in range(ranks):
                data: Any = range(n)
                stock: Any = DistributedSampler(data, ranks, rank, shuffle=False, drop_last=cut)
                expected = list(BatchSampler(stock, batch, drop_last))
                assert list(deal.places(rank)) == expected, (deal, rank)
                assert deal.batches(rank) == len(expected)
                tried += 1
    assert tried > 2000


def test_the_whole_epoch_is_dealt_as_accelerate_deals_it() -> None:
    tried = 0
    for n, ranks, batch in product(SIZES, range(2, 5), range(1, 5)):
        for split, even, drop_last in product((False, True), repeat=3):
            deal = Deal(
                samples=n,
                ranks=ranks,
                batch=batch,
                tail=Tail.FULL if even else Tail.ASIS,
                drop_last=drop_last,
            )
            whole = BatchSampler(
                SequentialSampler(range(n)), batch * ranks if split else batch, drop_last
            )
            for rank in range(ranks):
                stock = BatchSamplerShard(
                    whole, ranks, rank, split_batches=split, even_batches=even
                )
                expected = list(stock)
                assert list(deal.places(rank)) == expected, (deal, rank, split)
                tried += 1
    assert tried > 2000


@pytest.mark.parametrize("tail", [Tail.EVEN, Tail.FULL, Tail.ASIS])
def test_each_sample_is_delivered_once_over_any_restarts(tail: Tail, seed: int) -> None:
    chance = random.Random(seed)
    restarts = 0
    for _ in range(400):
        n = chance.randint(1, 60)
        delivered, seen = 0, Counter[int]()
        while True:
            deal = Deal(
                samples=n,
                delivered=delivered,
                ranks=chance.randint(1, 5),
                batch=chance.randint(1, 5),
                tail=tail,
            )
            ranks = [list(deal.places(rank)) for rank in range(deal.ranks)]
            assert tail is Tail.ASIS or len({len(each) for each in ranks}) == 1
            steps = chance.randint(0, max(map(len, ranks)))
            taken = [place for each in ranks for batch in each[:steps] for place in batch]
            if steps == max(map(len, ranks)):
                break
            seen.update(taken)
            delivered = deal.after(steps)
            assert seen == Counter(range(delivered)), "a prefix, before the end"
            restarts += 1
        repeated = Counter(taken) - Counter(range(delivered, n))
        assert not Counter(range(delivered, n)) - Counter(taken), "none is missing"
        limit = {Tail.EVEN: deal.ranks, Tail.FULL: deal.step, Tail.ASIS: 1}[tail]
        assert repeated.total() < limit, "no more than the stock sampler repeats"
        assert set(repeated) == set(range(min(n, repeated.total()))), "the first ones"
    assert restarts > 300


def test_a_step_of_a_fixed_size_is_dealt_evenly_or_not_at_all() -> None:
    assert [batch_of_ranks(12, ranks) for ranks in (1, 2, 3, 12)] == [12, 6, 4, 1]
    with pytest.raises(UsageError, match=r"a step of 8 samples .* 3 ranks .* 1, 2, 4 or 8 ranks"):
        batch_of_ranks(8, 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"samples": -1}, "samples: expected a number, 0 or more, found -1"),
        ({"samples": 3, "ranks": 0}, "ranks: expected a number, 1 or more, found 0"),
        ({"samples": 3, "batch": True}, "batch: expected"),
        ({"samples": 3, "delivered": 4}, "delivered: expected at most the 3 samples"),
    ],
    ids=str,
)
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Deal(**wrong)  # type: ignore[arg-type]
