"""The place at which to restore random number generators, so a resumed run repeats the other.

Lightning makes the iterator of the training data before any hook runs, which draws from torch's
generator (a seed for workers), and then treats three kinds of resume differently:

inside an epoch        it continues with that iterator. A stateful loader has found its position
                       by then, so restore the generators now.
through an epoch's end it first finishes the old epoch, and makes a new iterator for the next one
                       itself. The same: restore the generators now.
at an epoch's end      it uses the iterator at hand for the *next* epoch. In the uninterrupted run
                       that iterator was made after the save. So restore the generators, and make
                       it again. A stateful loader must have its state first (Lightning does not
                       do that here), or its sampler would start afresh, or end at once.

If the save came right after the last batch, Lightning takes the next epoch for the rest of the old
one: it calls no ``on_train_epoch_start``, does not count the epoch as begun (a save within it would
then resume from its start), and continues the count of batches unless both epochs have as many,
which differ with other numbers of ranks. So Portus tells it that this is a new epoch.

If ``max_steps`` ends training, Lightning takes every resume for one within an epoch. After an
epoch's end it would count a batch of the next epoch as left of the old one, and the old one twice.
So Portus tells it that nothing of that epoch is left.

One thing is not repeated. On resume Lightning skips a validation that was due right after the save.
So its draws from the generators (at least one number for each loader) are missing; a sampler with a
generator of its own, as a stateful loader has, does not notice.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def renewing_at_epoch_end(fit_loop: Any) -> Iterator[None]:
    """Renew the iterator around the body, which restores the generators, if that is needed. For the
    hook ``on_train_start`` of a run that was resumed from a checkpoint."""
    if _is_epoch_over(fit_loop):
        _end_epoch(fit_loop)
    fetcher = getattr(fit_loop, "_data_fetcher", None)
    if fetcher is None or not _is_at_epoch_end(fit_loop):
        yield
        return
    if _is_after_last_batch(fit_loop.epoch_loop):
        _begin_epoch(fit_loop)
    # A stateful loader takes its state as an iterator is made, and that state is of the old epoch.
    if _load_states(fit_loop):
        iter(fetcher)
    yield
    _tell_samplers(fit_loop)  # the restored samplers are of the epoch that has ended
    iter(fetcher)


def _is_epoch_over(fit_loop: Any) -> bool:
    """Return True for an epoch that had ended at the save, if Lightning takes it for unfinished."""
    epochs = fit_loop.epoch_progress.total
    ended = epochs.ready == epochs.started == epochs.processed > epochs.completed
    return bool(fit_loop.restarting and ended)


def _end_epoch(fit_loop: Any) -> None:
    """Count the epoch as done, and mark no loop as restarting."""
    epochs = fit_loop.epoch_progress
    epochs.increment_completed()
    done = epochs.current.completed
    epochs.current.ready = epochs.current.started = epochs.current.processed = done
    fit_loop._restarting = False  # its setter does nothing if max_steps ends training
    fit_loop.epoch_loop.restarting = False
    if hasattr(fit_loop, "reset_restart_stage"):
        fit_loop.reset_restart_stage()
        fit_loop.epoch_loop.reset_restart_stage()


def _is_at_epoch_end(fit_loop: Any) -> bool:
    epoch_loop = fit_loop.epoch_loop
    if not hasattr(fit_loop, "restarted_mid_epoch"):
        return False  # Lightning before 2.5.1 has no such attribute
    within = fit_loop.restarted_mid_epoch or fit_loop.restarted_on_epoch_end
    return bool(_is_after_last_batch(epoch_loop) or not within)


def _is_after_last_batch(epoch_loop: Any) -> bool:
    return bool(epoch_loop.restarted_on_train_batch_end and epoch_loop.batch_progress.is_last_batch)


def _tell_samplers(fit_loop: Any) -> None:
    """Set the epoch of samplers: workers get their first samples as the iterator is made, before
    Lightning sets it."""
    lightning: Any = sys.modules[type(fit_loop).__module__]
    for loader in fit_loop._combined_loader.flattened:
        lightning._set_sampler_epoch(loader, fit_loop.epoch_progress.current.processed)


def _begin_epoch(fit_loop: Any) -> None:
    """Set the counts as ``_TrainingEpochLoop.reset`` does, and mark no restart."""
    epoch_loop = fit_loop.epoch_loop
    epoch_loop.batch_progress.increment_completed()
    epoch_loop.batch_progress.reset_on_run()
    epoch_loop.scheduler_progress.reset_on_run()
    epoch_loop.automatic_optimization.optim_progress.reset_on_run()
    epoch_loop.val_loop.batch_progress.total.reset()
    epoch_loop.reset_restart_stage()
    fit_loop.reset_restart_stage()


def _load_states(fit_loop: Any) -> bool:
    """Give stateful loaders their states if Lightning has not. Return True if it had not."""
    states = getattr(fit_loop, "_combined_loader_states_to_load", None)
    if not states or fit_loop._combined_loader is None:
        return False
    fit_loop._combined_loader._load_state_dicts(states)
    fit_loop._combined_loader_states_to_load = []
    return True
