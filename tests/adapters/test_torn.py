"""V7 end to end: a slowed copier, everybody who may write, and no version torn.

Each case runs three times: as it is (nothing torn, nothing given up); with every guard and the
audit broken (it must be torn, or the case shows nothing); with the guards broken and the audit
at work (nothing that is committed is torn, and something was given up).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from portus.engine.fence import snapshot
from portus.engine.fence.fence import Fence
from portus_lightning import PortusIO
from tests.adapters.torn import Sabotage, SlowSaves, contents, slow_down, slow_saves
from tests.unit.fence.late_copy import Scenario
from tests.unit.fence.scenarios import (
    OPTIMIZERS,
    OTHERS,
    implementations,
    with_optimizer,
)

Run = Callable[[SlowSaves], None]
WAIT_S_MAX = 30.0


def check(run: Run, folder: Path) -> None:
    """The three runs of a case. See the module."""
    with slow_saves(folder / "guarded") as saves:
        run(saves)
        assert len(saves.saves) >= 3
        assert saves.torn() == set()
        assert saves.voided() == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fence, "guard", Sabotage.never_wait)
        patch.setattr(snapshot, "classify", Sabotage.all_stable)
        with slow_saves(folder / "broken", unguarded=True, audited=False) as saves:
            run(saves)
            assert saves.torn(), "the case could not have failed"
        with slow_saves(folder / "audited", unguarded=True) as saves:
            run(saves)
            assert saves.torn() == set()
            assert saves.voided() > 0


# Plain loops.


def plain(scenario: Scenario, saves: SlowSaves) -> None:
    for state in scenario():
        saves.save(state)


@pytest.mark.long(every_case=True)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`TorchScript`:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_no_writer_tears_a_version(name: str, tmp_path: Path) -> None:
    check(functools.partial(plain, OTHERS[name]), tmp_path)


TELLING = ("adafactor", "adam", "lbfgs", "sgd", "sparse-adam")
"""Those that write in ways of their own. The others are there in `make long`."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each in TELLING else pytest.mark.long) for each in OPTIMIZERS],
)
def test_no_optimizer_tears_a_version(name: str, tmp_path: Path) -> None:
    """Each implementation, and without a closure: tests/unit/fence/test_writers.py."""
    scenario = functools.partial(with_optimizer, name, implementations(name)[-1], True)
    check(functools.partial(plain, scenario), tmp_path)


# Lightning.


class Net(LightningModule):
    """Batch norm, dropout, an optimizer of torch. Counts what runs while a save still reads it."""

    def __init__(self, saves: SlowSaves, make: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 3)
        )
        self.saves = saves
        self.forwards = self.backwards = 0
        self._make = make

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
        loss = self.loss(batch)
        self.forwards += self.saves.reading()
        return loss

    def on_after_backward(self) -> None:
        self.backwards += self.saves.reading()

    def validation_step(self, batch: list[Tensor], index: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return self._make(self.net.parameters())


class Gan(Net):
    """Two optimizers, stepped by hand, one of them with a closure."""

    def __init__(self, saves: SlowSaves) -> None:
        super().__init__(saves, torch.optim.AdamW)
        self.other = nn.Linear(6, 3)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizers: Any = self.optimizers()
        first, second = optimizers
        first.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()

        def closure() -> None:
            second.zero_grad()
            self.manual_backward(self.other(batch[0]).square().mean())

        second.step(closure=closure)

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.AdamW(self.net.parameters()),
            torch.optim.SGD(self.other.parameters(), lr=0.1, momentum=0.9),
        )


class ByHand(Net):
    """Keeps its weights from before each step, as ModelCheckpoint asks for."""

    def __init__(self, saves: SlowSaves) -> None:
        super().__init__(saves, torch.optim.AdamW)
        self.automatic_optimization = False
        self.layer = self.net
        self.saved_models: dict[int, dict[str, Tensor]] = {}

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        weights = {name: value.detach().clone() for name, value in self.net.state_dict().items()}
        self.saved_models = {index: weights}
        optimizer.step()


class SaveEveryBatch(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint("a path that nobody opens")


class Through(CheckpointIO):
    """Lightning's checkpoints, as they come, to ``SlowSaves``."""

    def __init__(self, saves: SlowSaves) -> None:
        self._saves = saves

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        self._saves.save(checkpoint)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: Any = None
    ) -> dict[str, Any]:
        raise AssertionError(f"these trainings only save; something loads {path}")

    def remove_checkpoint(self, path: Any) -> None: ...


def batches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(32, 6)), batch_size=8)


def quiet_trainer(folder: Path, io: CheckpointIO, **settings: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return Trainer(plugins=[io], **{**quiet, **settings})


def fit(module: Net, folder: Path, *callbacks: Callback, **settings: Any) -> None:
    io = Through(module.saves)
    trainer = quiet_trainer(folder, io, callbacks=[*callbacks] or [SaveEveryBatch()], **settings)
    trainer.fit(module, batches(), batches())


def trained(folder: Path, make: Callable[..., torch.optim.Optimizer], **settings: Any) -> Run:
    return lambda saves: fit(Net(saves, make), folder, **settings)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, max_iter=3, history_size=2)


@pytest.mark.long
@pytest.mark.parametrize(
    "precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    "make",
    [torch.optim.AdamW, OPTIMIZERS["sgd-momentum"], pytest.param(lbfgs, marks=pytest.mark.long)],
)
def test_no_batch_of_lightning_tears_a_version(
    make: Callable[..., torch.optim.Optimizer], precision: str, tmp_path: Path
) -> None:
    check(trained(tmp_path, make, precision=precision), tmp_path)


@pytest.mark.long
def test_accumulated_batches_tear_nothing(tmp_path: Path) -> None:
    check(trained(tmp_path, torch.optim.AdamW, accumulate_grad_batches=2), tmp_path)


@pytest.mark.long
def test_two_optimizers_stepped_by_hand_tear_nothing(tmp_path: Path) -> None:
    check(lambda saves: fit(Gan(saves), tmp_path), tmp_path)


@pytest.mark.long
def test_averaged_weights_swapped_for_validation_tear_nothing(tmp_path: Path) -> None:
    def run(saves: SlowSaves) -> None:
        fit(Net(saves, torch.optim.AdamW), tmp_path, WeightAveraging(), SaveEveryBatch())

    check(run, tmp_path)


@pytest.mark.long
def test_stochastic_weight_averaging_tears_nothing(tmp_path: Path) -> None:
    def run(saves: SlowSaves) -> None:
        averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
        fit(Net(saves, torch.optim.AdamW), tmp_path, averaging, SaveEveryBatch(), max_epochs=3)

    check(run, tmp_path)


@pytest.mark.long
def test_weights_put_back_after_a_save_tear_nothing(tmp_path: Path) -> None:
    """Lightning's ModelCheckpoint under manual optimization loads other weights, saves, and loads
    the ones from before, at once."""

    def run(saves: SlowSaves) -> None:
        checkpoints = ModelCheckpoint(tmp_path / "names", save_top_k=-1, every_n_train_steps=1)
        fit(ByHand(saves), tmp_path, checkpoints, enable_checkpointing=True)

    check(run, tmp_path)


@pytest.mark.long
def test_fabric_tears_nothing(tmp_path: Path) -> None:
    def run(saves: SlowSaves) -> None:
        fabric = Fabric(accelerator="cpu", plugins=[Through(saves)])
        net = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Linear(64, 3))
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
        for _ in range(6):
            optimizer.zero_grad()
            fabric.backward(model(torch.randn(8, 6)).square().mean())
            optimizer.step()
            fabric.save("nowhere", {"model": model, "optimizer": optimizer})

    check(run, tmp_path)


class Recording(PortusIO):
    """The plugin itself, slowed, with what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: dict[str, dict[str, bytes]] = {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        slow_down(self.run.files._open()[0])
        self.wanted[path] = contents(checkpoint)
        super().save_checkpoint(checkpoint, path, storage_options)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_no_checkpoint_of_the_plugin_is_torn(precision: str, tmp_path: Path) -> None:
    io = Recording()
    trainer = quiet_trainer(
        tmp_path,
        io,
        precision=precision,
        enable_checkpointing=True,
        callbacks=[
            ModelCheckpoint(tmp_path / "saved", save_top_k=-1, every_n_train_steps=1),
            WeightAveraging(),
        ],
    )
    with slow_saves(tmp_path / "unused") as unused:
        module = Net(unused, torch.optim.AdamW)
        trainer.fit(module, batches(), batches())
    assert len(io.wanted) == 8
    for path, wanted in io.wanted.items():
        assert contents(io.load_checkpoint(path)) == wanted


# The overlap that all of this is for.


class Gate:
    """A copier that copies nothing before so many backwards have ended since the last save."""

    def __init__(self, backwards: int) -> None:
        self._ended = threading.Semaphore(0)
        self._backwards = backwards

    def pause(self) -> None:
        for _ in range(self._backwards):
            assert self._ended.acquire(timeout=WAIT_S_MAX), "forward and backward wait for the copy"

    def backward_ended(self) -> None:
        self._ended.release()


class Gated(Net):
    def __init__(self, saves: SlowSaves, gate: Gate) -> None:
        super().__init__(saves, torch.optim.AdamW)
        self.gate = gate

    def on_after_backward(self) -> None:
        super().on_after_backward()
        if self.saves.saves:
            self.gate.backward_ended()

    def on_train_end(self) -> None:
        self.gate.backward_ended()  # nothing comes after the last save


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_forward_and_backward_run_while_the_copy_is_in_flight(
    precision: str, tmp_path: Path
) -> None:
    gate = Gate(1)
    with slow_saves(tmp_path / "pool", pause=gate.pause) as saves:
        module = Gated(saves, gate)
        fit(module, tmp_path, precision=precision)
        saves.finish()
        assert len(saves.saves) == 8
        assert module.forwards == module.backwards == 7
        assert saves.torn() == set()
        assert saves.voided() == 0
