"""The position in the training data of a ``transformers.Trainer``, saved with its random states.

Trainer counts in steps: it divides the newest step by the present steps of an epoch, and skips the
rest by ``skip_first_batches``. That is right while the number of processes, and with it the length
of an epoch, stays the same. If not, this module tells Trainer the epoch, the number of delivered
batches, and the lengths of this epoch and of the training. An epoch that continues with other
processes has its delivered and its remaining batches.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import portus
from portus_accelerate import data
from portus_accelerate.saver import saver_of
from portus_accelerate.settings import ACCELERATE

KEY: Final = "portus_data"
"""The key in a file of random states: {"format": 1, "epoch": the number of done ones, "processes":
the number that saved, "plain": see ``data``}."""

_FORMAT: Final = 1
_OWN: Final = "_portus_training_data"


@dataclass
class _Training:
    """The training loader of one ``train``."""

    plain: data.PlainLoader
    epoch: int = 0
    """The epoch that runs, or is to be continued; those before it are done."""
    delivered: int = 0
    """The batches of the epoch that were trained before."""
    goes_on: bool = False
    """Whether a checkpoint gave a place that differs from Trainer's own count."""
    step: int = 0
    """The global step at the start of the epoch, in this run."""
    batches: int = 0
    """The number of its batches."""


def add_to(states: dict[str, Any], trainer: Any) -> None:
    """Add the position in the data to the random states that this process saves."""
    training = _of(trainer)
    if training is None:
        return
    per_step = trainer.args.gradient_accumulation_steps
    done = training.delivered + (trainer.state.global_step - training.step) * per_step
    done = min(done, training.batches)
    is_over = done == training.batches
    states[KEY] = {
        "format": _FORMAT,
        "processes": trainer.args.world_size,
        "epoch": training.epoch + is_over,
        "plain": training.plain.state_dict(done),
    }


def _loop(
    stock: Callable[..., Any],
    self: Any,
    batch_size: Any = None,
    args: Any = None,
    resume_from_checkpoint: Any = None,
    *more: Any,
    **named: Any,
) -> Any:
    """Remember the checkpoint that is resumed from, until its position is known."""
    vars(self)[_OWN] = resume_from_checkpoint
    try:
        return stock(self, batch_size, args, resume_from_checkpoint, *more, **named)
    finally:
        vars(self).pop(_OWN, None)


def _values(stock: Callable[..., Any], self: Any, args: Any, dataloader: Any) -> Any:
    """Return the numbers of epochs, steps and batches, as the stock method does."""
    found = stock(self, args, dataloader)
    is_ours = _OWN in vars(self) and saver_of(self.accelerator) is not None
    plain = data.of(dataloader) if is_ours else None
    epochs, _, *more, batches, all_steps = found
    if plain is None or plain.whole != batches:
        return found
    training, checkpoint = _Training(plain, batches=batches), vars(self)[_OWN]
    vars(self)[_OWN] = training
    saved = None if args.ignore_data_skip else _read_saved(checkpoint, args, plain.is_dispatched)
    step, per_step = _step_of(checkpoint), args.gradient_accumulation_steps
    steps = _steps(batches, per_step)
    counted = (step // steps, step % steps * per_step, batches, batches)
    if saved is None or not _go_on(training, saved, self):
        return found
    if (training.epoch, training.delivered, len(dataloader), plain.whole) == counted:
        return found  # Trainer finds the same place itself
    training.goes_on = True
    steps = _steps(plain.whole, per_step)
    done = training.epoch
    if training.delivered:
        training.batches = len(dataloader)
        step += _steps(training.batches, per_step) - training.delivered // per_step
        done += 1
    if args.max_steps > 0:
        epochs = done + max(0, math.ceil((all_steps - step) / steps))
    else:
        all_steps = step + math.ceil(max(0, args.num_train_epochs - done) * steps)
    return (epochs, steps, *more, plain.whole, all_steps)


def _initial_state(stock: Callable[..., Any], self: Any, *given: Any, **named: Any) -> Any:
    """Return the epoch and the batch at which the training begins."""
    found = stock(self, *given, **named)
    training = _of(self)
    if training is None or not training.goes_on:
        return found
    return training.epoch, training.delivered


def _epoch(stock: Callable[..., Any], self: Any, *given: Any, **named: Any) -> Any:
    """Run one epoch."""
    training = _of(self)
    if training is None or given:
        return stock(self, *given, **named)
    per_step = self.args.gradient_accumulation_steps
    begins_within = named["epoch"] == named["epochs_trained"] and not self.args.ignore_data_skip
    training.step = self.state.global_step
    if begins_within and training.goes_on and training.delivered:
        named["steps_in_epoch"] = training.batches
        named["num_update_steps_per_epoch"] = _steps(training.batches, per_step)
    training.epoch, training.batches = named["epoch"], named["steps_in_epoch"]
    training.delivered = named["steps_trained_in_current_epoch"] if begins_within else 0
    return stock(self, **named)


METHODS: Final[dict[str, Callable[..., Any]]] = {
    "_inner_training_loop": _loop,
    "set_initial_training_values": _values,
    "_init_training_state": _initial_state,
    "_run_epoch": _epoch,
}
"""The replacements for methods of ``Trainer``. A class without one of them counts itself."""


def _of(trainer: Any) -> _Training | None:
    found = vars(trainer).get(_OWN)
    return found if isinstance(found, _Training) else None


def _go_on(training: _Training, saved: Mapping[str, Any], trainer: Any) -> bool:
    """Let the loader continue; return False if it cannot."""
    told = training.plain.load_state_dict(saved["plain"])
    if told:
        if trainer.is_world_process_zero():
            data.tell(told)
        return False
    position = saved["plain"]["cursor"]["position"]
    training.epoch = saved["epoch"]
    training.delivered = 0 if position["is_over"] else position["batches"]
    return True


def _read_saved(checkpoint: Any, args: Any, is_of_main: bool) -> dict[str, Any] | None:
    """Return the state that this process saved, or the main one if there were others or
    ``is_of_main``; None without one. Raise ``UsageError`` for a newer Portus's."""
    if checkpoint is None:
        return None
    of_main = _states(checkpoint, "rng_state_0.pth") or _states(checkpoint, "rng_state.pth")
    found = of_main
    if found is not None and found["processes"] == args.world_size > 1 and not is_of_main:
        found = _states(checkpoint, f"rng_state_{args.process_index}.pth") or found
    if found is not None:
        ACCELERATE.require_format("positions in data", found["format"], _FORMAT)
    return found


def processes_of(checkpoint: str) -> int | None:
    """Return the number of processes that saved the checkpoint; None if unknown. Raises nothing: a
    load reports errors."""
    try:
        found = _states(checkpoint, "rng_state_0.pth") or _states(checkpoint, "rng_state.pth")
        return None if found is None else int(found["processes"])
    except (portus.PortusError, OSError, ValueError, LookupError, RuntimeError):
        return None


def _states(checkpoint: Any, name: str) -> dict[str, Any] | None:
    path = os.path.join(checkpoint, name)
    if not os.path.isfile(path):
        return None
    module: Any = sys.modules["transformers.trainer"]
    with module.safe_globals():
        found: Any = module.torch.load(path, weights_only=True)
    own = found.get(KEY)
    return own if isinstance(own, dict) else None


def _step_of(checkpoint: Any) -> int:
    module: Any = sys.modules["transformers.trainer"]
    path = os.path.join(checkpoint or "", module.TRAINER_STATE_NAME)
    return int(module.TrainerState.load_from_json(path).global_step) if checkpoint else 0


def _steps(batches: int, per_step: int) -> int:
    return max(1, -(-batches // per_step))
