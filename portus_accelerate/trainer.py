"""``transformers.Trainer``, which writes its checkpoints itself, without ``save_state``.

With the flag on, Portus writes weights, optimizer, scheduler, scaler, generators and arguments in
the background, as the files that Trainer writes; they appear together. The small files that Trainer
writes (configurations, tokenizer, ``trainer_state.json``) exist before, and are durable when the
others appear. Readers of a checkpoint wait for it: callbacks with a hook for saves,
``load_best_model_at_end``, pushes to a hub. Old checkpoints go after the commit.

A checkpoint that was cut off has only small files, and is skipped.

With a pool, on a device or a storage host, optimizer, scheduler, scaler and generators are pointers
to it; weights stay files, since not only torch reads them.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import sys
from collections.abc import Callable
from typing import Any, Final

import safetensors.torch
from accelerate.utils import gather_object

import portus
from portus_accelerate import capture, trainer_data
from portus_accelerate.directories import (
    NAME,
    complete_in,
    is_complete,
    last,
    numbered_directories,
    why_incomplete,
)
from portus_accelerate.saver import Saver, saver_of

_log: Final = logging.getLogger("portus_accelerate")

OLDEST: Final = 5
_WHOLE: Final = ("checkpoint", "all_checkpoints")
"""Strategies of a hub for which whole checkpoints are uploaded."""

_RANDOM: Final = "rng_state"
"""The prefix of the files of random states, one for each process."""

_STORED: Final = re.compile(rf"(optimizer|scheduler|scaler)\.pt|{_RANDOM}.*")
"""The files of a checkpoint that go through the pool."""

_NONE: Final = re.compile("")

_LOADS: Final = (
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
    "_load_best_model",
)


def install() -> None:
    """Change the loaded ``transformers.trainer``, if its version is supported."""
    module: Any = sys.modules["transformers.trainer"]
    version = getattr(sys.modules["transformers"], "__version__", "?")
    names = ("_save_checkpoint", "train", "log")
    known = hasattr(module, "rotate_checkpoints") and all(hasattr(module.Trainer, n) for n in names)
    if not version.split(".")[0].isdigit() or int(version.split(".")[0]) < OLDEST or not known:
        _log.warning(
            "Portus: transformers %s is not supported by this version of Portus: its Trainer "
            "saves without Portus; install one of the versions that Portus supports",
            version,
        )
        return
    if isinstance(module.torch, capture.Torch):
        return
    looking: Any = sys.modules["transformers.trainer_utils"]
    models: Any = sys.modules["transformers.modeling_utils"]
    functions: dict[str, Callable[..., Any]] = {
        "_save_checkpoint": _save_checkpoint,
        "train": _train,
        "log": _log_values,
        "_push_from_checkpoint": _push,
    }
    functions |= dict.fromkeys(_LOADS, _load_verified)
    if all(hasattr(module.Trainer, name) for name in trainer_data.METHODS):
        functions |= trainer_data.METHODS
    changes = [
        (module, "torch", capture.Torch(module.torch)),
        # Rotation removes old checkpoints by it, right after a save that isn't durable yet.
        (looking, "shutil", capture.Shutil(looking.shutil)),
        # That module imported the name, so a change in trainer_utils may not reach it.
        portus.around(module, "get_last_checkpoint", last),
        portus.around(models, "safe_save_file", capture.safe_save_file),
        # Trainer saves a plain module by this one, and those of transformers by `safe_save_file`.
        portus.around(safetensors.torch, "save_file", capture.safe_save_file),
        *(
            portus.around(module.Trainer, name, function)
            for name, function in functions.items()
            if hasattr(module.Trainer, name)
        ),
    ]
    for owner, name, value in changes:
        setattr(owner, name, value)


def _save_checkpoint(stock: Callable[..., None], self: Any, model: Any, trial: Any) -> None:
    saver = saver_of(self.accelerator)
    if saver is None:
        stock(self, model, trial)
        return
    folder = f"checkpoint-{self.state.global_step}"
    directory = os.path.join(self._get_output_dir(trial=trial), folder)
    peft: Any = sys.modules.get("peft.peft_model")  # it saves adapters, and may be loaded late
    if peft is not None and not hasattr(peft.safe_save_file, "__wrapped__"):
        setattr(*portus.around(peft, "safe_save_file", capture.safe_save_file))

    def add(current: capture.Capture) -> None:
        for name, part in current.parts.items():
            if name.startswith(_RANDOM):
                trainer_data.add_to(part, self)

    # Whole checkpoints are uploaded during the next steps: they have to be real files.
    is_uploaded = self.args.push_to_hub and self.args.hub_strategy in _WHOLE
    with saver.saving_whole(directory, add, _NONE if is_uploaded else _STORED):
        stock(self, model, trial)
    stock_on_save = sys.modules["transformers.trainer_callback"].TrainerCallback.on_save
    # Such a callback may look at the saved files right after the save.
    if any(type(each).on_save is not stock_on_save for each in self.callback_handler.callbacks):
        saver.wait()


def _push(stock: Callable[..., Any], self: Any, *given: Any, **named: Any) -> Any:
    current = capture.current()
    if current is not None:
        current.flush()
    return stock(self, *given, **named)


def _load_verified(stock: Callable[..., Any], self: Any, *given: Any, **named: Any) -> Any:
    """Wait for the saves in flight, and load: every byte that has a digest is verified."""
    saver = saver_of(self.accelerator)
    if saver is None:
        return stock(self, *given, **named)
    saver.wait()
    with capture.verifying():
        return stock(self, *given, **named)


def _train(
    stock: Callable[..., Any],
    self: Any,
    resume_from_checkpoint: Any = None,
    *more: Any,
    **named: Any,
) -> Any:
    from portus_accelerate import callback  # it needs transformers

    saver = saver_of(self.accelerator)
    if saver is None:
        with callback.training(seen=False):
            return stock(self, resume_from_checkpoint, *more, **named)
    output = self.args.output_dir
    if self.args.push_to_hub:
        saver.keep_out_of(output)  # all its files are uploaded
    if resume_from_checkpoint:
        # Any name will do: only the directory above counts.
        saver.loader.fetch(os.path.join(os.path.abspath(output), "checkpoint-0"))
    saver.begin(output)
    chosen = _choose(self, saver, resume_from_checkpoint)
    is_path = isinstance(chosen, str | os.PathLike)
    is_own = is_path and os.path.dirname(os.path.abspath(chosen)) == os.path.abspath(output)
    _follow_the_cadence(self, saver)
    with callback.training(seen=True), callback.hear_signals(self, saver.settings.preempt_within):
        try:
            result = stock(self, chosen, *more, **named)
        except callback.EvaluationSkipped:
            result = callback.run_to_leaving(self)
        except BaseException:
            saver.leave()
            raise
        if is_own and not saver.has_saved:
            _rotate_now(self, os.path.abspath(chosen))
        saver.finish()  # within the time that a signal allows
    return result


def _rotate_now(trainer: Any, chosen: str) -> None:
    """Remove the old checkpoints that the killed process would have removed after its last save:
    Trainer only does it at a save. chosen: the checkpoint this training resumed from. Remove
    nothing unless that is the newest: the one that stays may have been cut off."""
    module: Any = sys.modules["transformers.trainer"]
    steps = numbered_directories(os.path.dirname(chosen), NAME)
    times = sorted(steps, key=os.path.getmtime)  # those of one time stay in the order of steps
    # By its step and by its time: Trainer uses either.
    if trainer.args.should_save and steps[-1:] == times[-1:] == [chosen]:
        module.rotate_checkpoints(
            output_dir=trainer.args.output_dir,
            save_total_limit=trainer.args.save_total_limit,
            best_model_checkpoint=trainer.state.best_model_checkpoint,
            # As in Trainer's own call.
            use_mtime=True,
        )


def _follow_the_cadence(trainer: Any, saver: Saver) -> None:
    """Let a ``Trainer`` save by the cadence, if the settings have one, it saves by steps, and its
    script has no such callback."""
    from portus_accelerate.callback import PortusCallback

    said, callbacks = saver.settings, trainer.callback_handler.callbacks
    if said.every is None or trainer.args.save_strategy != "steps":
        return
    if not any(isinstance(each, PortusCallback) for each in callbacks):
        made = PortusCallback(said.every, max_overhead=said.max_overhead, mtbf=said.mtbf)
        callbacks.insert(1, made)  # behind the one of Trainer's own arguments, before the script's


def _log_values(
    stock: Callable[..., None], self: Any, logs: dict[str, float], *more: Any, **named: Any
) -> None:
    """Log, and pass what saves cost to all callbacks that log, but those that print. It is not
    added to the history in ``trainer_state.json``."""
    is_last = "train_runtime" in logs  # trackers close after that
    stock(self, logs, *more, **named)
    saver = saver_of(self.accelerator)
    callbacks: Any = sys.modules["transformers.trainer_callback"]
    prints = (callbacks.PrinterCallback, callbacks.ProgressCallback)
    some = copy.copy(self.callback_handler)
    some.callbacks = [each for each in some.callbacks if not isinstance(each, prints)]
    for stats in () if saver is None else saver.take_stats(wait=is_last):
        self.control = some.on_log(self.args, self.state, self.control, stats.metrics())


def _choose(trainer: Any, saver: Saver, asked: Any) -> Any:
    """Return the checkpoint to resume from: ``asked``, or the newest one that all processes
    finished. Raise ``UsageError`` for one whose save was cut off."""
    if isinstance(asked, str | os.PathLike):
        saver.loader.raise_if_any(why_incomplete(os.fspath(asked), is_complete))
    if asked is not True:
        return asked
    output, count = os.path.abspath(trainer.args.output_dir), trainer.args.world_size
    is_here = os.path.isdir(output)  # for this process: it still takes part in what all do
    beside = saver.loader.as_main_says(
        output, numbered_directories(output, NAME) if is_here else []
    )
    if not beside:
        return asked  # Trainer reports that there is none
    own = "rng_state.pth" if count == 1 else f"rng_state_{trainer.args.process_index}.pth"

    def is_finished(path: str) -> bool:
        is_there = os.path.exists(os.path.join(path, own))
        return is_there or (os.path.isdir(path) and trainer_data.processes_of(path) != count)

    complete = saver.loader.as_main_says(output, complete_in(output) if is_here else [])
    # One that lacks random states is better than none.
    ordered = saver.loader.most_complete_first(complete, is_finished)
    found = next((each for each in ordered if all(gather_object([os.path.isdir(each)]))), None)
    if found in saver.loader.passed_over:
        _log.error(
            "Portus: a process was killed before its random states were in %s, and no checkpoint "
            "has those of all processes: random numbers do not continue as they were",
            found,
        )
    if found is None:
        _log.error("Portus: no checkpoint in %s was ever complete; STARTING FROM SCRATCH", output)
    elif found != beside[-1]:
        _log.error(
            "Portus: %s is not complete, its save was cut off; FALLING BACK to %s",
            beside[-1],
            found,
        )
    return found
