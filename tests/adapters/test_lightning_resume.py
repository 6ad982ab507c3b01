"""A run that was cut and resumed ends with the same bits as one that was not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from portus_lightning import PortusIO, randomness
from portus_lightning.companion import KEY
from tests.adapters.tiny import NO_FUSS, Net, Numbers, every_step, files, loader, same, trainer

pytestmark = NO_FUSS
CPU = torch.device("cpu")


class Draws(Callback):
    """Uses every generator in each step, and remembers what they gave."""

    def __init__(self) -> None:
        self.drawn: dict[int, tuple[float, ...]] = {}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.drawn[trainer.global_step] = (
            random.random(),
            random.gauss(0, 1),
            float(np.random.rand()),
            float(np.random.standard_normal()),
            torch.rand(1).item(),
        )


def run(
    root: Path, data: DataLoader[torch.Tensor], keep: Any, *, resume: Any = None, **changes: Any
) -> tuple[Net, Draws]:
    """Train three epochs, from the start or from a checkpoint; another global seed each time."""
    seed_everything(7 if resume else 1, verbose=False)
    model, draws = Net(), Draws()
    settings = {"max_epochs": 3, "callbacks": [draws, keep]} | changes
    fit = trainer(root, plugin=PortusIO(materialize="none"), **settings)
    fit.fit(model, data, loader(shuffle=False), ckpt_path=resume)
    return model, draws


def check_all(root: Path, make: Any, keep: Any, **changes: Any) -> int:
    """Resume from each checkpoint of a run, and compare. How many were compared."""
    whole, all_drawn = run(root, make(), keep(root), **changes)
    compared = 0
    for name in files(root):
        path = root / "ckpt" / name
        start = torch.load(path)["global_step"]
        if start >= 18:
            continue
        elsewhere = root / f"from-{name}"
        model, draws = run(elsewhere, make(), keep(elsewhere), resume=path, **changes)
        assert model.seen == [each for each in whole.seen if each[0] >= start], name
        assert draws.drawn == {s: d for s, d in all_drawn.drawn.items() if s >= start}, name
        assert same(dict(model.state_dict()), dict(whole.state_dict())), name
        compared += 1
    return compared


def at_steps(root: Path) -> ModelCheckpoint:
    return every_step(root, every_n_train_steps=7)


def at_step_9(root: Path) -> ModelCheckpoint:
    return every_step(root, every_n_train_steps=9)


def at_epochs(root: Path) -> ModelCheckpoint:
    return ModelCheckpoint(
        root / "ckpt", filename="{step}", save_top_k=-1, save_on_train_epoch_end=True
    )


def at_validation(root: Path) -> ModelCheckpoint:
    return ModelCheckpoint(
        root / "ckpt", filename="{step}", save_top_k=-1, save_on_train_epoch_end=False
    )


def stateful(**changes: Any) -> Callable[[], Any]:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return lambda: module.StatefulDataLoader(
        Numbers(noisy=not changes.get("num_workers")), batch_size=4, shuffle=True, **changes
    )


def plain() -> DataLoader[torch.Tensor]:
    return DataLoader(Numbers(noisy=True), batch_size=4, shuffle=True)


@pytest.mark.parametrize(("keep", "count"), [(at_steps, 2), (at_epochs, 2), (at_validation, 2)])
def test_a_stateful_loader_resumes_exactly_within_and_between_epochs(
    tmp_path: Path, keep: Any, count: int
) -> None:
    assert check_all(tmp_path, stateful(), keep) == count


def test_a_stateful_loader_with_workers_resumes_exactly(tmp_path: Path) -> None:
    assert check_all(tmp_path, stateful(num_workers=2), at_step_9) == 1


@pytest.mark.parametrize("keep", [at_epochs, pytest.param(at_validation, marks=pytest.mark.long)])
def test_a_plain_shuffling_loader_resumes_exactly_between_epochs(tmp_path: Path, keep: Any) -> None:
    assert check_all(tmp_path, plain, keep) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"max_steps": 18, "max_epochs": -1},
        {"limit_train_batches": 5},
        {"val_check_interval": 2},
        {"accumulate_grad_batches": 2, "max_epochs": 5},
    ],
    ids=str,
)
def test_other_ways_to_count_resume_exactly_too(tmp_path: Path, changes: dict[str, Any]) -> None:
    keep = at_validation if "val_check_interval" in changes else at_steps
    assert check_all(tmp_path, stateful(), keep, **changes) >= 2


def test_a_resume_after_the_last_batch_of_an_epoch_trains_the_next_one(tmp_path: Path) -> None:
    """Lightning alone skips it: the loader's state is at its end, and nobody renews it."""
    elsewhere = tmp_path / "2"
    _, whole = run(tmp_path, stateful()(), every_step(tmp_path))
    first = tmp_path / "ckpt" / "step=6.ckpt"
    model, drawn = run(elsewhere, stateful()(), every_step(elsewhere), resume=first)
    assert len(model.seen) == 12
    assert list(drawn.drawn) == list(whole.drawn)[6:]


def test_the_generators_are_what_they_were(tmp_path: Path) -> None:
    for _ in range(3):
        random.gauss(0, 1)
        np.random.standard_normal()
        state = randomness.capture(CPU)
        assert state.shape == (randomness.ROOM,)
        first = (random.gauss(0, 1), random.random(), np.random.standard_normal(), torch.rand(3))
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        randomness.restore(state, CPU)
        again = (random.gauss(0, 1), random.random(), np.random.standard_normal(), torch.rand(3))
        assert same(first, again)


def test_generators_that_are_not_known_are_passed_over() -> None:
    state = randomness.capture(CPU)
    python = int.from_bytes(state[1:5].numpy().tobytes(), "little") + 5
    strange = torch.cat([torch.tensor([99, 3, 0, 0, 0, 7, 7, 7], dtype=torch.uint8), state])
    expected = random.random()
    assert python > 2000
    randomness.restore(state, CPU)
    randomness.restore(strange[: randomness.ROOM], CPU)
    assert random.random() == expected
    randomness.restore(torch.zeros(randomness.ROOM, dtype=torch.uint8), CPU)


def test_a_checkpoint_holds_the_generators_and_loads_without_them(tmp_path: Path) -> None:
    run(tmp_path, plain(), at_epochs(tmp_path))
    path = tmp_path / "ckpt" / "step=6.ckpt"
    loaded = torch.load(path, weights_only=True)
    assert loaded[KEY]["ranks"].shape == (1, randomness.ROOM)
    del loaded[KEY]
    torch.save(loaded, tmp_path / "bare.ckpt")
    model, _ = run(
        tmp_path / "2", plain(), at_epochs(tmp_path / "2"), resume=tmp_path / "bare.ckpt"
    )
    assert len(model.seen) == 12


def test_weights_alone_are_saved_alone(tmp_path: Path) -> None:
    run(tmp_path, plain(), every_step(tmp_path, save_weights_only=True, every_n_train_steps=9))
    loaded = torch.load(tmp_path / "ckpt" / "step=9.ckpt")
    assert KEY not in loaded
    assert "optimizer_states" not in loaded
