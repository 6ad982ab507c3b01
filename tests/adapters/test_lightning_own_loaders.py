"""Loaders and datasets that know themselves where they are go on there, under Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.adapters.resuming import (
    at_epochs,
    at_steps,
    at_validation,
    check_all,
    run,
)
from tests.adapters.tiny import NO_FUSS, files

pytestmark = NO_FUSS
ROWS = 24


class Stream(IterableDataset[torch.Tensor]):
    """As docs/resuming.md asks for it: another order in each epoch, and it says where it is."""

    noise = 0  # a batch that was fetched ahead was drawn before the save

    def __init__(self) -> None:
        self.given = self.epoch = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.given == ROWS:  # the epoch before is over
            self.given, self.epoch = 0, self.epoch + 1
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.epoch))
        for row in order.tolist()[self.given :]:
            self.given += 1
            yield torch.full((4,), float(row)) + self.noise * torch.rand(4)

    def state_dict(self) -> dict[str, int]:
        return vars(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


class Sized(Stream):
    noise = 1

    def __len__(self) -> int:
        return ROWS


class Parts(Stream):
    """Each worker has a part of the rows."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        for row in range(worker.id * 12 + self.given, worker.id * 12 + 12):
            self.given += 1
            yield torch.full((4,), float(row))
        self.given = 0


def nodes_loader() -> Any:
    sampler: Any = DistributedSampler(range(ROWS), 1, 0)  # type: ignore[arg-type]
    rows: Any = nodes.SamplerWrapper(sampler)
    batches = nodes.Batcher(nodes.Mapper(rows, lambda row: torch.full((4,), float(row))), 4)
    return nodes.Loader(nodes.Mapper(batches, torch.stack))


LOADERS: dict[str, Any] = {
    "stream": lambda: DataLoader(Stream(), 4),
    "sized stream": lambda: DataLoader(Sized(), 4),
    "nodes": nodes_loader,
    "stateful stream": lambda: StatefulDataLoader(Stream(), 4),
    "stateful sized stream": lambda: StatefulDataLoader(Sized(), 4),
    "stateful with workers": lambda: StatefulDataLoader(Parts(), 4, num_workers=2),
}


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize(
    ("kind", "keep"),
    [
        ("stream", at_steps),
        pytest.param("nodes", at_epochs, marks=pytest.mark.long),
        *(
            pytest.param(kind, keep, marks=pytest.mark.long)
            for kind, keep in [
                ("stream", at_epochs),
                ("sized stream", at_steps),
                ("sized stream", at_validation),
                ("nodes", at_steps),
                ("stateful stream", at_epochs),
                ("stateful sized stream", at_validation),
                ("stateful with workers", at_steps),
                ("stateful with workers", at_epochs),
            ]
        ),
    ],
)
def test_loaders_that_know_where_they_are_resume_exactly(
    tmp_path: Path, kind: str, keep: Any
) -> None:
    assert check_all(tmp_path, LOADERS[kind], keep) == 2


def row_of(row: int) -> torch.Tensor:
    return torch.full((4,), float(row))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")  # of litdata's buffers, and of its workers
@pytest.mark.parametrize("workers", [0, 2])
def test_litdatas_loader_goes_on_with_the_same_samples_and_so_does_the_epoch_after(
    tmp_path: Path, workers: int
) -> None:
    litdata = pytest.importorskip("litdata")
    place = str(tmp_path / "data")
    litdata.optimize(row_of, [*range(ROWS)], place, chunk_size=8, num_workers=1, verbose=False)

    def made() -> Any:
        data = litdata.StreamingDataset(place, shuffle=True, seed=3)
        return litdata.StreamingDataLoader(data, batch_size=4, num_workers=workers)

    whole, _ = run(tmp_path, made(), at_steps(tmp_path))
    for name in files(tmp_path):
        path = tmp_path / "ckpt" / name
        start = torch.load(path)["global_step"]
        elsewhere = tmp_path / f"from-{name}"
        model, _ = run(elsewhere, made(), at_steps(elsewhere), resume=path)
        assert model.seen == [each for each in whole.seen if each[0] >= start]
