"""The companion of ``PortusIO``: a callback that tells the plugin what it cannot see itself.

Lightning adds it to every Trainer by its entry point. It acts only if the Trainer's plugin is a
``PortusIO``. It

- tells the plugin the run's root directory, and warns if a strategy's checkpoints bypass the
  plugin;
- makes resume exact: checkpoints have the random number generators of all ranks, and the position
  of the training data;
- passes the statistics of saves to the loggers;
- allows saves in the background, and waits for them before other code looks at the files;
- makes a preempted job save and leave, see ``preemption``.
"""

from __future__ import annotations

import sys
import warnings
from copy import deepcopy
from typing import Any, Final

import torch

import portus
from portus_lightning import data, stock
from portus_lightning.io import PortusIO, RunFiles
from portus_lightning.patch import (
    directories_of,
    knows_shards,
    owner_of_save,
    plugin_of,
    run_of,
    saves_shards,
    uploads_each,
)
from portus_lightning.preemption import PreemptionExit

KEY: Final = "portus_resume"
"""The key of what exact resume needs in a checkpoint: {"format": 2, "ranks": for each rank the
states of its generators, "random", and those of its "loaders"}."""

FORMAT: Final = 2


class CompanionHooks:
    """The hooks; each copy of Lightning combines them with its own ``Callback``."""

    def __init__(self) -> None:
        self._generators: torch.Tensor | None = None
        self._loaded: dict[str, Any] | None = None
        """The loaded values by name, and this rank's "generators"; None if none were loaded."""
        self._data: data.TrainingData | None = None
        self._place: int | None = None
        self._ended = False
        self._leaving: PreemptionExit | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the run: a copy of the Trainer (``torch.save``) has none."""
        gone = dict.fromkeys(("_generators", "_loaded", "_data", "_leaving"))
        return {**self.__dict__, **gone}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Tell the plugin where the run is; warn of what it cannot do."""
        io = self._plugin_of(trainer)
        if io is None:
            return
        self._ended, self._leaving, self._loaded = False, None, None
        self._data = None if stage == "fit" else self._data
        io.run.begin(stock.local_path(trainer.default_root_dir))
        if knows_shards(trainer.strategy):
            from portus_lightning import shards  # it needs much of torch.distributed

            shards.attach(trainer.strategy, io.run)
        if stage == "fit" and stock.is_on():
            self._data = data.TrainingData(trainer, io.fixed_batch)
            for message in warnings_for(trainer, io.run) if trainer.is_global_zero else ():
                warnings.warn(f"Portus: {message}", UserWarning, stacklevel=1)
            if io.preempt_within is not None:
                self._leaving = PreemptionExit.of(trainer, io.preempt_within)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the generators of every rank, and the position of the data. Runs on all ranks."""
        if self._plugin_of(trainer) is None or not stock.is_on():
            return
        own = portus.capture_randomness(trainer.strategy.root_device)
        is_pending = self._is_pending(trainer)
        if is_pending:
            own = self._carry(trainer, checkpoint, own)
        elif self._leaving is not None and self._leaving.is_saving:
            self._leaving.amend(checkpoint)
            own = self._leaving.generators_of(own)
        states = [] if self._data is None else self._data.states(is_pending=is_pending)
        ranks = data.gather({"random": own, "loaders": states}, trainer.world_size)
        checkpoint[KEY] = {"format": FORMAT, "ranks": ranks}
        if self._data is not None and states:
            self._data.amend(checkpoint, ranks[0]["loaders"])

    def _is_pending(self, trainer: Any) -> bool:
        """Return True from the load of a checkpoint until a batch was trained."""
        loaded = self._loaded
        if loaded is None or trainer.state.fn != "fit":
            return False
        if trainer._checkpoint_connector._loaded_checkpoint:
            return True  # Lightning has not restored all of it
        progress = trainer.fit_loop.epoch_loop.batch_progress
        saved = loaded["loops"].get("fit_loop", {}).get("epoch_loop.batch_progress", {})
        return bool(progress.total.processed == saved.get("total", {}).get("processed", -1))

    def _carry(
        self, trainer: Any, checkpoint: dict[str, Any], generators: torch.Tensor
    ) -> torch.Tensor:
        """Save the loaded values again if nothing was trained since: Lightning changes its loops
        before the first batch. Return the generators to save."""
        loaded = dict(self._loaded or {})
        checkpoint.update({name: loaded[name] for name in _OF_THE_START})
        restored_later = trainer._checkpoint_connector._loaded_checkpoint
        for name in _RESTORED_LATER:
            if name in restored_later and name in checkpoint:
                checkpoint[name] = restored_later[name]
        saved = loaded["generators"]
        return generators if saved is None else saved.clone()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep this rank's generators until the data loaders exist, and the position for these.
        Raise ``portus.UsageError`` if a newer Portus saved them."""
        if trainer.state.fn != "fit" or not self._is_first(trainer):
            return
        of_start = {name: deepcopy(checkpoint.get(name)) for name in _OF_THE_START}
        self._loaded = {**of_start, "generators": None} if of_start["loops"] else None
        saved = checkpoint.get(KEY)
        if saved is None:
            return
        if run_of(trainer) is not None:
            stock.LIGHTNING.require_format("random numbers and data", saved["format"], FORMAT)
        elif saved["format"] != FORMAT:  # stock Lightning ignores them
            return
        ranks, rank = saved["ranks"], trainer.global_rank
        if self._data is not None:
            # From another number of ranks, all take rank 0's: samples are one sequence
            # (decision 0128).
            self._data.resume(ranks[rank if len(ranks) == trainer.world_size else 0]["loaders"])
        # More ranks than at the save: the new ones keep what the script seeded.
        if rank < len(ranks):
            self._generators = ranks[rank]["random"].clone()
            if self._loaded is not None:
                self._loaded["generators"] = self._generators

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the generators: the iterators exist, and nothing is drawn yet. Make this callback
        the first one: at the end of the fit, all files exist before other callbacks look."""
        _expect(trainer)
        if self._plugin_of(trainer) is not None:  # a new list: Lightning iterates over the old one
            self._place = trainer.callbacks.index(self)
            trainer.callbacks = [self, *(each for each in trainer.callbacks if each is not self)]
        if self._data is not None:
            self._data.start()
        generators, self._generators = self._generators, None
        if generators is not None:
            with data.renewing_at_epoch_end(trainer.fit_loop):
                if self._data is not None:
                    self._data.put_back()
                portus.restore_randomness(generators, trainer.strategy.root_device)
        if self._leaving is not None:
            self._leaving.train_starts()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Start an epoch, whose length the loaders give."""
        if self._data is not None:
            self._data.start_epoch()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Log the cost of saves that have ended; leave if it is time."""
        self._log_stats(trainer)
        if self._leaving is not None:
            self._leaving.batch_ended()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave if it is time; the next three hooks do too."""
        if self._leaving is not None:
            self._leaving.epoch_ended()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._leaving is not None:
            self._leaving.validation_starts()

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        if self._leaving is not None:
            self._leaving.validation_goes_on()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._leaving is not None:
            self._leaving.validation_ended()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Finish the saves after the last batch, so all files exist, and log the last statistics.
        Later saves block."""
        self._end(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """End the run here too, if there was nothing to train."""
        self._end(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Finish the saves, as training stops here; later saves block."""
        io = plugin_of(trainer)
        if io is None or not stock.is_on() or trainer.state.fn != "fit":
            return
        if self._data is not None:
            self._data.close()  # Lightning calls no teardown after an exception
        if self._leaving is not None and self._leaving.takes(exception):
            self._ended = True
            self._leaving.save(io)
            return
        try:
            io.teardown()
        except portus.PortusError as error:
            # The exception that ended training matters more.
            stock.LIGHTNING.say_once(f"Portus: a save failed: {error}")
        self._ended = True

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Finish saves, also for strategies that do not call their plugin's teardown."""
        io = plugin_of(trainer)
        if io is not None:
            io.teardown()
        if self._place is not None:
            others = [each for each in trainer.callbacks if each is not self]
            trainer.callbacks = [*others[: self._place], self, *others[self._place :]]
            self._place = None
        if self._data is not None:
            self._data.close()

    def _plugin_of(self, trainer: Any) -> PortusIO | None:
        """Return the Trainer's ``PortusIO``, if this companion is the one that acts on it."""
        io = plugin_of(trainer)
        return io if io is not None and self._is_first(trainer) else None

    def _is_first(self, trainer: Any) -> bool:
        """Return False for a second companion: one came by the entry point, one from the user."""
        return self is next(each for each in trainer.callbacks if isinstance(each, CompanionHooks))

    def _end(self, trainer: Any) -> None:
        io = self._plugin_of(trainer)
        if io is None or self._ended:
            return
        self._ended = True
        io.teardown()  # some strategies do not call it
        self._log_stats(trainer)
        # A program that never imported it has not protected any table.
        if stock.is_on() and trainer.is_global_zero and "portus.embedding" in sys.modules:
            io.run.put_tables()

    def _log_stats(self, trainer: Any) -> None:
        io = self._plugin_of(trainer)
        for stats in () if io is None else io.run.take_stats():
            for logger in trainer.loggers:
                logger.log_metrics(stats.metrics(), step=trainer.global_step)


_OF_THE_START: Final = ("epoch", "global_step", "loops")
"""The keys of a checkpoint whose values stay as loaded until a batch was trained."""

_RESTORED_LATER: Final = ("optimizer_states", "lr_schedulers")
"""The keys that Lightning restores only after ``on_fit_start``."""


def _expect(trainer: Any) -> None:
    """Tell the plugin where checkpoints will go."""
    run = run_of(trainer)
    if run is None or bypass(trainer.strategy, run) or trainer.fast_dev_run:
        return
    in_shards = saves_shards(trainer.strategy)
    directories = directories_of(trainer)
    if directories and (in_shards or trainer.is_global_zero):
        run.expect(directories[0], in_shards=in_shards)


def warnings_for(trainer: Any, run: RunFiles) -> list[str]:
    """Return the warnings that a user must see before training starts."""
    found = []
    what = bypass(trainer.strategy, run)
    if what:
        found.append(
            f"checkpoints of {what} do NOT go through Portus: this strategy writes them itself. "
            "They are as safe and as fast as without Portus"
        )
    uploads = [type(each).__name__ for each in trainer.loggers if uploads_each(each, trainer)]
    if uploads:
        found.append(
            f"{', '.join(uploads)} looks at each checkpoint as it is saved, so training waits for "
            "each. Log only the last model to avoid that"
        )
    return found


def bypass(strategy: Any, run: RunFiles) -> str:
    """Return the name of a strategy that writes checkpoints without its plugin, if the companion
    cannot help; else ""."""
    name = type(strategy).__name__
    if knows_shards(strategy):
        reason = run.why_no_shards() if saves_shards(strategy) else ""
        return f"{name} with sharded checkpoints ({reason})" if reason else ""
    # The base class asks the plugin; a strategy that writes its own files overrides this method.
    return "" if owner_of_save(strategy).__name__ == "Strategy" else name
