"""The preemption of a job under ``transformers.Trainer``: it saves and leaves as Trainer does.

Trainer ends a training after any step, if a callback asks, and saves there. With
``enable_jit_checkpoint`` it has a handler for SIGTERM, which sets a flag after some seconds, on
that process alone. It then saves before a step, with the random numbers of a batch that is not
trained yet. With that option Portus uses the handler, and sets its own flag instead.

An evaluation that is due at that step, or under way, is skipped; the resumed training begins with
it. A callback cannot end one, so an exception does, which ``trainer`` catches.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any, Final

import torch
from transformers.trainer_callback import ExportableState, TrainerCallback

import portus


class EvaluationSkipped(BaseException):
    """Raised to leave an evaluation: the step before it is saved."""


class PreemptionCallback(TrainerCallback, ExportableState):
    """A callback that asks after each step. ``is_due``: the saved step's evaluation was skipped."""

    def __init__(self, trainer: Any, preemption: portus.Preemption) -> None:
        self._trainer: Final = trainer
        self._preemption: Final = preemption
        self._generators: torch.Tensor | None = None
        self.is_due = False
        self._is_news = False
        self._saved: int | None = None
        """The saved step, after which to leave."""

    def state(self) -> dict[str, Any]:
        """Return the state for ``trainer_state.json``."""
        return {"args": {}, "attributes": {"is_due": self.is_due}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Restore the state of the checkpoint, if there is one."""
        mine = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.is_due = bool(mine.get("attributes", {}).get("is_due"))
        if not self.is_due:
            return
        trainer = self._trainer

        def load(checkpoint: Any) -> None:
            del trainer._load_rng_state
            trainer._load_rng_state(checkpoint)
            self._evaluate_if_due()

        # Evaluate once the random numbers are restored: an epoch's order is drawn right after.
        trainer._load_rng_state = load

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Run a skipped evaluation before the next step, at the latest."""
        self._evaluate_if_due()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        """Have Trainer save and leave, if it is time."""
        if self._preemption.should_leave():
            self._is_news = control.should_evaluate and not self.is_due
            self.is_due = self.is_due or control.should_evaluate
            control.should_evaluate = False
            control.should_save = control.should_training_stop = True
            self._saved = state.global_step
        self._generators = self._generators_now() if control.should_evaluate else None
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        """Leave at an epoch's end, too; save a step again only if its evaluation is due."""
        saved = self._saved == state.global_step
        control = self.on_step_end(args, state, control)
        if saved and not self._is_news:
            control.should_save = False
        return control

    def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Leave, if it is time, between two batches of an evaluation."""
        trainer = self._trainer
        if not trainer.is_in_train or not self._preemption.should_leave_validation():
            return
        self.is_due = True
        if self._generators is not None:  # the generators at its start
            portus.restore_randomness(self._generators, trainer.args.device)
        trainer._save_checkpoint(trainer.model, trial=None)
        raise EvaluationSkipped

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        """Have Trainer save and leave at the end of an evaluation, if it is time."""
        if self._trainer.is_in_train and self._preemption.validation_ends():
            control.should_save = control.should_training_stop = True
        return control

    def _evaluate_if_due(self) -> None:
        if self.is_due:
            self._generators = self._generators_now()
            self._trainer._evaluate(None, None)
            self.is_due = False

    def _generators_now(self) -> torch.Tensor:
        return portus.capture_randomness(self._trainer.args.device)


@contextlib.contextmanager
def hear_signals(trainer: Any, preempt_within: float | str) -> Iterator[None]:
    """Handle signals while ``trainer`` trains; not if ``preempt_within`` is "none"."""
    if preempt_within == "none":
        yield
        return
    manager = _manager_of(trainer)
    theirs = [] if manager is None else [signal.SIGTERM]
    own = [number for number in portus.Preemption.SIGNALS if number not in theirs]
    with portus.Preemption(preempt_within, signals=own) as preemption:
        if manager is not None:
            preemption.expect(signal.SIGTERM)
            manager._enable_checkpoint = lambda: preemption.note(signal.SIGTERM)
        callback = PreemptionCallback(trainer, preemption)
        trainer.callback_handler.callbacks.append(callback)  # the last callback decides
        try:
            yield
        finally:
            trainer.callback_handler.remove_callback(callback)
            if manager is not None:
                del manager._enable_checkpoint


def run_to_leaving(trainer: Any) -> Any:
    """End a training after an aborted evaluation; return the result of ``train``."""
    utils: Any = sys.modules["transformers.trainer_utils"]
    trainer.is_in_train = False
    trainer.control = trainer.callback_handler.on_train_end(
        trainer.args, trainer.state, trainer.control
    )
    done = max(1, trainer.state.global_step)
    return utils.TrainOutput(trainer.state.global_step, trainer._total_loss_scalar / done, {})


def _manager_of(trainer: Any) -> Any:
    """Return the owner of Trainer's handler for SIGTERM, if there is one."""
    managers = (getattr(each, "jit_manager", None) for each in trainer.callback_handler.callbacks)
    return next((each for each in managers if hasattr(each, "_enable_checkpoint")), None)
