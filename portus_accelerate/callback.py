"""The callbacks of ``transformers.Trainer``: saves at the steps of a cadence, and preemption.

The flag adds ``PortusCallback`` if the settings have ``every``. It cannot move a script's own calls
of ``save_state``; such a script asks ``should_save``.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Final

import torch
from transformers.trainer_callback import ExportableState, TrainerCallback

import portus
from portus_accelerate.settings import ACCELERATE

_is_seen: Final[ContextVar[bool | None]] = ContextVar("portus_is_seen", default=None)
"""Whether Portus sees the saves of the ``Trainer`` at work; None: the flag is off."""


@contextlib.contextmanager
def training(*, seen: bool) -> Iterator[None]:
    """Mark the training of a ``Trainer``. seen: whether its saves go through Portus."""
    token = _is_seen.set(seen)
    try:
        yield
    finally:
        _is_seen.reset(token)


class PortusCallback(TrainerCallback, ExportableState):
    """Makes ``transformers.Trainer`` save as often as ``max_overhead`` allows, instead of by
    ``save_steps``.

    Args:
        every: "auto" saves as often as ``max_overhead`` allows. "30s", "5min" or "1h" is a time.
            A number is that many steps.
        max_overhead: How much all saves together may add to the time of a training without saves,
            as a fraction.
        mtbf: Mean time between failures of the whole job: seconds, or a text like "4h".

    Trainer decides what is saved, where, and which checkpoints are kept. The measurements are in
    ``trainer_state.json``, and a resumed training continues with them. The saves of ``save_steps``
    are skipped, with two exceptions: the last one of a training, and all of them if
    ``load_best_model_at_end`` is set, which needs them. The saves of other strategies stay. List
    this callback before your own callbacks that request saves.

    Raises ``portus.UsageError`` for a value that is not allowed. It raises the same when training
    begins if ``every`` is "auto" and the flag is off, because it measures saves that Portus makes.
    """

    def __init__(
        self,
        every: str | int = "auto",
        max_overhead: float = portus.Cadence.MAX_OVERHEAD,
        mtbf: float | str | None = None,
    ) -> None:
        portus.parse_cadence(every, max_overhead, mtbf)
        said = {"every": every, "max_overhead": max_overhead, "mtbf": mtbf}
        self._said: Final[dict[str, Any]] = said
        self.cadence: portus.Cadence | None = None
        """The cadence of the training that runs; None if none runs."""

    def state(self) -> dict[str, Any]:
        """Return the state for ``trainer_state.json``; Trainer restores its ``attributes``."""
        saved = None if self.cadence is None else self.cadence.state_dict()
        return {"args": self._said, "attributes": {"saved": saved}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Start counting, and continue from a checkpoint's measurements."""
        seen = _is_seen.get()
        if seen is None and self._said["every"] == "auto" and not portus.is_disabled():
            raise portus.UsageError(
                "PortusCallback(every='auto') uses what saves of Portus cost, and this "
                "Trainer saves without Portus: set PORTUS_ACCELERATE=1, or every='5min'"
            )
        self.cadence = portus.Cadence.create(ACCELERATE, **self._said, is_seen=bool(seen))
        # From a checkpoint without this callback Trainer could not save the callback's state.
        mine = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        saved = mine.get("attributes", {}).get("saved")
        if saved is not None:
            self.cadence.load_state_dict(saved)

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Exclude the time of an evaluation from the cost of saves."""
        if self.cadence is not None:
            self.cadence.ignore_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        """Ask for a save if this step is due, and skip those of ``save_steps``."""
        assert self.cadence is not None
        is_due = self.cadence.should_save()
        if is_due:
            control.should_save = True
            return control
        is_of_save_steps = (
            args.save_strategy == "steps"
            and not args.load_best_model_at_end
            and state.save_steps > 0
            and state.global_step % state.save_steps == 0
        )
        # Not by ``state.save_steps``: that is saved, and a run without Portus would use it.
        if is_of_save_steps and state.global_step < state.max_steps:
            control.should_save = False
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Stop counting."""
        self.cadence = None


class EvaluationSkipped(BaseException):
    """Raised to leave an evaluation: the step before it is saved."""


class PreemptionCallback(TrainerCallback, ExportableState):
    """Makes a job under ``Trainer`` that is preempted save and leave as Trainer does.

    Trainer ends a training after any step, if a callback asks, and saves there. With
    ``enable_jit_checkpoint`` it has a handler for SIGTERM, which sets a flag after some seconds, on
    that process alone. It then saves before a step, with the random numbers of a batch that is not
    trained yet. With that option Portus uses the handler, and sets its own flag instead.

    An evaluation that is due at that step, or under way, is skipped (``is_due``); the resumed
    training begins with it. A callback cannot end one, so an exception does, which ``trainer``
    catches.
    """

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
