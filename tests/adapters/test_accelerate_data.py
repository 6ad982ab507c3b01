"""Loaders of one process go on where they were: those that scripts have beside the plain one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import portus_accelerate

ROWS = TensorDataset(torch.arange(24))


class Stream(IterableDataset[torch.Tensor]):
    """Has no length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(24)


def prepared(root: Path, *loaders: Any, stateful: bool = False) -> tuple[Accelerator, list[Any]]:
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    loading = DataLoaderConfiguration(use_stateful_dataloader=stateful)
    accelerator = Accelerator(cpu=True, project_dir=str(root), dataloader_config=loading)
    portus_accelerate.enable(accelerator, model="net", materialize="none")
    torch.manual_seed(7)
    return accelerator, [accelerator.prepare(each) for each in loaders]


def rows(batches: Any) -> list[Any]:
    return [each.tolist() for batch in batches for each in batch]


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
