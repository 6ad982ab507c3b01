"""The preemption of a job under Lightning: it saves and leaves, by Lightning's own exit.

Lightning has a handler for SIGTERM, and looks for its note at three places: after a batch, in a
validation, after an epoch. There it raises ``SIGTERMException``. Portus uses all of that but one
part: in a job of several processes the handler calls a collective, wherever the main thread is just
then, and of the other ranks it hears only rank 0. So while a fit runs ``portus.Preemption`` gets
the signal, and once all ranks know, Lightning is told on all of them at the same batch.

The state that ``on_exception`` saves then is one from which stock Lightning resumes correctly:

after a batch           the state after every hook of that batch. If a validation is due, it does
                        not begin, and counts as one that was cut off.
in a validation         the same: Lightning runs such a validation again, from its first batch, with
                        the generators that it began with.
after an epoch's hooks  the state that ``ModelCheckpoint`` saves at the end of an epoch.
"""

from __future__ import annotations

import importlib
import logging
import signal
from collections.abc import Iterable
from types import FrameType
from typing import Any, Final

import torch

import portus
from portus_lightning.io import PortusIO

_log: Final = logging.getLogger("portus_lightning")

_VALIDATION: Final = "epoch_loop.val_loop.batch_progress"
_EPOCHS: Final = "epoch_progress"


class PreemptionExit:
    """The preemption of one fit. The companion calls this from its hooks."""

    def __init__(self, trainer: Any, preempt_within: float | str) -> None:
        self._trainer: Final = trainer
        self._connector: Final = trainer._signal_connector
        self._preemption: Final = portus.Preemption(preempt_within, signals=())
        self._generators: torch.Tensor | None = None
        """The generators at the start of the current validation, or of the next one."""
        self.is_saving = False

    @classmethod
    def of(cls, trainer: Any, preempt_within: float | str) -> PreemptionExit | None:
        """Return the handler of a fit's signals, from its setup until Lightning restores its own.
        None if Lightning has no such handler, or in a ``fast_dev_run``."""
        connector: Any = getattr(trainer, "_signal_connector", None)
        names = ("_sigterm_notifier_fn", "register_signal_handlers", "teardown")
        if trainer.fast_dev_run or not all(hasattr(connector, name) for name in names):
            return None
        leaving = cls(trainer, preempt_within)
        connector.register_signal_handlers = leaving._register
        # Lightning asks for these right after: when it sets its handlers and restores the old ones.
        connector._sigterm_notifier_fn = leaving._on_signal
        connector.teardown = leaving._give_back
        leaving._val_loop.run = leaving._validate
        return leaving

    @property
    def _val_loop(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.val_loop

    def train_starts(self) -> None:
        """Record the generators: training may begin with a validation that was cut off."""
        self._generators = self._generators_now()

    def batch_ended(self) -> None:
        """Have Lightning leave after this batch, if it is time; but not while gradients of a step
        are accumulated, which no checkpoint holds."""
        fit_loop = self._trainer.fit_loop
        if self._preemption.should_leave():
            self._connector.received_sigterm = not fit_loop.epoch_loop._should_accumulate()
        validates = fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher)
        # Lightning draws from them before its hook for the start of a validation.
        self._generators = self._generators_now() if validates else None

    def epoch_ended(self) -> None:
        """Have Lightning leave after the hooks of the epoch's end, if it is time."""
        if self._preemption.should_leave():
            self._connector.received_sigterm = True

    def validation_starts(self) -> None:
        """Raise Lightning's ``SIGTERMException`` if it is time to leave."""
        if self._preemption.leaving:
            self._exit()
        if self._generators is None:
            self._generators = self._generators_now()

    def validation_goes_on(self) -> None:
        """Exit after this batch of a validation if a rank received a signal. At the last batch all
        ranks meet, and save together."""
        if self._swaps():
            return
        loop = self._trainer._active_loop
        # Ranks may have different numbers of batches: one that left alone would save while others
        # compute the mean of their metrics, and both would hang (decision 0131).
        if loop.batch_progress.is_last_batch:
            leaves = self._preemption.validation_ends()
        else:
            leaves = self._preemption.should_leave_validation()
        if leaves:
            self._exit()

    def validation_ended(self) -> None:
        """Record the end of a validation: a signal from now on comes between two steps."""
        self._generators = None

    def _validate(self) -> Any:
        """Run a validation, in place of the loop's ``run``. Without batches on a rank, Lightning
        calls no hooks there: that rank meets the others here, as they meet at their last batch."""
        del self._val_loop.run
        try:
            if not self._val_loop.skip:
                return self._val_loop.run()
            self.validation_starts()
            found = self._val_loop.run()
            if not self._swaps() and self._preemption.validation_ends():
                self._exit()
            self.validation_ended()
            return found
        finally:
            self._val_loop.run = self._validate

    def takes(self, error: BaseException) -> bool:
        """Return True for the error that Lightning raises once all ranks leave."""
        return self._preemption.leaving and isinstance(error, _exception_of(self._trainer))

    def save(self, io: PortusIO) -> None:
        """Save the state to resume from, at the path where Lightning looks, and wait for it. Errors
        are logged: the newest committed checkpoint counts then."""
        trainer = self._trainer
        callback = _saver_among(trainer.checkpoint_callbacks)
        if trainer.sanity_checking or callback is None:
            why = "before the first step" if callback else "and there is no ModelCheckpoint"
            _log.warning("Portus: got the signal to leave, %s: nothing is saved", why)
            return
        self.is_saving = True
        try:
            _save_last(callback, trainer)
            io.wait()
        except portus.PortusError as error:
            _log.error(
                "Portus: got the signal to leave, and the save before leaving failed: %s", error
            )
        else:
            if trainer.is_global_zero:
                _log.info(
                    "Portus: step %d is saved, to resume from: %s",
                    trainer.global_step,
                    callback.last_model_path,
                )
        finally:
            self.is_saving = False

    def amend(self, checkpoint: dict[str, Any]) -> None:
        """Set the counts in a checkpoint that is saved when leaving to those that Lightning
        continues from."""
        loops = checkpoint.get("loops", {}).get("fit_loop", {})
        if self._trainer.validating and _VALIDATION in loops:
            loops[_VALIDATION] = _cut_off(loops[_VALIDATION])
        elif _EPOCHS in loops:
            loops[_EPOCHS] = _at_epoch_end(loops[_EPOCHS])

    def generators_of(self, now: torch.Tensor) -> torch.Tensor:
        """Return this rank's generators to continue with: ``now``, or in a validation those that it
        began with."""
        found = self._generators
        return found if found is not None and self._trainer.validating else now

    def _generators_now(self) -> torch.Tensor:
        return portus.capture_randomness(self._trainer.strategy.root_device)

    def _on_signal(self, number: int, frame: FrameType | None = None) -> None:
        """Note the signal, and pass the first one on to the processes that this rank started.
        Replaces what Lightning's handler calls."""
        launcher = self._trainer.strategy.launcher
        if self._preemption.told is None and launcher is not None:
            launcher.kill(number)
        self._preemption.note(number)

    def _register(self) -> None:
        """Restart the time at a signal as Lightning sets its handlers: an earlier one was not for
        it. Handle SIGUSR1 too, if no other code does."""
        del self._connector.register_signal_handlers
        self._preemption.start()
        self._connector.register_signal_handlers()
        self._preemption.expect(signal.SIGTERM)
        if signal.getsignal(signal.SIGUSR1) in (None, signal.SIG_DFL):
            self._preemption.hear(signal.SIGUSR1)

    def _give_back(self) -> None:
        self._connector.__dict__.pop("register_signal_handlers", None)
        del self._connector._sigterm_notifier_fn, self._connector.teardown
        vars(self._val_loop).pop("run", None)
        self._connector.teardown()
        self._preemption.close()

    def _exit(self) -> None:
        self._connector.received_sigterm = True
        raise _exception_of(self._trainer)

    def _swaps(self) -> bool:
        """Return True while a callback may have put other weights into the model."""
        kinds = (kind for each in self._trainer.callbacks for kind in type(each).__mro__)
        # By name: each copy of Lightning has its own class, and old ones have none.
        return any(kind.__name__ == "WeightAveraging" for kind in kinds)


def _exception_of(trainer: Any) -> type[BaseException]:
    """Return ``SIGTERMException`` of this Trainer's copy of Lightning."""
    copy = type(trainer.fit_loop).__module__.partition(".loops")[0]
    kind: type[BaseException] = importlib.import_module(
        f"{copy}.utilities.exceptions"
    ).SIGTERMException
    return kind


def _saver_among(callbacks: Iterable[Any]) -> Any:
    """Return the ``ModelCheckpoint`` in whose directory ``ckpt_path="last"`` looks: one that has a
    last checkpoint already, or else the first."""
    found = [each for each in callbacks if hasattr(each, "_save_last_checkpoint") and each.dirpath]
    return next((each for each in found if each.save_last), found[0] if found else None)


def _save_last(callback: Any, trainer: Any) -> None:
    """Have the callback save its last checkpoint, with all state, whatever its arguments. Save an
    ordinary one first if it saves on exceptions, or its last one is a link."""
    said = callback.save_last, callback.save_weights_only
    callback.save_last, callback.save_weights_only = said[0] or True, False
    try:
        found = callback._monitor_candidates(trainer)
        if callback.save_last == "link" or getattr(callback, "save_on_exception", False):
            callback._save_checkpoint(trainer, callback.format_checkpoint_name(found))
        callback._save_last_checkpoint(trainer, found)
    finally:
        callback.save_last, callback.save_weights_only = said


def _cut_off(progress: dict[str, Any]) -> dict[str, Any]:
    """Return a validation's progress with none of its batches done, and the first one begun."""
    done = progress["total"]["completed"] - progress["current"]["completed"]
    return {**progress, "is_last_batch": False, "total": _positions(done), "current": _positions(0)}


def _positions(done: int) -> dict[str, int]:
    return {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}


def _at_epoch_end(progress: dict[str, Any]) -> dict[str, Any]:
    """Return the progress of epochs as it stood in the hooks of the epoch's end, if Lightning has
    counted the one that just ended. Within an epoch, return it unchanged."""
    total = progress["total"]
    if total["completed"] != total["ready"]:
        return progress
    return {
        which: {**progress[which], "completed": progress[which]["completed"] - 1}
        for which in ("total", "current")
    }
