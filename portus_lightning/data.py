"""Where the training data is: saved with each checkpoint, and gone on with.

Lightning makes the iterator of the training data while it sets the data up, after the callbacks
were given the checkpoint. Between the two it gives loaders that know their position their states,
but not after an epoch's end, nor where something asked for the loaders before; and those are the
states of rank 0, and of a batch later where it fetches one ahead. Here all loaders are given
theirs, by ``portus.DataCursor``, at the same moment.

A loader that was given the state of an epoch's end has to be asked for a batch once: some then say
that there is none, and begin the next epoch with the iterator after that; some begin it at once,
and are given their state again.

How many batches an epoch has is asked in many places: the limits of the ``CombinedLoader``, the
fetcher's length, ``max_batches``, the interval of validation. In an epoch that is dealt anew to
other ranks it is what was delivered and what is left; from the next one on it is stock's again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal

import torch

import portus
from portus_lightning import stock

KEY: Final = "portus_data"
"""Where it is in a checkpoint: {"format": 1, "loaders": one state for each, "random": (ranks,
loaders, RANDOMNESS_BYTES) uint8, "own": for each rank what its loaders said of themselves}. None
stands for a loader that is not followed, or not asked."""

_FORMAT: Final = 1
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
        """Loaders that are asked, and went on within this epoch."""
        self._odd_epoch: int | None = None
        """The epoch that has other numbers of batches than stock says."""
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
            if fetcher is not None and fetcher.length is None:  # it fetches ahead
                for each in self._active_cursors():
                    each.keep(fetcher.fetched)

        setattr(self._loop, _HOOK, load_states)
        setattr(self._loop.epoch_loop, _BEFORE_FETCH, keep)

    def state_dict(self, *, is_pending: bool = False) -> dict[str, Any] | None:
        """Return this rank's part: "random" and "own" have to be gathered. None before there are
        loaders.

        is_pending: nothing was trained since a state was loaded, so the loaders are still there.
        """
        if is_pending and self._saved:
            # As it was loaded: to ask for the first sample would begin the epoch, and draw from the
            # generators (decision 0128).
            return _gather([None if each is None else dict(each) for each in self._saved])
        if not self._cursors:
            return None
        progress = self._loop.epoch_loop.batch_progress
        done = progress.current.processed
        is_over = (
            done == progress.current.ready and self._loop.epoch_loop._num_ready_batches_reached()
        )
        return _gather(
            [
                None
                if cursor is None
                else cursor.state_dict(
                    self._delivered_batches(cursor, done), is_over=is_over, iterator=iterator
                )
                for cursor, iterator in zip(self._cursors, self._iterators(), strict=True)
            ]
        )

    def amend(self, checkpoint: dict[str, Any], own: list[Any]) -> None:
        """Put what loaders said of themselves where Lightning has it too: it asks them when they
        may have been asked for a batch more. own: of rank 0."""
        if self._loop._combined_loader is None:
            return
        states = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
        stateful = [number for number, each in enumerate(self._loaders) if _is_stateful(each)]
        for place, number in enumerate(stateful):
            if place < len(states) and own[number] is not None:
                states[place] = own[number]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` says, once the loaders are there. Raises ``UsageError`` for a state
        of a newer Portus."""
        stock.LIGHTNING.require_format("positions in data", state.get("format"), _FORMAT)
        random = state["random"]
        # Of another number of ranks, all take rank 0's: samples are one sequence (decision 0128).
        rank = self._trainer.global_rank if len(random) == self._trainer.world_size else 0
        own = state["own"]
        said = own[min(rank, len(own) - 1)]
        self._saved = [
            None if each is None else {**each, "random": drawn.clone(), "own": asked}
            for each, drawn, asked in zip(state["loaders"], random[rank], said, strict=True)
        ]
        self._waits = True

    def start(self) -> None:
        """Training starts: where the loaders were set up before the checkpoint was there, let them
        go on now."""
        if self._waits and self._cursors:
            if not self._go_on():
                self._load_stock()
            iter(self._loop._data_fetcher)
            self._count()

    def put_back(self) -> None:
        """Put the generators of loaders back, if a new epoch begins."""
        self._tell_epoch()
        for number, (cursor, saved) in enumerate(zip(self._cursors, self._saved, strict=False)):
            if cursor is None or saved is None or not saved["position"]["is_over"]:
                continue
            cursor.put_back(saved)
            if cursor.is_asked and self._gives(number):
                cursor.load_state_dict(saved)

    def start_epoch(self) -> None:
        """An epoch begins from its start."""
        self._tell_epoch()
        # Lightning stops at the last batch of an epoch, and some loaders that were given a state
        # begin the next epoch only once they were asked in vain.
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
        """Leave the loaders and the loop as they were."""
        vars(self._loop).pop(_HOOK, None)
        vars(self._loop.epoch_loop).pop(_BEFORE_FETCH, None)
        for cursor in self._cursors:
            if cursor is not None:
                cursor.close()

    @property
    def _loaders(self) -> list[Any]:
        found: list[Any] = self._loop._combined_loader.flattened
        return found

    def _active_cursors(self) -> list[portus.DataCursor]:
        return [each for each in self._cursors if each is not None and each.is_asked]

    def _gives(self, number: int) -> bool:
        """Whether a loader that was given the state of an epoch's end has a batch. Ask once."""
        fetcher = self._loop._data_fetcher
        if fetcher.length is None:
            return bool(getattr(fetcher, "batches", ()))  # it has asked
        iterator = self._iterators()[number]
        return iterator is not None and next(iterator, _END) is not _END

    def _tell_epoch(self) -> None:
        """Seeded datasets have no sampler's ``set_epoch``, which Lightning would call."""
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
        self._cursors = [
            portus.DataCursor(each, ranks=ranks, fixed=self._fixed)
            if is_known and not portus.DataCursor.why_not(each) and self._may_follow(each)
            else None
            for each in loaders
        ]

    def _may_follow(self, loader: Any) -> bool:
        """Lightning before 2.5.1 takes an epoch's end for a place within the epoch, and relies on
        a loader that knows its position to say that nothing is left."""
        return not _is_stateful(loader) or hasattr(self._loop, "restarted_mid_epoch")

    def _go_on(self) -> bool:
        """False if Lightning is to give loaders their states."""
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
        """What ``FitLoop.setup_data`` makes of lengths."""
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
        """What ``FitLoop.setup_data`` makes of limits."""
        trainer, batches = self._trainer, max(self._loop._combined_loader.limits)
        self._loop.max_batches = batches
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
            trainer.val_check_batch = max(1, int(batches * trainer.val_check_interval))

    def _delivered_batches(self, cursor: portus.DataCursor, done: int) -> int:
        """Batches of the loader's own round, once training was given ``done`` of all loaders: one
        that is shorter than others has ended then, or has begun again."""
        if len(self._cursors) == 1 or self._loop._combined_loader._mode == "min_size":
            return done
        length = len(cursor.stock)
        if self._loop._combined_loader._mode == "max_size_cycle" and length:
            return (done - 1) % length + 1 if done else 0
        return min(done, length)

    def _iterators(self) -> list[Any]:
        """The iterators that training uses, one for each loader."""
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


def _gather(states: list[Any]) -> dict[str, Any]:
    """The states of loaders, as a checkpoint has them: what belongs to a rank apart."""
    random = [
        # A place for each loader: ranks gather tensors of one size.
        torch.zeros(portus.RANDOMNESS_BYTES, dtype=torch.uint8, device="cpu")
        if each is None
        else each.pop("random")
        for each in states
    ]
    own = [None if each is None else each.pop("own", None) for each in states]
    return {"format": _FORMAT, "loaders": states, "random": torch.stack(random), "own": own}


def of_all_ranks(own: list[Any], ranks: int) -> list[list[Any]]:
    """What the loaders of each rank said of themselves; of this one alone, where ranks have no way
    to tell each other. Runs on all ranks, and waits for them if any loader was asked."""
    if ranks == 1 or not any(own) or not torch.distributed.is_initialized():
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
    """A length; None where nobody knows it, as of a sampler without one."""
    try:
        return length()
    except (TypeError, NotImplementedError):
        return None
