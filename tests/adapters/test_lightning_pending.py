"""A checkpoint saved between a resume and its first batch continues where that one would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Sampler

from portus_lightning import PortusIO
from tests.adapters.tiny import BATCHES, NO_FUSS, Net, Numbers, loader, same, trainer

pytestmark = NO_FUSS

EPOCHS = 2

MOMENTS = ("on_fit_start", "on_train_start", "on_train_batch_start")


class _LeftError(Exception):
    pass


class Seen(Net):
    """Remembers the rows of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[int]] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        first = batch[0] if isinstance(batch, list | tuple) else batch
        self.rows.append([int(row[0]) for row in first])
        if isinstance(batch, list | tuple):
            self.rows[-1] += [1000 + int(row[0]) for row in batch[1]]
        return super().training_step(first, index)


class LeaveAt(Callback):
    """Saves at a moment of a run, or after a number of steps, and ends the run."""

    def __init__(
        self, path: Path, moment: str, *, steps: int | None = None, again: int = 0
    ) -> None:
        self.path, self.moment, self.steps, self.again = path, moment, steps, again

    def leave(self, trainer: Any) -> None:
        trainer.save_checkpoint(self.path)
        trainer.strategy.checkpoint_io.wait()
        raise _LeftError

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.steps is not None and trainer.global_step == self.steps:
            self.leave(trainer)


def _at(moment: str) -> Any:
    def hook(self: LeaveAt, trainer: Any, *_: Any) -> None:
        if self.moment == moment:
            self.leave(trainer)

    return hook


for each in MOMENTS:
    setattr(LeaveAt, each, _at(each))


def fit(root: Path, data: Any, callback: Any, resume: Path | None, **changes: Any) -> Seen:
    torch.manual_seed(7 if resume else 1)
    model = Seen()
    callbacks = [] if callback is None else [callback]
    run = trainer(
        root,
        plugin=PortusIO(),
        callbacks=callbacks,
        max_epochs=EPOCHS,
        enable_checkpointing=False,
        **changes,
    )
    try:
        run.fit(model, data(), loader(shuffle=False), ckpt_path=resume, weights_only=False)
    except _LeftError:
        assert callback is not None
    else:
        assert callback is None, "the run was to end by itself"
    return model


def plain() -> DataLoader[torch.Tensor]:
    return DataLoader(Numbers(), batch_size=4, shuffle=True)


def workers() -> DataLoader[torch.Tensor]:
    return DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=1)


def several() -> CombinedLoader:
    return CombinedLoader([plain(), DataLoader(Numbers(), batch_size=2, shuffle=True)], "min_size")


def stateful() -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(Numbers(), batch_size=4, shuffle=True)


def check(root: Path, data: Any, moments: list[str], steps: int, **changes: Any) -> None:
    """Resume at each of ``moments`` in turn, save there and leave; then train to the end."""
    whole = fit(root / "whole", data, None, None, **changes)
    path = root / "first.ckpt"
    seen = fit(root / "run", data, LeaveAt(path, "", steps=steps), None, **changes).rows
    assert len(seen) == steps
    for number, moment in enumerate(moments):
        saved = root / f"{number}.ckpt"
        left = fit(root / "run", data, LeaveAt(saved, moment), path, **changes)
        assert not left.rows
        path = saved
    last = fit(root / "run", data, None, path, **changes)
    assert seen + last.rows == whole.rows
    at_once = fit(root / "run", data, None, root / "first.ckpt", **changes)
    assert at_once.rows == last.rows
    assert same(dict(last.state_dict()), dict(at_once.state_dict()))


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("steps", [4, BATCHES, BATCHES + 1])
def test_a_checkpoint_before_the_first_batch_continues_where_the_resumed_one_would(
    tmp_path: Path, moment: str, steps: int
) -> None:
    check(tmp_path, plain, [moment], steps)


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("data", [workers, several, stateful])
def test_so_does_one_of_loaders_with_workers_of_several_and_of_those_that_know_their_position(
    tmp_path: Path, data: Any
) -> None:
    check(tmp_path, data, ["on_fit_start", "on_train_start", "on_train_batch_start"], 4)


def test_several_resumes_in_a_row_keep_the_position(tmp_path: Path) -> None:
    check(tmp_path, plain, [*MOMENTS, *MOMENTS[::-1]], 4)


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
    def data() -> DataLoader[torch.Tensor]:
        return DataLoader(Numbers(), batch_size=4, sampler=Turning())

    path = tmp_path / "first.ckpt"
    fit(tmp_path, data, LeaveAt(path, "", steps=BATCHES + 2), None)
    caplog.clear()
    left = fit(tmp_path, data, LeaveAt(tmp_path / "second.ckpt", "on_train_batch_start"), path)
    assert not left.rows
    assert len([each for each in caplog.messages if "Turning gave other samples" in each]) == 1
