"""A job under Lightning is told to go: it saves, leaves, and goes on at the very step."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

import portus
from portus_lightning import PortusIO
from tests.adapters.resuming import Draws
from tests.adapters.test_lightning_resume import plain, stateful
from tests.adapters.tiny import NO_FUSS, Net, every_step, files, loader, same, trainer

pytestmark = NO_FUSS


class Told(Callback):
    """Sends this process a signal in one hook, the ``at``th time it is called; and notes the steps
    before which validations began and ended."""

    def __init__(self, hook: str = "", at: int = 0, number: int = signal.SIGTERM) -> None:
        self.left = at
        self.validated: list[int] = []
        self.number = number
        setattr(self, hook, self.tell)

    def tell(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(self.number)

    def on_validation_epoch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append(trainer.global_step)


def run(root: Path, make: Callable[[], Any], told: Told, resume: str | None, **changes: Any) -> Any:
    """Train three epochs; what was trained and drawn, the validations, the weights at the end."""
    seed_everything(7 if resume else 1, verbose=False)
    model, draws = Net(), Draws()
    settings: dict[str, Any] = {"max_epochs": 3, "callbacks": [draws, told]} | changes
    fit = trainer(root, plugin=PortusIO(), **settings)
    with contextlib.suppress(SystemExit):  # as Lightning leaves
        fit.fit(model, make(), loader(shuffle=False), ckpt_path=resume)
    return model, draws, told


HOOKS = [
    pytest.param("on_train_batch_start", 3, id="in an epoch"),
    pytest.param("on_train_batch_start", 6, id="before a validation", marks=pytest.mark.long),
    pytest.param("on_validation_batch_start", 4, id="in a validation"),
    pytest.param("on_train_epoch_end", 1, id="at the end of an epoch", marks=pytest.mark.long),
    pytest.param("on_validation_start", 2, id="first in a validation", marks=pytest.mark.long),
    pytest.param("on_validation_batch_end", 8, id="last in a validation", marks=pytest.mark.long),
    pytest.param("on_validation_end", 2, id="after a validation", marks=pytest.mark.long),
    pytest.param("on_train_epoch_start", 2, id="between epochs", marks=pytest.mark.long),
]
"""The validation of the sanity check counts, with two batches."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run that nobody disturbs."""
    return run(tmp_path_factory.mktemp("whole"), stateful(), Told(), None)


@pytest.mark.parametrize(("hook", "at"), HOOKS)
def test_a_run_that_was_told_to_go_goes_on_at_the_very_step(
    tmp_path: Path, whole: Any, hook: str, at: int
) -> None:
    model, draws, undisturbed = whole
    first, drawn, told = run(tmp_path, stateful(), Told(hook, at), None)
    assert told.left == 0
    (last,) = (tmp_path / "checkpoints").glob("last*.ckpt")
    assert torch.load(last)["global_step"] == len(first.seen)
    second, more, again = run(tmp_path, stateful(), Told(), "last")
    assert [*first.seen, *second.seen] == model.seen, "no batch twice, and none is left out"
    assert drawn.drawn | more.drawn == draws.drawn
    validated = [*told.validated, *again.validated]
    assert list(dict.fromkeys(validated)) == undisturbed.validated, "what was cut off runs again"
    assert same(dict(second.state_dict()), dict(model.state_dict()))


def test_in_the_sanity_check_nothing_is_saved(tmp_path: Path) -> None:
    model, _, told = run(tmp_path, plain, Told("on_validation_batch_start", 1), None)
    assert told.left == 0
    assert model.seen == []
    assert not (tmp_path / "checkpoints").exists()


def test_it_is_saved_where_the_users_own_checkpoints_are(tmp_path: Path) -> None:
    """By a ``ModelCheckpoint`` that has a last one, under the name that it has then; gradients of
    a step that is not made yet are in no checkpoint, so all its batches are trained first."""
    keep = every_step(tmp_path, every_n_train_steps=2, save_last="link", save_weights_only=True)
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        told = Told("on_train_batch_start", 2, signal.SIGUSR1)
        callbacks = [told, Told("on_train_batch_end", 2), ModelCheckpoint(tmp_path / "other"), keep]
        run(tmp_path, plain, told, None, callbacks=callbacks, accumulate_grad_batches=3)
        assert heard == [signal.SIGTERM], "whoever had a handler is called"
        signal.raise_signal(signal.SIGTERM)
        assert len(heard) == 2
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGTERM, before[1])
    assert files(tmp_path) == ["last.ckpt", "step=1.ckpt"]
    assert (tmp_path / "ckpt" / "last.ckpt").is_symlink()
    saved = torch.load(tmp_path / "ckpt" / "last.ckpt")
    assert saved["global_step"] == 1
    assert saved["optimizer_states"], "all of it"
    assert not (tmp_path / "other").exists()


def test_without_a_time_these_signals_are_lightnings_alone(tmp_path: Path) -> None:
    plugin = PortusIO(preempt_within=None)
    told = Told("on_train_batch_start", 2)
    run(tmp_path, plain, told, None, plugins=[plugin])
    assert told.left == 0
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(portus.UsageError, match="preempt_within"):
        PortusIO(preempt_within=0)
