"""A loader goes on where another one was: the same order, without what was delivered."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import portus
from portus.companions.loaders import samplers
from portus.companions.samples.position import FORMAT

N = 22


class Rows(Dataset[int]):
    """Knows which of its rows were looked at."""

    def __init__(self, length: int = N, fingerprint: object = None) -> None:
        self.length = length
        self.fingerprint = fingerprint
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Own(Sampler[int]):
    """A user's: draws from everywhere, and never the same twice."""

    def __init__(self, kind: str) -> None:
        self.numpy = np.random.default_rng(5)
        self.old_numpy = np.random.RandomState(6)
        self.python = random.Random(7)
        self.kind = kind

    def __iter__(self) -> Iterator[int]:
        drawn = (
            *(self.numpy.random(), self.old_numpy.random_sample(), self.python.random()),
            *(random.random(), np.random.rand(), torch.rand(1).item()),
        )
        order = random.Random(str(drawn)).sample(range(N), N)
        return iter(order) if self.kind == "at once" else (each for each in order)

    def __len__(self) -> int:
        return N


class Short(Own):
    """Says that it has more than it gives, the second time."""

    def __iter__(self) -> Iterator[int]:
        yield from range(N if torch.rand(1).item() < 2 and not SHORT else 4)


SHORT: list[bool] = []


class Buckets(Sampler[list[int]]):
    """Batches of its own, of any size."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(N).tolist()
        while order:
            size = random.randint(1, 5)
            yield order[:size]
            order = order[size:]


class Counting(Sampler[int]):
    """Says where it is by what it goes on changing."""

    def __init__(self) -> None:
        self.state = {"given": 0}

    def __iter__(self) -> Iterator[int]:
        for row in range(self.state["given"], N):
            self.state["given"] += 1
            yield row
        self.state["given"] = 0

    def __len__(self) -> int:
        return N

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


class ItsOwnIterator(Sampler[int]):
    """Begins again each time that it is asked for its iterator."""

    def __init__(self) -> None:
        self.row = 0

    def __iter__(self) -> Iterator[int]:
        self.row = 0
        return self

    def __next__(self) -> int:
        if self.row == N:
            raise StopIteration
        self.row += 1
        return self.row - 1

    def __len__(self) -> int:
        return N


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "sequential": lambda: DataLoader(Rows(), 4),
    "shuffled": lambda: DataLoader(Rows(), 4, shuffle=True),
    "drop last": lambda: DataLoader(Rows(), 4, shuffle=True, drop_last=True),
    "one by one": lambda: DataLoader(Rows(), None, shuffle=True),
    "generator": lambda: DataLoader(Rows(), 4, shuffle=True, generator=seeded()),
    "replacement": lambda: DataLoader(Rows(), 4, sampler=RandomSampler(Rows(), True, 50)),
    "lazy": lambda: DataLoader(
        Rows(), 4, sampler=RandomSampler(Rows(), True, 50, generator=seeded())
    ),
    "weighted": lambda: DataLoader(Rows(), 4, sampler=WeightedRandomSampler([*range(1, N + 1)], N)),
    "own": lambda: DataLoader(Rows(), 4, sampler=Own("lazily")),
    "own at once": lambda: DataLoader(Rows(), None, sampler=Own("at once")),
    "counting": lambda: DataLoader(Rows(), 4, sampler=Counting()),
    "its own iterator": lambda: DataLoader(Rows(), None, sampler=ItsOwnIterator()),
    "distributed": lambda: DataLoader(Rows(), 1, sampler=DistributedSampler(Rows(), 3, 1, seed=9)),
    "sampled in batches": lambda: DataLoader(
        Rows(), None, sampler=BatchSampler(SequentialSampler(Rows()), 4, False)
    ),
}


def scattered() -> None:
    """In another process the generators stand elsewhere."""
    torch.seed(), random.seed(), np.random.seed()


def listed(batches: Any) -> list[Any]:
    return [each.tolist() if isinstance(each, torch.Tensor) else each for each in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_goes_on_where_another_one_was(kind: str) -> None:
    tried = 0
    for delivered in (0, 1, 3, 5):
        loader = LOADERS[kind]()
        cursor = portus.DataCursor(loader)
        assert cursor.batches == len(loader)
        list(loader)  # not the first epoch
        scattered()
        batches = iter(loader)
        taken = [next(batches) for _ in range(delivered)]
        state = copy.deepcopy(cursor.state_dict(delivered))  # as saved
        drawn = portus.capture_randomness(torch.device("cpu"))
        expected = listed(batches)
        then = listed(loader)

        again = LOADERS[kind]()
        assert isinstance(again.dataset, Rows)
        other = portus.DataCursor(again)
        scattered()
        assert other.load_state_dict(state) == ""
        batches = iter(again)
        portus.restore_randomness(drawn, torch.device("cpu"))
        assert listed(batches) == expected, delivered
        assert len(again.dataset.loaded) <= sum(map(len_of, expected)), "data is not replayed"
        assert listed(again) == then, "and so does the next epoch"
        assert len(taken) + len(expected) == len(loader)
        tried += 1
    assert tried == 4


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("delivered", [2, 5])
def test_loaders_that_share_a_generator_go_on_as_if_nothing_had_been(
    delivered: int, workers: int
) -> None:
    """The other one draws from it within the epoch. Workers have fetched all by then."""

    def made() -> tuple[DataLoader[Any], DataLoader[Any]]:
        generator = seeded()
        own: Any = {"generator": generator, "shuffle": True}
        return DataLoader(Rows(), 4, num_workers=workers, **own), DataLoader(Rows(), 11, **own)

    train, other = made()
    cursor = portus.DataCursor(train)
    batches = iter(train)
    for _ in range(delivered):
        next(batches)
    listed(other)
    state = cursor.state_dict(delivered)
    expected = listed(batches), listed(other), listed(train)
    scattered()
    train, other = made()
    assert portus.DataCursor(train).load_state_dict(state) == ""
    assert (listed(train), listed(other), listed(train)) == expected


def len_of(batch: Any) -> int:
    return len(batch) if isinstance(batch, list) else 1


def test_batches_of_a_users_own_go_on_too() -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Rows(), batch_sampler=Buckets())

    first = loader()
    cursor = portus.DataCursor(first)
    batches = iter(first)
    seen = listed(next(batches) for _ in range(3))
    state = cursor.state_dict(3)
    scattered()
    second = loader()
    assert portus.DataCursor(second).load_state_dict(state) == ""
    rest = listed(second)
    # The sizes are drawn as it goes, from a generator that training has moved; the order is not.
    assert sorted(each for batch in seen + rest for each in batch) == list(range(N))


def test_workers_fetch_ahead_and_only_what_was_delivered_counts() -> None:
    first = DataLoader(Rows(), 2, shuffle=True, num_workers=2, prefetch_factor=2)
    cursor = portus.DataCursor(first)
    batches = iter(first)
    for _ in range(2):
        next(batches)
    state = cursor.state_dict(2)
    expected = listed(batches)
    scattered()
    second = DataLoader(Rows(), 2, shuffle=True, num_workers=2)
    portus.DataCursor(second).load_state_dict(state)
    assert listed(second) == expected
    assert len(list(second)) == 11


def test_an_iterator_made_beside_is_not_taken_for_that_of_training() -> None:
    loader = DataLoader(Rows(), 4, shuffle=True)
    cursor = portus.DataCursor(loader)
    batches = iter(loader)
    next(batches)
    next(iter(loader))
    state = cursor.state_dict(1, iterator=batches)
    expected = listed(batches)
    again = DataLoader(Rows(), 4, shuffle=True)
    portus.DataCursor(again).load_state_dict(state)
    assert listed(again) == expected


def of_ranks(ranks: int, batch: int, **changes: Any) -> list[DataLoader[Any]]:
    """The loaders of all ranks; of one rank without a DistributedSampler, as frameworks do it."""
    if ranks == 1:
        return [DataLoader(Rows(), batch, shuffle=True, **changes)]
    return [
        DataLoader(Rows(), batch, sampler=DistributedSampler(Rows(), ranks, rank), **changes)
        for rank in range(ranks)
    ]


def of_accelerate(ranks: int, batch: int, kind: str) -> list[DataLoader[Any]]:
    """As ``Accelerator.prepare`` makes them; it lets generators be the same on all ranks."""
    pieces = ranks if kind == "pieces" else 1
    made: list[DataLoader[Any]] = []
    for rank in range(ranks):
        sampler: Any = RandomSampler(Rows(), generator=seeded())
        if kind == "seedable":
            sampler = SeedableRandomSampler(Rows(), data_seed=torch.initial_seed())
        batches: Any = BatchSampler(sampler, batch * pieces, drop_last=False)
        if ranks > 1:
            batches = BatchSamplerShard(
                batches, ranks, rank, split_batches=pieces > 1, even_batches=kind != "as it is"
            )
        made.append(DataLoader(Rows(), batch_sampler=batches))
    return made


MAKERS: dict[str, Callable[[int, int], list[DataLoader[Any]]]] = {
    "distributed": of_ranks,
    **{
        kind: (lambda ranks, batch, kind=kind: of_accelerate(ranks, batch, kind))  # type: ignore[misc]
        for kind in ("batches", "pieces", "seedable", "as it is")
    },
}


@pytest.mark.parametrize("fixed", ["local", "global"])
@pytest.mark.parametrize("path", [(2, 1, 3, 2), (1, 2, 3), (3, 3, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("kind", MAKERS)
def test_each_sample_once_whatever_the_ranks_were(
    kind: str, path: tuple[int, ...], fixed: Any
) -> None:
    seen: Counter[int] = Counter()
    states: list[dict[str, object]] = []
    given, batch = 0, 6 // path[0]
    for number, ranks in enumerate(path):
        is_last = number == len(path) - 1
        scattered()
        loaders = MAKERS[kind](ranks, batch if number == 0 else 2)
        cursors = [portus.DataCursor(each, ranks=ranks, fixed=fixed) for each in loaders]
        for cursor in cursors:
            assert not states or cursor.load_state_dict(states[0]) == ""
        lengths = {cursor.batches for cursor in cursors}
        steps = [list(each) if is_last else [next(iter(each))] for each in loaders]
        if is_last:
            assert lengths == {given + len(each) for each in steps}, "done and left"
        taken = [int(row) for batches in steps for each in batches for row in each]
        seen.update(taken)
        given += len(steps[0])
        if fixed == "global" and not is_last:
            assert len(taken) == 6
        states = [cursor.state_dict(given) for cursor in cursors]
    assert set(seen) == set(range(N))
    repeated = seen - Counter(range(N))
    step = {"distributed": path[-1], "as it is": 1}.get(kind, 6)
    assert repeated.total() < step, "only what the stock sampler repeats"
    if kind in ("batches", "pieces", "seedable") and path[-1] > 1:
        assert len(taken) % (6 if fixed == "global" else 2 * path[-1]) == 0, "filled up"


def test_the_next_epoch_is_dealt_as_stock_does() -> None:
    first, second = of_ranks(1, 4)[0], of_ranks(2, 4)[1]
    cursor = portus.DataCursor(first)
    next(iter(first))
    resumed = portus.DataCursor(second, ranks=2)
    resumed.load_state_dict(cursor.state_dict(1))
    assert resumed.batches == 1 + 3
    assert len(list(second)) == 3
    assert len(list(second)) == 3 == len(second) == resumed.batches


def test_an_epoch_that_is_over_begins_anew_with_its_generators() -> None:
    first = LOADERS["generator"]()
    cursor = portus.DataCursor(first)
    list(first)
    state = cursor.state_dict(len(first), is_over=True)
    expected = listed(first)
    again = LOADERS["generator"]()
    other = portus.DataCursor(again)
    assert other.load_state_dict(state) == ""
    other.put_back(state)
    assert listed(again) == expected


def test_ranks_keep_the_seed_of_the_run() -> None:
    first = of_ranks(2, 4)[0]
    assert isinstance(first.sampler, DistributedSampler)
    first.sampler.seed = 11
    state = portus.DataCursor(first, ranks=2).state_dict(3, is_over=True)
    again = of_ranks(3, 4)[0]
    portus.DataCursor(again, ranks=3).load_state_dict(state)
    assert isinstance(again.sampler, DistributedSampler)
    assert again.sampler.seed == 11


def saved(loader: DataLoader[Any], delivered: int = 1, **named: Any) -> dict[str, Any]:
    cursor = portus.DataCursor(loader, **named)
    batches = iter(loader)
    for _ in range(delivered):
        next(batches)
    return cursor.state_dict(delivered)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (Rows(20), Rows(21), "the dataset had 20 samples, and has 21 now"),
        (Rows(20, "a"), Rows(20, "b"), "fingerprint was 'a', and is 'b' now"),
    ],
    ids=["length", "fingerprint"],
)
def test_a_dataset_that_changed_is_told_and_stock_goes_on(
    before: Rows, after: Rows, told: str
) -> None:
    state = saved(DataLoader(before, 4, shuffle=True))
    loader = DataLoader(after, 4)
    cursor = portus.DataCursor(loader)
    assert told in cursor.load_state_dict(state)
    assert cursor.batches == len(list(loader)) == len(loader)


def test_an_order_that_nobody_knows_is_not_dealt_anew() -> None:
    state = saved(LOADERS["weighted"]())
    loader = DataLoader(Rows(), 3, sampler=WeightedRandomSampler([1.0] * N, N))
    told = portus.DataCursor(loader).load_state_dict(state)
    assert "dealt to 1 ranks with 4 samples each in a step, and is to be dealt to 1 ranks" in told
    assert "WeightedRandomSampler" in told
    told = portus.DataCursor(LOADERS["weighted"](), ranks=2).load_state_dict(state)
    assert "WeightedRandomSampler" in told


class CountsItsEpochs(Sampler[int]):
    """Nobody can set how many there were."""

    def __init__(self) -> None:
        self.begun = 0

    @property
    def epoch(self) -> int:
        return self.begun

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        yield from random.Random(self.begun).sample(range(N), N)

    def __len__(self) -> int:
        return N


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_number_that_nobody_can_set_is_told_unless_it_is_the_same(epochs: int) -> None:
    first = DataLoader(Rows(), 4, sampler=CountsItsEpochs())
    cursor = portus.DataCursor(first)
    for _ in range(epochs):
        list(first)
    batches = iter(first)
    next(batches)
    state = cursor.state_dict(1)
    second = DataLoader(Rows(), 4, sampler=CountsItsEpochs())
    told = portus.DataCursor(second).load_state_dict(state)
    assert told == ("its CountsItsEpochs does not let its epoch be set" if epochs else "")
    rest = listed(second)
    assert len(rest) == 6 if epochs else rest == listed(batches)


def test_a_sampler_that_lies_about_its_length_is_told() -> None:
    state = saved(DataLoader(Rows(), 4, sampler=Short("")), 3)
    SHORT.append(True)
    loader = DataLoader(Rows(), 4, sampler=Short(""))
    portus.DataCursor(loader).load_state_dict(state)
    try:
        with pytest.raises(portus.UsageError, match=r"gave 1 batches this time, and 3 .* is 6"):
            next(iter(loader))
    finally:
        SHORT.clear()


def test_the_state_of_a_newer_portus_is_refused_and_nothing_changes() -> None:
    state = saved(DataLoader(Rows(), 4))
    state["position"]["format"] = FORMAT + 1
    loader = DataLoader(Rows(), 4)
    cursor = portus.DataCursor(loader)
    with pytest.raises(portus.UsageError, match="resume with the Portus that saved it"):
        cursor.load_state_dict(state)
    assert len(list(loader)) == 6


def test_a_step_that_is_to_stay_and_cannot_is_refused() -> None:
    state = saved(of_ranks(2, 4)[0], ranks=2)
    loader = of_ranks(3, 4)[0]
    cursor = portus.DataCursor(loader, ranks=3, fixed="global")
    with pytest.raises(portus.UsageError, match="a step of 8 samples cannot be dealt to 3 ranks"):
        cursor.load_state_dict(state)
    assert loader.batch_sampler is not None
    with pytest.raises(portus.UsageError, match="fixed: expected 'local' or 'global', found 'all'"):
        portus.DataCursor(loader, fixed="all")  # type: ignore[arg-type]


def test_a_cursor_that_is_closed_leaves_the_loader_as_it_was() -> None:
    loader = DataLoader(Rows(), 4, shuffle=True)
    stock = loader.batch_sampler
    cursor = portus.DataCursor(loader)
    assert loader.batch_sampler is not stock
    another = portus.DataCursor(loader)
    cursor.close()
    assert another.stock is stock
    another.close()
    assert loader.batch_sampler is stock


class Eager(Sampler[list[int]]):
    """Decides the order as its iterator is made, not as the first batch is asked for."""

    def __init__(self, counts: bool) -> None:
        self.generator = seeded()
        self.epoch = 0
        self.counts = counts

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        if self.counts:
            self.generator.manual_seed(self.epoch)
            self.epoch += 1
        order = torch.randperm(N, generator=self.generator).tolist()
        return iter([order[first : first + 4] for first in range(0, N, 4)])


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("counts", [False, True])
def test_a_sampler_that_decides_as_its_iterator_is_made_goes_on_too(
    counts: bool, workers: int
) -> None:
    def made() -> DataLoader[Any]:
        return DataLoader(Rows(), batch_sampler=Eager(counts), num_workers=workers)

    loader = made()
    cursor = portus.DataCursor(loader)
    running = iter(loader)
    next(running)
    state = cursor.state_dict(1, iterator=running)
    left, after = listed(running), listed(loader)
    resumed = made()
    assert portus.DataCursor(resumed).load_state_dict(state) == ""
    assert (listed(resumed), listed(resumed)) == (left, after)


def test_a_loader_that_is_followed_is_as_before_for_everybody_else() -> None:
    loader = DataLoader(Rows(), 4, shuffle=True)
    stock: Any = loader.batch_sampler
    cursor = portus.DataCursor(loader)
    followed: Any = loader.batch_sampler
    assert isinstance(followed, BatchSampler)
    running = iter(loader)
    next(running)
    another = copy.deepcopy(loader)
    assert type(another.batch_sampler) is BatchSampler
    assert len(listed(another)) == 6
    followed.batch_size = 8
    assert stock.batch_size == 8
    assert [len(each) for each in loader] == [8, 8, 6]
    cursor.close()
    assert loader.batch_sampler is stock


def test_workers_that_were_there_before_the_cursor_are_followed() -> None:
    def made() -> DataLoader[Any]:
        kept = DataLoader(Rows(), 4, shuffle=True, num_workers=1, persistent_workers=True)
        assert len(list(kept)) == 6
        return kept

    loader = made()
    cursor = portus.DataCursor(loader)
    running = iter(loader)
    next(running)
    state = cursor.state_dict(1, iterator=running)
    left = listed(running)
    cursor.close()
    assert len(list(loader)) == 6
    resumed = made()
    assert portus.DataCursor(resumed).load_state_dict(state) == ""
    assert listed(resumed) == left


def test_a_batch_that_was_changed_is_put_back() -> None:
    state = saved(of_ranks(2, 4)[0], ranks=2)
    loader = of_ranks(1, 4)[0]
    assert isinstance(loader.batch_sampler, BatchSampler)
    cursor = portus.DataCursor(loader, fixed="global")
    assert cursor.load_state_dict(state) == ""
    assert cursor.load_state_dict(state) == ""
    assert [len(each) for each in loader] == [8, 6]
    cursor.close()
    assert loader.batch_sampler.batch_size == 4
    assert [len(each) for each in loader] == [4, 4, 4, 4, 4, 2]


def test_who_passes_over_what_was_delivered_passes_over_that_alone() -> None:
    state = saved(of_ranks(1, 4)[0], 2)
    for passed in (1, 2, 3):
        loader = of_ranks(1, 4)[0]
        cursor = portus.DataCursor(loader)
        cursor.load_state_dict(state)
        given = list(iter(cursor.sampler_after(passed)))
        assert given[:passed] == [[]] * passed
        assert [len(each) for each in given[passed:]] == [4, 4, 4, 2]
        assert cursor.newest is not None
        assert cursor.newest.before == 2
    anew = portus.DataCursor(of_ranks(1, 4)[0])
    assert len(list(iter(anew.sampler_after(2)))) == 6
    assert anew.newest is not None
    assert anew.newest.before == 2


def test_the_epoch_after_one_that_was_dealt_anew_has_another_order() -> None:
    def made(batch: int) -> DataLoader[Any]:
        return DataLoader(Rows(), batch, sampler=RandomSampler(Rows(), generator=seeded()))

    first = made(4)
    cursor = portus.DataCursor(first)
    batches = iter(first)
    begun = next(batches).tolist()
    state = cursor.state_dict(1)
    left = flat(listed(batches))
    again = made(3)
    assert portus.DataCursor(again).load_state_dict(state) == ""
    assert flat(listed(again)) == left
    assert flat(listed(again)) != begun + left


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("dispatch", ["batches", "pieces"])
def test_a_process_that_loads_for_all_goes_on_for_any_number(dispatch: Any) -> None:
    def made(ranks: int, **more: Any) -> portus.DataCursor:
        size = 2 * ranks if dispatch == "pieces" else 2
        loader = DataLoader(Rows(), size, shuffle=True)
        return portus.DataCursor(loader, ranks=ranks, dispatch=dispatch, **more)

    for ranks, fixed in ((3, "local"), (2, "local"), (1, "local"), (1, "global")):
        first = made(3)
        batches = iter(first.loader)
        seen = [int(row) for _ in range(2 if dispatch == "pieces" else 6) for row in next(batches)]
        assert len(seen) == 12
        state = first.state_dict(2)
        scattered()
        second = made(ranks, fixed=fixed)
        assert second.load_state_dict(state) == ""
        rest = listed(second.loader)
        size = 6 if fixed == "global" else 2 * ranks if dispatch == "pieces" else 2
        assert [len(each) for each in rest] == [size] * (10 // size) + [10 % size] * (10 % size > 0)
        assert sorted(seen + flat(rest)) == list(range(N))
        at_once = ranks if dispatch == "batches" else 1
        assert second.batches == 2 * at_once + len(rest)


class Stream(IterableDataset[int]):
    """Says where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        for row in range(self.at % N, N):
            self.at = row + 1
            yield row

    def state_dict(self) -> dict[str, int]:
        return vars(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


class Silent(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


@pytest.mark.long
def test_a_stream_that_says_where_it_is_goes_on_there() -> None:
    loader = DataLoader(Stream(), 4)
    cursor = portus.DataCursor(loader)
    assert cursor.is_asked
    batches = iter(loader)
    next(batches)
    state = cursor.state_dict(1)
    expected = listed(batches)
    again = DataLoader(Stream(), 4)
    other = portus.DataCursor(again)
    assert other.load_state_dict(state) == ""
    assert listed(again) == expected
    assert len(listed(again)) == 6, "the next epoch"
    cursor.close()


def test_who_fetches_ahead_saves_what_was_delivered() -> None:
    loader = DataLoader(Stream(), 4)
    cursor = portus.DataCursor(loader)
    batches = iter(loader)
    for fetched in range(3):
        cursor.keep(fetched)
        next(batches)
    state = cursor.state_dict(2)
    again = DataLoader(Stream(), 4)
    portus.DataCursor(again).load_state_dict(state)
    assert listed(again)[0] == [8, 9, 10, 11]


def test_a_stream_of_other_ranks_goes_on_and_that_is_told() -> None:
    state = saved(DataLoader(Stream(), 4), ranks=2)
    loader = DataLoader(Stream(), 4)
    told = portus.DataCursor(loader).load_state_dict(state)
    assert "it was on 2 ranks, and is on 1 now" in told
    assert len(listed(loader)) == 5
    plain = portus.DataCursor(DataLoader(Rows(), 4))
    assert "the origin of its order is unknown" in plain.load_state_dict(state)
    told = portus.DataCursor(DataLoader(Stream(), 4)).load_state_dict(saved(DataLoader(Rows(), 4)))
    assert "its Stream was not asked for its position" in told


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (lambda: DataLoader(Silent(), 4), "is unknown: Silent has no state_dict"),
        (
            lambda: DataLoader(Stream(), 4, num_workers=1),
            "its Stream has state_dict, but workers read it.*StatefulDataLoader",
        ),
        (lambda: [1, 2], "expected a DataLoader, or one with state_dict.*found list"),
    ],
    ids=["silent", "workers", "list"],
)
def test_a_loader_whose_position_nobody_knows_is_refused(loader: Any, told: str) -> None:
    with pytest.raises(portus.UsageError, match=told):
        portus.DataCursor(loader())


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
@pytest.mark.parametrize("is_dealt", [False, True])
def test_torchdatas_loader_of_rows_goes_on_with_other_batches_too(is_dealt: bool) -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader")

    def made(batch: int) -> Any:
        if not is_dealt:
            return module.StatefulDataLoader(Rows(), batch, shuffle=True)
        dealt = module.sampler.StatefulDistributedSampler(Rows(), 1, 0, seed=3)
        return module.StatefulDataLoader(Rows(), batch, sampler=dealt)

    loader = made(4)
    cursor = portus.DataCursor(loader)
    assert not cursor.is_asked
    list(loader)  # not the first epoch
    batches = iter(loader)
    next(batches)
    state = cursor.state_dict(1, iterator=batches)
    expected = [row for each in batches for row in each.tolist()]
    for batch in (4, 3):
        scattered()
        again = made(batch)
        assert portus.DataCursor(again).load_state_dict(state) == ""
        assert [row for each in again for row in each.tolist()] == expected


class Turning(Sampler[int]):
    """Gives another order each time, by a counter of its own that nobody can see."""

    def __init__(self) -> None:
        self.turn = 0

    def __iter__(self) -> Iterator[int]:
        self.turn += 1
        return iter([(row * 5 + self.turn * 3) % N for row in range(N)])

    def __len__(self) -> int:
        return N


def _resumed(
    sampler: Callable[[], Any], epochs: int, delivered: int, workers: int = 0
) -> portus.DataCursor:
    """A loader that goes on in the last of ``epochs``, in a new process."""
    loader = DataLoader(Rows(), batch_size=2, sampler=sampler())
    cursor = portus.DataCursor(loader)
    for _ in range(epochs - 1):
        list(loader)
    iterator = iter(loader)
    for _ in range(delivered):
        next(iterator)
    state = cursor.state_dict(delivered, iterator=iterator)
    after = DataLoader(Rows(), batch_size=2, sampler=sampler(), num_workers=workers)
    resumed = portus.DataCursor(after)
    assert resumed.load_state_dict(state) == ""
    return resumed


def test_a_sampler_that_gives_another_order_after_a_resume_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    resumed = _resumed(Turning, 2, 4)
    iterator = iter(resumed.loader)
    next(iterator)
    (said,) = caplog.messages
    assert "Turning gave other samples than before the restart for the 4 batches" in said


@pytest.mark.parametrize("workers", [0, 2])
def test_it_is_reported_before_the_first_batch_and_once(
    caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    resumed = _resumed(Turning, 2, 4, workers)
    iterator = iter(resumed.loader)
    next(iterator)
    assert len(caplog.messages) == 1
    list(iterator)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    "sampler",
    [lambda: RandomSampler(Rows()), lambda: SequentialSampler(Rows()), Counting, lambda: Own("")],
    ids=["random", "sequential", "own state", "own generators"],
)
def test_an_order_that_repeats_is_not_reported_over_several_resumes(
    sampler: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    cursor = _resumed(sampler, 2, 3)
    for delivered in (5, 5, 8):
        iterator = iter(cursor.loader)
        for _ in range(delivered - cursor.state_dict(3)["position"]["batches"]):  # type: ignore[index]
            next(iterator)
        state = cursor.state_dict(delivered, iterator=iterator)
        assert state["position"]["order"].startswith("0:")  # type: ignore[index]
        cursor = portus.DataCursor(DataLoader(Rows(), batch_size=2, sampler=sampler()))
        assert cursor.load_state_dict(state) == ""
    next(iter(cursor.loader))
    assert not caplog.messages


@pytest.mark.parametrize(
    "made", [list, tuple, np.array, torch.tensor], ids=lambda each: each.__name__
)
def test_batches_of_any_kind_are_compared(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    state: dict[str, Any] = {}
    for shift, warnings in ((0, 0), (0, 0), (1, 1)):
        batches = [made([(row + shift) % N, row]) for row in range(8)]
        cursor = portus.DataCursor(DataLoader(Rows(), batch_sampler=batches))
        assert not state or cursor.load_state_dict(state) == ""
        iterator = iter(cursor.loader)
        delivered = state["position"]["batches"] if state else 0
        next(iterator)
        assert len(caplog.messages) == warnings
        state = state or cursor.state_dict(delivered + 1, iterator=iterator)


def test_what_was_loaded_is_saved_again_until_the_next_batch() -> None:
    resumed = _resumed(lambda: RandomSampler(Rows()), 2, 4)
    loaded = resumed.state_dict(4)
    torch.rand(3)
    assert resumed.state_dict(4) == loaded
    iterator = iter(resumed.loader)
    assert resumed.state_dict(4, iterator=iterator) == loaded
    next(iterator)
    assert resumed.state_dict(5, iterator=iterator) != loaded


def test_the_end_of_an_epoch_is_saved_again_until_the_next_one_begins() -> None:
    loader = DataLoader(Rows(), batch_size=2, shuffle=True)
    cursor = portus.DataCursor(loader)
    list(loader)
    over = cursor.state_dict(11, is_over=True)
    after = portus.DataCursor(DataLoader(Rows(), batch_size=2, shuffle=True))
    assert after.load_state_dict(over) == ""
    torch.rand(3)
    assert after.state_dict(0) == over
    after.put_back(over)
    assert after.state_dict(0)["position"]["is_over"] is False  # type: ignore[index]


def test_a_generator_of_numpy_goes_on_with_the_normal_number_that_it_has_ready() -> None:
    owner = SimpleNamespace(numpy=np.random.RandomState(3))
    owner.numpy.normal()  # which makes two
    state = samplers.generators_of(owner)
    expected = owner.numpy.normal(size=3)
    samplers.put_generators(owner, state)
    assert (owner.numpy.normal(size=3) == expected).all()
