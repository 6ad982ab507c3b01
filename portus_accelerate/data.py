"""The position of a prepared loader of a map-style dataset, and the resume from there.

``portus.DataCursor`` follows the loader inside of Accelerate's. This module knows what Accelerate
adds: it prefetches one batch, so only delivered batches count; a loader of ``skip_first_batches``
is the same epoch of the same loader; and a loop may have reached the epoch's end, been left, or
still run.

After a resume the next iteration continues the epoch, and a script that skips the delivered batches
by ``skip_first_batches`` skips only these. A loop that was left by ``break`` has ended, as without
an interruption, unless the script then calls ``skip_first_batches``.

A loop trains if it changes the models (``Training``), whichever code calls ``backward``. A loop
that trains nothing, such as one that only looks at a batch, uses no batches of a loaded epoch of
training: the next loop continues that.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipBatchSampler
from torch.utils.data import DataLoader, IterableDataset

import portus

_log: Final = logging.getLogger("portus_accelerate")

_END: Final = object()
_OWN: Final = "_portus_plain"
_NO_GRADIENT: Final = -1

_Trained = tuple[int, dict[int, tuple[int, int]]]
"""The models at a moment: the passes so far; and of each parameter, by its identity, how often it
was changed, and its gradient."""


class Training:
    """The training of one ``Accelerator``'s models: by its ``backward``, whose calls are counted,
    or by any other, which leaves gradients, or parameters that were stepped."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator: Final = weakref.ref(accelerator)  # a followed loader may outlive it
        self.passes = 0
        """Calls of the ``Accelerator``'s ``backward``."""
        self._first: _Trained | None = None

    def begin(self) -> _Trained:
        """Return the models as a loop begins, for ``since``. Microseconds for each parameter."""
        now = self._now()
        if self._first is None:
            self._first = now
        return now

    def forget(self) -> None:
        """Count only changes from now on: models were loaded."""
        self._first = None

    def since(self, then: _Trained | None = None) -> bool:
        """Return whether anything was trained since ``then``; None: since the first loop began, or
        the last state was loaded."""
        now, then = self._now(), then or self._first
        if then is None:
            return False
        (passes, parameters), (known_passes, known) = now, then
        return passes != known_passes or any(
            each != known.get(number, (each[0], _NO_GRADIENT))
            for number, each in parameters.items()
        )

    def _now(self) -> _Trained:
        found = {}
        models = getattr(self._accelerator(), "_models", ())
        for each in (each for model in models for each in model.parameters()):
            # A tensor of inference mode has no version, and asking for it raises.
            if not each.is_inference():
                # The gradient's too: a fused AdamW leaves the parameter's version (torch 2.13).
                gradient = _NO_GRADIENT if each.grad is None else each.grad._version
                found[id(each)] = each._version, gradient
        return self.passes, found


class PlainLoader:
    """A loader that an ``Accelerator`` prepared.

    ranks: processes that train together. fixed: see ``portus.DataCursor``. training: of that
    ``Accelerator``.
    """

    def __init__(
        self, loader: Any, ranks: int, fixed: Literal["local", "global"], training: Training
    ) -> None:
        self.loader: Final = loader
        self._training: Final = training
        dispatch: Literal["batches", "pieces"] | None = None
        if isinstance(loader, DataLoaderDispatcher):
            dispatch = "pieces" if loader.split_batches else "batches"
        self._cursor: Final = portus.DataCursor(
            loader.base_dataloader, ranks=ranks, fixed=fixed, dispatch=dispatch
        )
        self._running: _Epoch | None = None
        self._saved: dict[str, Any] | None = None
        self._now: torch.Tensor | None = None
        vars(loader)[_OWN] = vars(loader.base_dataloader)[_OWN] = self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of a loader is not followed

    @property
    def iteration(self) -> int:
        """Return the number of epochs done; Accelerate counts as the loop asks for one more
        batch."""
        running = self._running
        if running is None:
            return int(self.loader.iteration)
        return int(running.loader.iteration) + (running.is_over and not running.has_ended)

    def state_dict(self, delivered: int | None = None) -> dict[str, Any]:
        """Return the position of this process.

        delivered: the trained batches of this epoch, over all restarts, if not all delivered ones.
        """
        running = self._running
        if self._saved is not None:
            return self._saved  # nothing was asked of it since
        if running is None:
            return {"cursor": self._cursor.state_dict(0), "left": False, "trained": False}
        handed_out = running.before + running.given
        # A loop that trains nothing, in a script that trains, is a validation: its results before
        # the save are lost, so the next one starts again.
        has_trained = running.has_trained
        is_beside = delivered is None and not has_trained and self._training.since()
        delivered = handed_out if delivered is None else delivered
        is_over = running.is_over and delivered == handed_out
        return {
            "cursor": self._cursor.state_dict(
                delivered, is_over=is_over, iterator=running.iteration
            ),
            "left": running.is_left or (is_beside and not running.before and not is_over),
            "trained": has_trained or running.is_of_training,
        }

    @property
    def is_dispatched(self) -> bool:
        """Return whether the main process alone loads, and knows the position."""
        return isinstance(self.loader, DataLoaderDispatcher)

    @property
    def whole(self) -> int:
        """Return the number of batches of a whole epoch."""
        batches = len(self._cursor.stock)
        if not self.is_dispatched or self.loader.split_batches:
            return batches
        ranks = self.loader.state.num_processes
        return int(batches // ranks if self.loader._drop_last else -(-batches // ranks))

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """Continue from ``state`` with the next iteration; generators stand as at the save. Return
        the reason if that is impossible, else "". Raises as ``portus.DataCursor``."""
        self._running = self._now = None
        self._training.forget()
        told = self._cursor.load_state_dict(state["cursor"])
        self._saved = dict(state)
        position = state["cursor"]["position"]
        if told or position["is_over"]:
            self._cursor.forget()
            self._cursor.put_back(state["cursor"])
        elif position["batches"]:
            self._now = portus.capture_randomness(drawing_device())
        if state["left"]:
            self._cursor.put_back(state["cursor"])
        if told:
            self._saved = None
        return told

    def forget(self) -> None:
        """Forget the epoch to resume."""
        self._running = self._saved = self._now = None
        self._cursor.forget()

    def iterate(self, loader: Any, stock: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """Yield the batches of ``stock``. loader: this one, or a ``skip_first_batches`` of it."""
        if self._saved is not None and self._saved["left"] and loader is self.loader:
            self._now = None
            self._cursor.forget()
        now, self._now = self._now, None
        saved, iteration = self._saved, self.loader.iteration
        batches = stock(loader)
        first = next(batches, _END)
        # An iterator draws as it is made, and the earlier run made its own before the save.
        if now is not None:
            portus.restore_randomness(now, drawing_device())
        self._saved = None
        epoch = _Epoch(loader, self._cursor.newest, self._training, self._running)
        epoch.is_of_training = is_within(saved) and bool(saved and saved.get("trained"))
        if loader is not self.loader and not self.is_dispatched:
            epoch.compare(_skipping(loader).skip_batches)
        try:
            while first is not _END:
                self._hand_out(epoch)
                yield first
                if loader is self.loader:
                    epoch.look()
                first = epoch.fetch(batches)
            epoch.is_over = epoch.has_ended = True
        finally:
            epoch.is_left = not epoch.is_over
            was_running = epoch is self._running
            outer, epoch.outer = epoch.outer, None
            has_trained = epoch.has_trained
            if was_running and outer is not None and outer.goes_on and not has_trained:
                self._running = outer
            is_unused = was_running and epoch.is_of_training and not has_trained
            if is_unused and saved is not None:
                # The loop that continued from the state trained nothing: so does the next one.
                _log.log(
                    logging.WARNING if epoch.is_over else logging.INFO,
                    "Portus: the first loop over this loader after load_state trained nothing: the "
                    "next one resumes where the state was saved, too",
                )
                self._running, self._saved, self._now = None, saved, now
                self._cursor.load_state_dict(saved["cursor"])
                self.loader.iteration = iteration
        if is_unused:
            return
        if was_running:
            self._cursor.forget()
        if loader is not self.loader:
            # The script continued with a loader of skip_first_batches; its own has to follow.
            self.loader.iteration = getattr(loader, "iteration", 0)

    def _hand_out(self, epoch: _Epoch) -> None:
        """Count one more delivered batch of this epoch: it is the current one, whatever other loops
        over this loader came in between."""
        self._running = epoch
        epoch.given += 1
        epoch.is_over = epoch.fetched_last
        saved, self._saved, self._now = self._saved, None, None
        if saved is not None:  # a state was loaded during this loop
            self._cursor.forget()
            if is_within(saved):
                tell(
                    "a loop over this loader was running when the state was loaded, and "
                    "continues with its own batches. To continue with those of the state, "
                    "start the loop again"
                )


class _Epoch:
    """One iteration of a loader."""

    def __init__(
        self, loader: Any, iteration: Any, training: Training, outer: _Epoch | None
    ) -> None:
        self.loader: Final = loader
        is_inside = outer is not None and outer.goes_on and outer.has_trained
        self.outer = outer if is_inside else None
        """A training loop over the same loader, inside of which this one began."""
        self._training: Final = training
        self._trained_before: Final = training.begin()
        self._is_idle = False
        """True if it reached its own first batch without any training."""
        self.is_of_training = False
        """True if it continues an epoch of training."""
        self.iteration: Final = iteration
        self.before: Final[int] = 0 if iteration is None else iteration.before
        self.given = 0
        self.fetched_last = bool(loader.end_of_dataloader)
        """Whether the batch that was fetched last is the last one."""
        self.is_over = False
        """True if no batch of it is left."""
        self.has_ended = False
        """True if the loop asked for a batch after the last one."""
        self.is_left = False
        """True if the loop was left."""

    def fetch(self, batches: Iterator[Any]) -> Any:
        """Return a batch after the first. Another loop may have left the loader at its end."""
        stale, self.loader.end_of_dataloader = self.loader.end_of_dataloader, False
        try:
            return next(batches, _END)
        finally:
            self.fetched_last = bool(self.loader.end_of_dataloader)
            self.loader.end_of_dataloader = stale or self.fetched_last

    def look(self) -> None:
        """Check the loop as it returns from a batch. Report an error if it skipped as many as were
        delivered before a restart, and began to train with the next one."""
        beyond = self.given - self.before
        if self.before and beyond == 0:
            self._is_idle = not self.has_trained
        elif self._is_idle and beyond == 1 and self.has_trained:
            _log.error(
                "Portus: after the resume this loop continued with the next batch, then skipped %d "
                "batches, as many as were delivered before, and trained with the one after them. "
                "If the script skips by hand (`if step < resume_step: continue`), these samples "
                "are missing now: remove that, or use skip_first_batches, and resume again",
                self.before,
            )

    def compare(self, skipped: int) -> None:
        """Warn if the script skips other numbers of batches than were delivered, of an epoch that
        is not redistributed."""
        resume = None if self.iteration is None else self.iteration.resume
        if resume is not None and resume.deal is None and skipped != self.before:
            _log.warning(
                "Portus: this script skips %d batches, and %d were delivered before the save: "
                "only these are skipped. If the save came before the last of them was "
                "trained, its samples are missing in this epoch: save after the step",
                skipped,
                self.before,
            )

    @property
    def has_trained(self) -> bool:
        """Return whether anything was trained since the loop began."""
        return self._training.since(self._trained_before)

    @property
    def goes_on(self) -> bool:
        """Return whether the loop may ask for another batch."""
        return not (self.has_ended or self.is_left)


def follow(loader: Any, ranks: int, fixed: Literal["local", "global"], training: Training) -> None:
    """Follow a loader that was prepared, if it is a plain one. May be called again."""
    if of(loader) is None and _is_plain(loader):
        PlainLoader(loader, ranks, fixed, training)
        told = portus.SeededDataset.why_not_told(loader.dataset)
        if told:
            _log.warning("Portus: %s", told)


def of(loader: Any) -> PlainLoader | None:
    """Return the follower of a loader, also of one of ``skip_first_batches``; None without one."""
    found = vars(loader).get(_OWN)
    return found if isinstance(found, PlainLoader) else None


def is_within(state: Mapping[str, Any] | None) -> bool:
    """Return whether ``state``, of a plain loader, is to be continued within an epoch."""
    if state is None or state["left"]:
        return False
    position = state["cursor"]["position"]
    return bool(position["batches"] and not position["is_over"])


def note_skipping(made: Any) -> None:
    """Follow the new loader ``made`` as one with its source, if ``skip_first_batches`` made it."""
    sampler = _skipping(made)
    cursor = None if sampler is None else portus.DataCursor.of(sampler.batch_sampler)
    plain = None if cursor is None else of(cursor.loader)
    if cursor is not None and plain is not None:
        sampler.batch_sampler = cursor.sampler_after(sampler.skip_batches)
        vars(made)[_OWN] = plain


def tell(reason: str) -> None:
    """Warn that the rest of an epoch is not continued, and why."""
    _log.warning(
        "Portus: the rest of this epoch does not resume where it was, and samples may be "
        "repeated or missed: %s",
        reason,
    )


def drawing_device() -> torch.device:
    """Return the device whose generator is used beside the CPU's, if there is one."""
    return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")


def _skipping(made: Any) -> Any:
    base = made.base_dataloader
    for each in (base.batch_sampler, base.sampler):
        if isinstance(each, SkipBatchSampler):
            return each
    return None


def _is_plain(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoaderShard | DataLoaderDispatcher)
        and not loader.use_stateful_dataloader
        and type(loader.base_dataloader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and getattr(loader, "submesh_tp", None) is None
    )
