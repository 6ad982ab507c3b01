"""A run that was cut and resumed ends with the same bits as one that was not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Sampler

import portus
from portus_lightning.companion import KEY
from tests.adapters.resuming import (
    at_epochs,
    at_step_5,
    at_step_6,
    at_step_9,
    at_steps,
    at_validation,
    check_all,
    run,
)
from tests.adapters.tiny import NO_FUSS, Net, Numbers, every_step, same

pytestmark = NO_FUSS
CPU = torch.device("cpu")


def stateful(**changes: Any) -> Callable[[], Any]:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return lambda: module.StatefulDataLoader(
        Numbers(noisy=not changes.get("num_workers")), batch_size=4, shuffle=True, **changes
    )


def plain(**changes: Any) -> DataLoader[torch.Tensor]:
    noisy = not changes.get("num_workers")
    return DataLoader(Numbers(noisy=noisy), **({"batch_size": 4, "shuffle": True} | changes))


@pytest.mark.parametrize(
    ("keep", "count"),
    [
        (at_steps, 2),
        pytest.param(at_epochs, 2, marks=pytest.mark.long),
        pytest.param(at_validation, 2, marks=pytest.mark.long),
    ],
)
def test_a_stateful_loader_resumes_exactly_within_and_between_epochs(
    tmp_path: Path, keep: Any, count: int
) -> None:
    assert check_all(tmp_path, stateful(), keep) == count


@pytest.mark.long
def test_a_stateful_loader_with_workers_resumes_exactly(tmp_path: Path) -> None:
    assert check_all(tmp_path, stateful(num_workers=2), at_step_9) == 1


@pytest.mark.long
@pytest.mark.parametrize("keep", [at_epochs, at_validation])
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


@pytest.mark.parametrize(
    ("loading", "keep", "changes"),
    [
        ({}, at_steps, {}),
        pytest.param(
            {"batch_size": 5, "drop_last": True, "num_workers": 2},
            at_step_9,
            {"max_epochs": 5},
            marks=pytest.mark.long,
        ),
        pytest.param({"num_workers": 2}, at_step_9, {}, marks=pytest.mark.long),
        pytest.param(
            {"batch_size": 5},
            at_steps,
            {"accumulate_grad_batches": 2, "max_epochs": 7},
            marks=pytest.mark.long,
        ),
    ],
    ids=["all", "uneven-workers", "workers", "accumulated"],
)
def test_a_plain_loader_resumes_exactly_within_an_epoch(
    tmp_path: Path, loading: dict[str, Any], keep: Any, changes: dict[str, Any]
) -> None:
    assert check_all(tmp_path, lambda: plain(**loading), keep, **changes) >= 1


@pytest.mark.parametrize(
    ("validated", "keep", "changes"),
    [
        (False, at_epochs, {}),
        pytest.param(False, at_epochs, {"limit_train_batches": 5}, marks=pytest.mark.long),
        pytest.param(False, at_step_6, {}, marks=pytest.mark.long),
        pytest.param(True, at_epochs, {"accumulate_grad_batches": 4}, marks=pytest.mark.long),
    ],
)
def test_training_that_max_steps_ends_resumes_exactly_between_epochs(
    tmp_path: Path, validated: bool, keep: Any, changes: dict[str, Any]
) -> None:
    settings = {"max_steps": 6 if "accumulate_grad_batches" in changes else 16, "max_epochs": -1}
    if not validated:
        settings["limit_val_batches"] = 0
    assert check_all(tmp_path, plain, keep, **settings, **changes) >= 2


class Augmented(Numbers):
    """Each row draws from every generator."""

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = (random.random(), float(np.random.rand()), torch.rand(1).item(), 0)
        return super().__getitem__(index) + torch.tensor(noise)


@pytest.mark.long
@pytest.mark.parametrize(
    "loading",
    [
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        {},
    ],
    ids=str,
)
def test_augmentations_that_are_seeded_by_sample_resume_exactly(
    tmp_path: Path, loading: dict[str, Any]
) -> None:
    def make() -> DataLoader[torch.Tensor]:
        data = portus.SeededDataset(Augmented(), 3)
        return DataLoader(data, batch_size=4, shuffle=True, **loading)

    assert check_all(tmp_path, make, at_step_9) == 1


class Joined(Net):
    """Takes what several loaders give together."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return super().training_step(torch.cat([each for each in batch if each is not None]), index)


class Unsized(Sampler[int]):
    """Does not say how many samples it has."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(24).tolist())


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "of_second", "count"),
    [
        ("max_size", {}, 3),
        ("max_size_cycle", {}, 3),
        ("min_size", {}, 1),
        ("min_size", {"shuffle": False, "sampler": Unsized()}, 1),
    ],
)
def test_several_loaders_resume_exactly_within_an_epoch(
    tmp_path: Path, mode: Any, of_second: dict[str, Any], count: int
) -> None:
    """The second one ends after three batches, and begins again then, or ends them all, or not."""

    def make() -> CombinedLoader:
        return CombinedLoader([plain(), plain(batch_size=8, **of_second)], mode)

    assert check_all(tmp_path, make, at_step_5, net=Joined) == count


@pytest.mark.long
def test_rounds_that_nobody_can_count_are_left_to_stock_and_saves_go_on(tmp_path: Path) -> None:
    loaders = CombinedLoader([plain(), plain(shuffle=False, sampler=Unsized())], "max_size_cycle")
    run(tmp_path, loaders, at_step_5(tmp_path), net=Joined)
    saved = torch.load(tmp_path / "ckpt" / "step=5.ckpt")
    assert [each["loaders"] for each in saved[KEY]["ranks"]] == [[None, None]]


class Failing(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise RuntimeError("the second batch is bad")


def test_training_that_fails_leaves_the_loader_as_it_was(tmp_path: Path) -> None:
    data = plain()
    stock = data.batch_sampler
    with pytest.raises(RuntimeError, match="batch is bad"):
        run(tmp_path, data, every_step(tmp_path), callbacks=[Failing()])
    assert data.batch_sampler is stock


@pytest.mark.long
@pytest.mark.smoke
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
        state = portus.capture_randomness(CPU)
        first = (random.gauss(0, 1), random.random(), np.random.standard_normal(), torch.rand(3))
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        portus.restore_randomness(state, CPU)
        again = (random.gauss(0, 1), random.random(), np.random.standard_normal(), torch.rand(3))
        assert same(first, again)


def test_generators_that_are_not_known_are_passed_over() -> None:
    state = portus.capture_randomness(CPU)
    states = msgspec.msgpack.decode(state.numpy().tobytes())
    strange = msgspec.msgpack.encode({"strange": b"777", **states})
    expected = random.random()
    portus.restore_randomness(torch.frombuffer(bytearray(strange), dtype=torch.uint8), CPU)
    assert random.random() == expected


@pytest.mark.long
def test_a_checkpoint_holds_the_generators_and_loads_without_them(tmp_path: Path) -> None:
    run(tmp_path, plain(), at_epochs(tmp_path))
    path = tmp_path / "ckpt" / "step=6.ckpt"
    loaded = torch.load(path, weights_only=True)
    [own] = loaded[KEY]["ranks"]
    assert own["random"].dtype is torch.uint8
    del loaded[KEY]
    torch.save(loaded, tmp_path / "bare.ckpt")
    model, _ = run(
        tmp_path / "2", plain(), at_epochs(tmp_path / "2"), resume=tmp_path / "bare.ckpt"
    )
    assert len(model.seen) == 12


@pytest.mark.long
def test_the_generators_of_a_newer_portus_are_told_and_left_where_portus_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, plain(), at_epochs(tmp_path))
    loaded = torch.load(tmp_path / "ckpt" / "step=6.ckpt")
    loaded[KEY]["format"] = 3
    torch.save(loaded, tmp_path / "newer.ckpt")
    with pytest.raises(portus.UsageError, match=r"have format 3, and this Portus knows 2.*Upgrade"):
        run(tmp_path / "2", plain(), at_epochs(tmp_path / "2"), resume=tmp_path / "newer.ckpt")
    monkeypatch.setenv("PORTUS_DISABLE", "1")
    model, _ = run(
        tmp_path / "3", plain(), at_epochs(tmp_path / "3"), resume=tmp_path / "newer.ckpt"
    )
    assert len(model.seen) == 12


@pytest.mark.long
def test_weights_alone_are_saved_alone(tmp_path: Path) -> None:
    run(tmp_path, plain(), every_step(tmp_path, save_weights_only=True, every_n_train_steps=9))
    loaded = torch.load(tmp_path / "ckpt" / "step=9.ckpt")
    assert KEY not in loaded
    assert "optimizer_states" not in loaded
