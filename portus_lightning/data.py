"""The position of the training data: saved with each checkpoint, and restored on resume.

Lightning makes the iterator of the training data while it sets the data up, after the callbacks got
the checkpoint. Between the two it restores loaders that know their position, but not after an
epoch's end, nor if other code asked for the loaders before. These are the states of rank 0, and a
batch too late if it prefetches one. Here ``portus.DataCursor`` restores all loaders at once.

A loader with the state of an epoch's end has to be asked for a batch once. Some then have none, and
begin the next epoch with the next iterator; some begin it at once, and get their state again.

Lightning asks for the number of batches of an epoch in many places: the limits of the
``CombinedLoader``, the fetcher's length, ``max_batches``, the interval of validation. In an epoch
that is redistributed to other ranks, it is the delivered and the remaining batches; from the next
one on it is stock's again.

Random number generators are restored where a resumed run repeats the other. Lightning makes the
iterator of the training data before any hook runs, which draws from torch's generator (a seed for
workers), and then treats three kinds of resume differently:

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
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, Literal

import torch

import portus

_HOOK: Final = "_load_combined_loader_states"
_BEFORE_FETCH: Final = "_on_before_fetch"
_END: Final = object()


class TrainingData:
    """The training loaders of one fit.

    fixed: see ``portus.DataCursor``.
    """

    def __init__(self, trainer: Any, fixed: Literal["local", "global"]) -> None:
        self._trainer: Final = trainer
        self._loop: Final = trainer.fit_loop
        self._fixed: Final = fixed
        self._cursors: list[portus.DataCursor | None] = []
        self._saved: list[dict[str, Any] | None] = []
        self._waits = False
        self._resumed: list[int] = []
        """The loaders to ask that continue within this epoch."""
        self._odd_epoch: int | None = None
        """The epoch whose numbers of batches differ from stock's."""
        self._load_stock: Final = getattr(type(self._loop), _HOOK).__get__(self._loop)
        before_fetch = self._loop.epoch_loop._on_before_fetch

        def load_states() -> None:
            self._tell_epoch()
            self._follow()
            if not self._go_on():
                self._load_stock()

        def keep() -> None:
            before_fetch()
            fetcher = self._loop._data_fetcher
            if fetcher is not None and fetcher.length is None:  # it prefetches
                for each in self._cursors:
                    if each is not None and each.is_asked:
                        each.keep(fetcher.fetched)

        setattr(self._loop, _HOOK, load_states)
        setattr(self._loop.epoch_loop, _BEFORE_FETCH, keep)

    def states(self, *, is_pending: bool = False) -> list[dict[str, Any] | None]:
        """Return the states of this rank's loaders, None for one that is not followed.

        is_pending: nothing was trained since a state was loaded, so the loaders are still there.
        """
        if is_pending and self._saved:
            # As loaded: to ask for the first sample would begin the epoch, and draw from the
            # generators (decision 0128).
            return list(self._saved)
        if not self._cursors:
            return []
        progress = self._loop.epoch_loop.batch_progress
        done = progress.current.processed
        is_over = (
            done == progress.current.ready and self._loop.epoch_loop._num_ready_batches_reached()
        )
        return [
            None
            if cursor is None
            else cursor.state_dict(
                self._delivered_batches(cursor, done), is_over=is_over, iterator=iterator
            )
            for cursor, iterator in zip(self._cursors, self._iterators(), strict=True)
        ]

    def amend(self, checkpoint: dict[str, Any], saved: list[dict[str, Any] | None]) -> None:
        """Put the states that loaders returned where Lightning has them too: it asks loaders when
        they may have given a batch more. saved: the states of rank 0."""
        if self._loop._combined_loader is None:
            return
        states = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
        stateful = [number for number, each in enumerate(self._loaders) if _is_stateful(each)]
        for place, number in enumerate(stateful):
            own = (saved[number] or {}).get("own")
            if place < len(states) and own is not None:
                states[place] = own

    def resume(self, states: list[dict[str, Any] | None]) -> None:
        """Continue from ``states`` once the loaders exist."""
        self._saved, self._waits = list(states), bool(states)

    def start(self) -> None:
        """Resume the loaders as training starts, if they were set up before the load."""
        if self._waits and self._cursors:
            if not self._go_on():
                self._load_stock()
            iter(self._loop._data_fetcher)
            self._count()

    def put_back(self) -> None:
        """Restore the generators of loaders, if a new epoch begins."""
        self._tell_epoch()
        for number, (cursor, saved) in enumerate(zip(self._cursors, self._saved, strict=False)):
            if cursor is None or saved is None or not saved["position"]["is_over"]:
                continue
            cursor.put_back(saved)
            if cursor.is_asked and self._gives(number):
                cursor.load_state_dict(saved)

    def start_epoch(self) -> None:
        """Begin an epoch from its start."""
        self._tell_epoch()
        # Lightning stops at the last batch of an epoch, and some loaders with a state begin the
        # next epoch only after one more request for a batch.
        resumed, self._resumed = self._resumed, []
        iterators = self._iterators() if resumed else []
        for number in resumed:
            if iterators[number] is not None:
                next(iterators[number], _END)
        if self._odd_epoch not in (None, self._loop.epoch_progress.current.processed):
            self._odd_epoch = None
            self._limit()
            self._count()

    def close(self) -> None:
        """Restore the loaders and the loop as they were before."""
        vars(self._loop).pop(_HOOK, None)
        vars(self._loop.epoch_loop).pop(_BEFORE_FETCH, None)
        for cursor in self._cursors:
            if cursor is not None:
                cursor.close()

    @property
    def _loaders(self) -> list[Any]:
        found: list[Any] = self._loop._combined_loader.flattened
        return found

    def _gives(self, number: int) -> bool:
        """Return whether a loader with the state of an epoch's end has a batch. Ask once."""
        fetcher = self._loop._data_fetcher
        if fetcher.length is None:
            return bool(getattr(fetcher, "batches", ()))  # the fetcher has asked
        iterator = self._iterators()[number]
        return iterator is not None and next(iterator, _END) is not _END

    def _tell_epoch(self) -> None:
        """Set the epoch of seeded datasets: Lightning calls ``set_epoch`` of samplers alone."""
        for loader in self._loaders:
            dataset = getattr(loader, "dataset", None)
            if isinstance(dataset, portus.SeededDataset):
                dataset.set_epoch(self._loop.epoch_progress.current.processed)

    def _follow(self) -> None:
        ranks, loaders = self._trainer.world_size, self._loaders
        for loader in loaders:
            told = portus.SeededDataset.why_not_told(getattr(loader, "dataset", None))
            if told and self._trainer.is_global_zero:
                warnings.warn(f"Portus: {told}", UserWarning, stacklevel=2)
        for cursor in self._cursors:
            if cursor is not None:
                cursor.close()
        is_known = (
            len(loaders) == 1
            or self._loop._combined_loader._mode == "min_size"
            or None not in [_length_of(partial(len, each)) for each in loaders]
        )
        # Lightning before 2.5.1 takes an epoch's end for a place within the epoch, and relies on a
        # stateful loader to have nothing left.
        knows_end = hasattr(self._loop, "restarted_mid_epoch")
        self._cursors = [
            portus.DataCursor(each, ranks=ranks, fixed=self._fixed)
            if is_known
            and not portus.DataCursor.why_not(each)
            and (knows_end or not _is_stateful(each))
            else None
            for each in loaders
        ]

    def _go_on(self) -> bool:
        """Resume the loaders; return False if Lightning has to give loaders their states."""
        if not self._waits:
            return False
        self._waits = False
        if len(self._saved) != len(self._cursors):
            self._tell(f"there were {len(self._saved)} loaders, and are {len(self._cursors)} now")
            return False
        stateful = [number for number, each in enumerate(self._loaders) if _is_stateful(each)]
        is_ours = all(self._saved[number] is not None for number in stateful)
        if is_ours:
            self._loop._combined_loader_states_to_load = []
        else:
            for number in stateful:
                self._saved[number] = None
        for number, (cursor, saved) in enumerate(zip(self._cursors, self._saved, strict=True)):
            if cursor is None or saved is None:
                continue
            if cursor.is_asked and not saved["position"]["is_over"]:
                self._resumed.append(number)
            told = cursor.load_state_dict(saved)
            if told:
                self._tell(told)
            elif not saved["position"]["is_over"]:
                # Lightning would warn that the loader is not resumable.
                warnings.filterwarnings(
                    "ignore", "You're resuming from a checkpoint that ended before the epoch ended"
                )
            if _length(cursor) != _length(cursor, of_stock=True):
                self._odd_epoch = self._loop.epoch_progress.current.processed
        self._limit()
        return is_ours

    def _limit(self) -> None:
        """Set the limits from the lengths, as ``FitLoop.setup_data`` does."""
        combined, limit = self._loop._combined_loader, self._trainer.limit_train_batches
        limits = list(combined.limits)
        for number, cursor in enumerate(self._cursors):
            if cursor is None or cursor.is_asked:
                continue
            length = _length(cursor, self._odd_epoch is None)
            if length is not None:
                limits[number] = (
                    min(length, limit) if isinstance(limit, int) else int(length * limit)
                )
        combined.limits = limits

    def _count(self) -> None:
        """Set the counts from the limits, as ``FitLoop.setup_data`` does."""
        trainer, batches = self._trainer, max(self._loop._combined_loader.limits)
        self._loop.max_batches = batches
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
            trainer.val_check_batch = max(1, int(batches * trainer.val_check_interval))

    def _delivered_batches(self, cursor: portus.DataCursor, done: int) -> int:
        """Return the batches of the loader's own round after ``done`` batches of all loaders: a
        loader that is shorter than others has ended then, or has begun again."""
        if len(self._cursors) == 1 or self._loop._combined_loader._mode == "min_size":
            return done
        length = len(cursor.stock)
        if self._loop._combined_loader._mode == "max_size_cycle" and length:
            return (done - 1) % length + 1 if done else 0
        return min(done, length)

    def _iterators(self) -> list[Any]:
        """Return the iterators that training uses, one for each loader."""
        combined = getattr(getattr(self._loop, "_data_fetcher", None), "iterator", None)
        found = getattr(getattr(combined, "_iterator", None), "iterators", ())
        return list(found) if len(found) == len(self._cursors) else [None] * len(self._cursors)

    def _tell(self, reason: str) -> None:
        if self._trainer.is_global_zero:
            warnings.warn(
                "Portus: the rest of this epoch may not resume where it was, and samples may "
                f"be repeated or missed: {reason}",
                UserWarning,
                stacklevel=2,
            )


def gather(own: Any, ranks: int) -> list[Any]:
    """Return what each rank gives; of this rank alone, if ranks cannot communicate. Runs on all
    ranks."""
    if ranks == 1 or not torch.distributed.is_initialized():
        return [own]
    gathered: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(gathered, own)
    return gathered


def _is_stateful(loader: object) -> bool:
    """Return whether ``loader`` is stateful, by the test that Lightning uses."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _length(cursor: portus.DataCursor, of_stock: bool = False) -> int | None:
    return _length_of(lambda: len(cursor.stock) if of_stock else cursor.batches)


def _length_of(length: Callable[[], int | None]) -> int | None:
    """Return a length; None if it is unknown, as for a sampler without one."""
    try:
        return length()
    except (TypeError, NotImplementedError):
        return None


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
