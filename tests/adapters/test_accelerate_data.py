"""Loaders of one process go on where they were: those that scripts have beside the plain one."""

from __future__ import annotations

import copy
import logging
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
)

import portus
import portus_accelerate
from portus_accelerate import resume

ROWS = TensorDataset(torch.arange(24))


class Stream(IterableDataset[torch.Tensor]):
    """Has no length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(24)


def prepared(
    root: Path, *loaders: Any, stateful: bool = False, seedable: bool = False
) -> tuple[Accelerator, list[Any]]:
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    loading = DataLoaderConfiguration(
        use_stateful_dataloader=stateful, use_seedable_sampler=seedable
    )
    accelerator = Accelerator(cpu=True, project_dir=str(root), dataloader_config=loading)
    portus_accelerate.enable(accelerator, model="net")
    torch.manual_seed(7)
    return accelerator, [accelerator.prepare(each) for each in loaders]


def elsewhere() -> None:
    """In another process the generators stand elsewhere."""
    torch.seed(), random.seed(), np.random.seed()


def rows(batches: Any) -> list[Any]:
    return [each.tolist() for batch in batches for each in batch]


def flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


def test_data_that_has_no_length_is_trained_on_and_goes_on(tmp_path: Path) -> None:
    accelerator, (data,) = prepared(tmp_path, DataLoader(Stream(), batch_size=4))
    batches = iter(data)
    seen = rows([next(batches), next(batches)])
    accelerator.save_state(str(tmp_path / "one"))
    drawn = torch.rand(1)
    seen += rows(batches)
    assert seen == list(range(24))
    accelerator.load_state(str(tmp_path / "one"))
    again = iter(skip_first_batches(data, 2))
    first = next(again)
    assert torch.equal(torch.rand(1), drawn)
    assert rows([first, *again]) == seen[8:]
    accelerator.end_training()


def test_another_loader_of_the_same_data_is_not_taken_for_the_one_that_goes_on(
    tmp_path: Path,
) -> None:
    train = DataLoader(ROWS, batch_size=4, shuffle=True)
    accelerator, (data, other) = prepared(tmp_path, train, DataLoader(ROWS, batch_size=6))
    batches = iter(data)
    next(batches)
    accelerator.save_state(str(tmp_path / "one"))
    expected = rows(batches)
    accelerator.load_state(str(tmp_path / "one"))
    assert rows(other) == [[*range(n, n + 6)] for n in range(0, 24, 6)]
    assert rows(skip_first_batches(data, 1)) == expected
    accelerator.end_training()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
@pytest.mark.parametrize("begun", [True, False])
def test_the_first_epoch_of_a_stateful_loader_goes_on_where_it_is_made_anew(
    tmp_path: Path, begun: bool
) -> None:
    """Its iterator was made when it was prepared, and drew from the generators then."""

    def loader() -> Any:
        return DataLoader(ROWS, batch_size=4, shuffle=True)

    accelerator, (data,) = prepared(tmp_path, loader(), stateful=True)
    batches = iter(data)
    if begun:
        next(batches)
    accelerator.save_state(str(tmp_path / "one"))
    drawn = torch.rand(1) if begun else None
    expected = rows(batches)
    after = torch.rand(1)
    accelerator.end_training()
    accelerator, (data,) = prepared(tmp_path, loader(), stateful=True)
    torch.rand(5)  # in a new process they stand elsewhere
    accelerator.load_state(str(tmp_path / "one"))
    again = iter(data)
    found = rows([next(again)])
    if drawn is not None:
        assert torch.equal(torch.rand(1), drawn)
    assert found + rows(again) == expected
    assert torch.equal(torch.rand(1), after)
    accelerator.end_training()


LOADERS: dict[str, dict[str, Any]] = {
    "shuffled": {"shuffle": True},
    "uneven, in order": {"batch_size": 5},
    "drop last": {"shuffle": True, "batch_size": 5, "drop_last": True},
    "a generator of its own": {"shuffle": True, "generator": True},
    "in batches of its own": {"batch_size": 1, "batch_sampler": True},
    "distributed by the script": {"batch_size": 2, "sampler": True},
    "workers": {"shuffle": True, "num_workers": 2},
}


def made(kind: str) -> Any:
    named = {"batch_size": 4} | LOADERS[kind]
    if named.get("generator"):
        named["generator"] = torch.Generator().manual_seed(3)
    if named.get("batch_sampler"):
        named["batch_sampler"] = BatchSampler(RandomSampler(ROWS), 4, drop_last=False)
    if named.get("sampler"):
        named["sampler"] = DistributedSampler(ROWS, 2, 1)
    return DataLoader(ROWS, **named)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("by_script", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_loader_goes_on_in_its_epoch_whether_the_script_passes_over_what_was_or_not(
    tmp_path: Path, kind: str, by_script: bool
) -> None:
    for epoch, done in ((0, 1), (1, 3)):
        accelerator, (data,) = prepared(tmp_path, made(kind))
        for _ in range(epoch):
            list(data)
        batches = iter(data)
        for _ in range(done):
            next(batches)
        accelerator.save_state(str(tmp_path / f"{epoch}"))
        drawn = torch.rand(1)
        expected = rows(batches), rows(data), data.iteration
        accelerator.end_training()
        elsewhere()
        accelerator, (data,) = prepared(tmp_path, made(kind))
        elsewhere()
        accelerator.load_state(str(tmp_path / f"{epoch}"))
        left = skip_first_batches(data, done) if by_script else data
        assert len(left) == len(data) - done * by_script
        batches = iter(left)
        first = next(batches)
        assert torch.equal(torch.rand(1), drawn)
        assert (rows([first, *batches]), rows(data), data.iteration) == expected
        accelerator.end_training()


@pytest.mark.parametrize("kind", ["plain", "stream"])
def test_a_loader_of_older_versions_that_passes_over_is_in_the_same_epoch(
    tmp_path: Path, kind: str
) -> None:
    def loader() -> Any:
        return made("distributed by the script") if kind == "plain" else DataLoader(Stream())

    accelerator, (data,) = prepared(tmp_path, loader())
    list(data)
    batches = iter(data)
    next(batches)
    accelerator.save_state(str(tmp_path / "one"))
    expected = rows(batches), rows(data), data.iteration
    accelerator.end_training()
    accelerator, (data,) = prepared(tmp_path, loader())
    accelerator.load_state(str(tmp_path / "one"))
    left = skip_first_batches(data, 1)
    left.iteration = 0  # as Accelerate 1.0 makes it
    assert (rows(left), rows(data), data.iteration) == expected
    accelerator.end_training()


@pytest.mark.parametrize("by_script", [True, False])
def test_a_loop_that_was_left_is_over_unless_the_script_says_where_it_was(
    tmp_path: Path, by_script: bool
) -> None:
    accelerator, (data,) = prepared(tmp_path, made("shuffled"))
    whole = []
    for number, batch in enumerate(data, 1):
        whole += rows([batch])
        if number == 2:
            break
    accelerator.save_state(str(tmp_path / "one"))
    expected = rows(data)
    accelerator.end_training()
    accelerator, (data,) = prepared(tmp_path, made("shuffled"))
    elsewhere()
    accelerator.load_state(str(tmp_path / "one"))
    if by_script:
        assert sorted(flat(whole + rows(skip_first_batches(data, 2)))) == [*range(24)]
    else:
        assert rows(data) == expected
    accelerator.end_training()


class Trains:
    """A loop's step: by Accelerate's ``backward``, by its own, or by its own with gradients that
    are accumulated and never stepped."""

    def __init__(self, accelerator: Accelerator, way: str) -> None:
        self._accelerator, self._way = accelerator, way
        self._model = accelerator.prepare(torch.nn.Linear(1, 1))
        self._optimizer = torch.optim.SGD(self._model.parameters(), 0.1)

    def step(self, batch: torch.Tensor) -> None:
        loss = self._model(batch[:, None].float()).mean()
        if self._way == "accelerate":
            self._accelerator.backward(loss)
        else:
            loss.backward()
        if self._way != "accumulated":
            self._optimizer.step()
            self._optimizer.zero_grad()

    def evaluate(self, batch: torch.Tensor) -> None:
        with torch.no_grad():
            self._model(batch[:, None].float())


WAYS = ["accelerate", "own", "accumulated"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_loop_that_passes_over_by_hand_what_was_delivered_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, by_hand: bool, way: str
) -> None:
    accelerator, (data,) = prepared(tmp_path, DataLoader(ROWS, batch_size=4))
    batches = iter(data)
    next(batches), next(batches)
    accelerator.save_state(str(tmp_path / "two"))
    accelerator.load_state(str(tmp_path / "two"))
    trains = Trains(accelerator, way)
    for number, (batch,) in enumerate(data):
        if number >= 2 or not by_hand:
            trains.step(batch)
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert len(said) == by_hand
    assert all("skipped 2 batches" in each for each in said)
    accelerator.end_training()


def test_a_loop_that_trains_nothing_is_not_told_that_it_passes_over_what_it_should_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as one of inference that a save interrupted: it goes on in its data, too."""
    accelerator, (data,) = prepared(tmp_path, made("shuffled"))
    batches = iter(data)
    next(batches), next(batches)
    accelerator.save_state(str(tmp_path / "one"))
    expected = rows(batches), rows(data)
    accelerator.end_training()
    accelerator, (data,) = gone_on(tmp_path, "shuffled")
    trains, found = Trains(accelerator, "own"), []
    for (batch,) in data:
        trains.evaluate(batch)
        found.append(batch.tolist())
    assert (found, rows(data)) == expected
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    accelerator.end_training()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("looks", ["at one batch", "at all"])
def test_a_loop_that_only_looks_after_the_resume_uses_up_nothing_of_the_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, looks: str, way: str
) -> None:
    accelerator, (data,) = prepared(tmp_path, made("shuffled"))
    trains, batches = Trains(accelerator, way), iter(data)
    for _ in range(2):
        trains.step(next(batches)[0])
    accelerator.save_state(str(tmp_path / "one"))
    drawn = torch.rand(1)
    expected = rows(batches), rows(data), data.iteration
    accelerator.end_training()
    accelerator, (data,) = gone_on(tmp_path, "shuffled")
    if looks == "at all":
        assert rows(data) == expected[0]
    else:
        assert next(iter(data))[0].tolist() == expected[0][0]
    assert ("after load_state trained nothing" in caplog.text) == (looks == "at all")
    accelerator.save_state(str(tmp_path / "one"))
    accelerator.load_state(str(tmp_path / "one"))
    trains, batches = Trains(accelerator, way), iter(data)
    (first,) = next(batches)
    assert torch.equal(torch.rand(1), drawn)
    trains.step(first)
    assert ([first.tolist(), *rows(batches)], rows(data), data.iteration) == expected
    accelerator.end_training()


def step(accelerator: Accelerator) -> None:
    accelerator.backward(torch.ones((), requires_grad=True) * 1)


def gone_on(root: Path, *kinds: str) -> tuple[Accelerator, list[Any]]:
    """What another process has that loads the state in ``root``."""
    elsewhere()
    accelerator, found = prepared(root, *map(made, kinds))
    accelerator.load_state(str(root / "one"))
    return accelerator, found


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_loop_over_the_same_loader_inside_of_a_training_loop_does_not_end_that(
    tmp_path: Path, whole: bool, at_once: bool
) -> None:
    """Such as one that measures on the training data; without a backward pass, the next batch of
    training tells."""
    accelerator, (data,) = prepared(tmp_path, made("shuffled"))
    batches = iter(data)
    for _ in range(2):
        next(batches)
        if at_once:
            step(accelerator)
    for _ in data:
        if not whole:
            break
    if not at_once:
        next(batches)
    accelerator.save_state(str(tmp_path / "one"))
    expected = rows(batches)
    accelerator.end_training()
    accelerator, (data,) = gone_on(tmp_path, "shuffled")
    assert rows(data) == expected
    accelerator.end_training()


def test_a_loop_that_goes_on_while_a_state_is_loaded_keeps_its_own_batches_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, (data,) = prepared(tmp_path, made("shuffled"))
    batches = iter(data)
    next(batches)
    accelerator.save_state(str(tmp_path / "zero"))
    next(batches)
    accelerator.load_state(str(tmp_path / "zero"))
    next(batches)
    accelerator.save_state(str(tmp_path / "one"))
    assert caplog.text.count("was running when the state was loaded") == 1
    expected = rows(batches)
    assert len(expected) == 3
    assert sorted(flat(rows(data))) == [*range(24)]
    accelerator.end_training()
    accelerator, (data,) = gone_on(tmp_path, "shuffled")
    assert rows(data) == expected
    accelerator.end_training()


def test_other_numbers_of_loaders_are_told_and_go_on_in_their_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, (data, _) = prepared(tmp_path, made("shuffled"), made("uneven, in order"))
    batches = iter(data)
    next(batches)
    accelerator.save_state(str(tmp_path / "one"))
    expected = rows(batches)
    accelerator.end_training()
    accelerator, (data,) = gone_on(tmp_path, "shuffled")
    assert "2 data loaders were prepared when this state was saved, and 1 are now" in caplog.text
    assert rows(data) == expected
    accelerator.end_training()


def test_a_state_of_stock_leaves_nothing_of_the_one_that_was_loaded_before(tmp_path: Path) -> None:
    accelerator, (data,) = prepared(tmp_path, made("shuffled"))
    batches = iter(data)
    next(batches)
    accelerator.save_state(str(tmp_path / "one"))
    accelerator.load_state(str(tmp_path / "one"))
    resume.go_back(accelerator, None, None)
    assert sorted(flat(rows(data))) == [*range(24)]
    accelerator.end_training()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
@pytest.mark.parametrize("stateful", [True, False])
def test_a_loader_that_is_of_another_kind_now_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stateful: bool
) -> None:
    accelerator, (data,) = prepared(tmp_path, made("shuffled"), stateful=stateful)
    batches = iter(data)
    next(batches)
    accelerator.save_state(str(tmp_path / "one"))
    accelerator.end_training()
    accelerator, (data,) = prepared(tmp_path, made("shuffled"), stateful=not stateful)
    accelerator.load_state(str(tmp_path / "one"))
    assert caplog.text.count("its loader was of another kind at the save") == 1
    assert sorted(flat(rows(data))) == [*range(24)]
    accelerator.end_training()


def test_a_rank_whose_random_states_are_missing_goes_on_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, (data,) = prepared(tmp_path, made("shuffled"))
    batches = iter(data)
    next(batches)
    accelerator.save_state(str(tmp_path / "one"))
    expected = rows(batches)
    accelerator.end_training()
    elsewhere()
    accelerator, (data,) = prepared(tmp_path, made("shuffled"))
    with monkeypatch.context() as changed:
        changed.setattr(Accelerator, "process_index", 1)
        accelerator.load_state(str(tmp_path / "one"))
    assert rows(data) == expected
    accelerator.end_training()


@pytest.mark.parametrize("way", WAYS)
def test_a_validation_that_a_save_interrupted_begins_anew(tmp_path: Path, way: str) -> None:
    kinds = ("shuffled", "uneven, in order")
    accelerator, (data, other) = prepared(tmp_path, *map(made, kinds))
    trains, batches = Trains(accelerator, way), iter(data)
    trains.step(next(batches)[0])
    for _ in other:
        accelerator.save_state(str(tmp_path / "one"))
        break
    expected = rows(batches)
    accelerator.end_training()
    accelerator, (data, other) = gone_on(tmp_path, *kinds)
    assert rows(data) == expected
    assert flat(rows(other)) == [*range(24)]
    accelerator.end_training()


@pytest.mark.parametrize("done", [1, 2])
def test_a_script_that_passes_over_fewer_than_it_was_given_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, done: int
) -> None:
    """It saved before it trained the last one."""
    accelerator, (data,) = prepared(tmp_path, made("shuffled"))
    batches = iter(data)
    next(batches), next(batches)
    accelerator.save_state(str(tmp_path / "one"))
    expected = rows(batches)
    accelerator.end_training()
    accelerator, (data,) = gone_on(tmp_path, "shuffled")
    assert rows(skip_first_batches(data, done)) == expected
    assert ("skips 1 batches, and 2 were delivered" in caplog.text) == (done == 1)
    accelerator.end_training()


def test_what_was_loaded_and_not_used_is_saved_as_it_was(tmp_path: Path) -> None:
    accelerator, (data,) = prepared(tmp_path, made("shuffled"))
    batches = iter(data)
    next(batches)
    accelerator.save_state(str(tmp_path / "one"))
    expected = rows(batches)
    for number in range(2):
        accelerator.load_state(str(tmp_path / ("one" if number == 0 else "two")))
        accelerator.save_state(str(tmp_path / "two"))
    assert rows(data) == expected
    accelerator.end_training()


def test_a_dataset_that_changed_is_told_and_the_epoch_is_stocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, (data,) = prepared(tmp_path, made("shuffled"))
    next(iter(data))
    accelerator.save_state(str(tmp_path / "one"))
    accelerator.end_training()
    other = DataLoader(TensorDataset(torch.arange(23)), batch_size=4, shuffle=True)
    accelerator, (data,) = prepared(tmp_path, other)
    accelerator.load_state(str(tmp_path / "one"))
    assert "the dataset had 24 samples, and has 23 now" in caplog.text
    assert sorted(flat(rows(data))) == [*range(23)]
    accelerator.end_training()


def test_a_copy_of_a_loader_is_followed_by_nobody(tmp_path: Path) -> None:
    accelerator, (data,) = prepared(tmp_path, made("shuffled"))
    for again in (pickle.loads(pickle.dumps(data)), copy.deepcopy(data)):
        assert sorted(flat(rows(again))) == [*range(24)]
    accelerator.end_training()


class Drawing(Dataset[torch.Tensor]):
    """Each row draws from every generator."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(1).item()])


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("how", ["plain", "seedable", "stateful"])
def test_augmentations_that_are_seeded_by_sample_go_on_exactly(
    tmp_path: Path, how: str, workers: int
) -> None:
    def begun() -> tuple[Accelerator, Any]:
        data = portus.SeededDataset(Drawing(), 3)
        plain = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
        accelerator, (found,) = prepared(
            tmp_path, plain, stateful=how == "stateful", seedable=how == "seedable"
        )
        return accelerator, found

    accelerator, data = begun()
    first = rows(data)  # the epoch before
    batches = iter(data)
    next(batches)
    accelerator.save_state(str(tmp_path / "one"))
    expected = rows(batches) + rows(data)
    accelerator.end_training()
    accelerator, data = begun()
    accelerator.load_state(str(tmp_path / "one"))
    found = rows(data if how == "stateful" else skip_first_batches(data, 1)) + rows(data)
    assert found == expected
    assert len({each[1] for each in first + found}) == 24 + 20 + 24, "each epoch draws anew"
    accelerator.end_training()


def test_augmentations_that_are_told_no_epoch_are_told_to_the_user(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hidden = Subset(portus.SeededDataset(Drawing(), 3), range(4))
    accelerator, _ = prepared(tmp_path, DataLoader(hidden))
    assert caplog.text.count("put SeededDataset around Subset") == 1
    accelerator.end_training()


class Turning(Sampler[int]):
    """Gives another order each time, by a counter of its own."""

    def __init__(self) -> None:
        self.turn = 0

    def __iter__(self) -> Iterator[int]:
        self.turn += 1
        return iter([(row * 5 + self.turn) % 24 for row in range(24)])

    def __len__(self) -> int:
        return 24


def test_a_sampler_that_gives_another_order_after_a_resume_is_reported_before_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def loader() -> Any:
        return DataLoader(ROWS, batch_size=4, sampler=Turning())

    accelerator, (data,) = prepared(tmp_path, loader())
    list(data)
    batches = iter(data)
    next(batches)
    accelerator.save_state(str(tmp_path / "one"))
    list(batches)
    accelerator.end_training()
    accelerator, (data,) = prepared(tmp_path, loader())
    accelerator.load_state(str(tmp_path / "one"))
    caplog.clear()
    next(iter(data))
    said = [each for each in caplog.messages if "Turning gave other samples" in each]
    assert len(said) == 1
    accelerator.end_training()


def test_a_state_that_is_saved_right_after_it_was_loaded_continues_where_that_one_would(
    tmp_path: Path,
) -> None:
    def loader() -> Any:
        return DataLoader(ROWS, batch_size=4, shuffle=True)

    accelerator, (data,) = prepared(tmp_path, loader())
    batches = iter(data)
    next(batches)
    accelerator.save_state(str(tmp_path / "0"))
    expected = rows(batches)
    accelerator.end_training()
    for number in (0, 1, 2):
        accelerator, (data, other) = prepared(tmp_path, loader(), DataLoader(ROWS, batch_size=6))
        accelerator.load_state(str(tmp_path / str(number)))
        rows(other)
        if number == 1:
            iter(data)
        accelerator.save_state(str(tmp_path / str(number + 1)))
        accelerator.end_training()
    accelerator, (data,) = prepared(tmp_path, loader())
    accelerator.load_state(str(tmp_path / "3"))
    assert rows(data) == expected
    accelerator.end_training()
