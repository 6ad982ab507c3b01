"""Where the random number generators must be put back, so that a resumed run repeats the other.

Lightning makes the iterator of the training data before any hook runs, which draws from torch's
generator (a seed for workers), and then treats three kinds of resume differently:

inside an epoch        it goes on with that iterator. A stateful loader has found its position
                       by then, so the generators are put back now.
through an epoch's end it first finishes the old epoch, and makes a new iterator for the next one
                       itself. The same: put the generators back now.
at an epoch's end      it uses the iterator at hand for the *next* epoch. In the uninterrupted run
                       that iterator was made after the save. So put the generators back, and make
                       it again. A stateful loader must first have been given its state (Lightning
                       does not do that here), or its sampler would start afresh, or end at once.

Where the save was made right after the last batch, Lightning takes the next epoch for the rest of
the old one: it calls no ``on_train_epoch_start``, does not count the epoch as begun (a save within
it would then resume from its start), and goes on counting batches unless the old epoch had as many
as the new one has, which it has not with other numbers of ranks. So it is told that this is a new
epoch.

Where ``max_steps`` ends training, Lightning takes every resume for one within an epoch. One from an
epoch's end it would begin by a batch of the next epoch, as if that were left of the old one, and
count the old one twice. So it is told that nothing of that epoch is left.

One thing is not repeated. A validation that was to follow right after the save is left out by
Lightning on resume, so what it would have drawn from the generators (one number for each loader, at
least) is missing; a sampler with a generator of its own, as a stateful loader has, does not notice.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def renewing_at_epoch_end(fit_loop: Any) -> Iterator[None]:
    """Renew the iterator around what is inside, which puts the generators back, where that is
    needed.

    For the hook ``on_train_start`` of a run that was resumed from a checkpoint.
    """
    if _is_epoch_over(fit_loop):
        _end_epoch(fit_loop)
    fetcher = getattr(fit_loop, "_data_fetcher", None)
    if fetcher is None or not _is_at_epoch_end(fit_loop):
        yield
        return
    if _is_after_last_batch(fit_loop.epoch_loop):
        _begin_epoch(fit_loop)
    # A stateful loader takes its state as an iterator is made, and that one is of the old epoch.
    if _load_states(fit_loop):
        iter(fetcher)
    yield
    _tell_samplers(fit_loop)  # what was put back is of the epoch that is over
    iter(fetcher)


def _is_epoch_over(fit_loop: Any) -> bool:
    """True for an epoch that was over at the save, if Lightning takes it for one that goes on."""
    epochs = fit_loop.epoch_progress.total
    ended = epochs.ready == epochs.started == epochs.processed > epochs.completed
    return bool(fit_loop.restarting and ended)


def _end_epoch(fit_loop: Any) -> None:
    """Count the epoch as done; and this is no restart, for any loop."""
    epochs = fit_loop.epoch_progress
    epochs.increment_completed()
    done = epochs.current.completed
    epochs.current.ready = epochs.current.started = epochs.current.processed = done
    fit_loop._restarting = False  # its setter says no where max_steps ends training
    fit_loop.epoch_loop.restarting = False
    if hasattr(fit_loop, "reset_restart_stage"):
        fit_loop.reset_restart_stage()
        fit_loop.epoch_loop.reset_restart_stage()


def _is_at_epoch_end(fit_loop: Any) -> bool:
    epoch_loop = fit_loop.epoch_loop
    if not hasattr(fit_loop, "restarted_mid_epoch"):
        return False  # a Lightning older than 2.5.1, which does not tell
    within = fit_loop.restarted_mid_epoch or fit_loop.restarted_on_epoch_end
    return bool(_is_after_last_batch(epoch_loop) or not within)


def _is_after_last_batch(epoch_loop: Any) -> bool:
    return bool(epoch_loop.restarted_on_train_batch_end and epoch_loop.batch_progress.is_last_batch)


def _tell_samplers(fit_loop: Any) -> None:
    """Workers are given their first samples as the iterator is made, before Lightning says which
    epoch it is."""
    lightning: Any = sys.modules[type(fit_loop).__module__]
    for loader in fit_loop._combined_loader.flattened:
        lightning._set_sampler_epoch(loader, fit_loop.epoch_progress.current.processed)


def _begin_epoch(fit_loop: Any) -> None:
    """What ``_TrainingEpochLoop.reset`` does to the counts, whatever they are; and no restart."""
    epoch_loop = fit_loop.epoch_loop
    epoch_loop.batch_progress.increment_completed()
    epoch_loop.batch_progress.reset_on_run()
    epoch_loop.scheduler_progress.reset_on_run()
    epoch_loop.automatic_optimization.optim_progress.reset_on_run()
    epoch_loop.val_loop.batch_progress.total.reset()
    epoch_loop.reset_restart_stage()
    fit_loop.reset_restart_stage()


def _load_states(fit_loop: Any) -> bool:
    """Give stateful loaders their states if Lightning has not. True if it had not."""
    states = getattr(fit_loop, "_combined_loader_states_to_load", None)
    if not states or fit_loop._combined_loader is None:
        return False
    fit_loop._combined_loader._load_state_dicts(states)
    fit_loop._combined_loader_states_to_load = []
    return True
