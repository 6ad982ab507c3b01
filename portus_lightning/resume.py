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

Two things are not repeated. A plain ``DataLoader`` does not know its position inside an epoch
(Lightning warns about it); from one epoch to the next it is exact. And a validation that was to
follow right after the save is left out by Lightning on resume, so what it would have drawn from
the generators (one number for each loader, at least) is missing; a sampler with a generator of
its own, as a stateful loader has, does not notice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def renew_at_epoch_end(fit_loop: Any, put_back: Callable[[], None]) -> None:
    """Call ``put_back`` once, and renew the iterator around it where that is needed.

    For the hook ``on_train_start`` of a run that was resumed from a checkpoint.
    """
    fetcher = getattr(fit_loop, "_data_fetcher", None)
    if fetcher is None or not _is_at_epoch_end(fit_loop):
        put_back()
        return
    if _load_states(fit_loop):
        iter(fetcher)
    put_back()
    iter(fetcher)


def _is_at_epoch_end(fit_loop: Any) -> bool:
    epoch_loop = fit_loop.epoch_loop
    if not hasattr(fit_loop, "restarted_mid_epoch"):
        return False  # a Lightning older than 2.5.1, which does not tell
    after_last_batch = (
        epoch_loop.restarted_on_train_batch_end and epoch_loop.batch_progress.is_last_batch
    )
    within = fit_loop.restarted_mid_epoch or fit_loop.restarted_on_epoch_end
    return bool(after_last_batch or not within)


def _load_states(fit_loop: Any) -> bool:
    """Give stateful loaders their states if Lightning has not. True if it had not."""
    states = getattr(fit_loop, "_combined_loader_states_to_load", None)
    if not states or fit_loop._combined_loader is None:
        return False
    fit_loop._combined_loader._load_state_dicts(states)
    fit_loop._combined_loader_states_to_load = []
    return True
