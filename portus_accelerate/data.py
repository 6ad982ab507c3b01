"""A prepared loader of a map-style dataset: where it is, and going on there.

``portus.DataCursor`` follows the loader that Accelerate's has inside. What Accelerate adds is known
here: it fetches one batch ahead, so what counts is what was handed out; a loader of
``skip_first_batches`` is the same epoch of the same loader; and whether a loop came to the epoch's
end, was left, or goes on.

After a resume the next iteration goes on where the epoch was, and a script that passes over what
was delivered, by ``skip_first_batches``, passes over that alone. A loop that was left by ``break``
is over, as it would be without an interruption, unless the script then says ``skip_first_batches``.

Whether a loop trains is seen by what it does to the models (``Training``), not by who calls
``backward``. One that trains nothing, such as one that only looks at a batch, uses up nothing of an
epoch of training that a state was loaded of: the next one goes on where that was.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipBatchSampler
from torch.utils.data import DataLoader, IterableDataset

import portus

_log: Final = logging.getLogger("portus_accelerate")

_END: Final = object()
_OWN: Final = "_portus_plain"
_NO_GRADIENT: Final = -1


class Training:
    """Whether the models of one ``Accelerator`` are trained: by its ``backward``, which counts
    itself, or by any other, which leaves gradients, or parameters that were stepped."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator: Final = weakref.ref(accelerator)  # who follows a loader may outlive it
        self.passes = 0
        """Calls of the ``Accelerator``'s ``backward``."""
        self._first: _TrainedModel | None = None

    def begin(self) -> _TrainedModel:
        """A loop begins: how things are, for ``since``. Some microseconds for each parameter."""
        now = self._now()
        if self._first is None:
            self._first = now
        return now

    def forget(self) -> None:
        """Models were loaded: what is done from now on counts."""
        self._first = None

    def since(self, then: _TrainedModel | None = None) -> bool:
        """Whether anything was trained since then; None: since the first loop began, or the last
        state was loaded."""
        now, then = self._now(), then or self._first
        if then is None:
            return False
        known = then.parameters
        return now.passes != then.passes or any(
            each != known.get(number, (each[0], _NO_GRADIENT))
            for number, each in now.parameters.items()
        )

    def _now(self) -> _TrainedModel:
        found = {}
        models = getattr(self._accelerator(), "_models", ())
        for each in (each for model in models for each in model.parameters()):
            # One of inference mode has no version, and asking for it raises.
            if not each.is_inference():
                # The gradient's too: a fused AdamW leaves the version of what it steps (torch
                # 2.13).
                gradient = _NO_GRADIENT if each.grad is None else each.grad._version
                found[id(each)] = each._version, gradient
        return _TrainedModel(self.passes, found)


@dataclass(frozen=True, slots=True)
class _TrainedModel:
    """passes: so far. parameters: by identity, how often each was changed, and its gradient."""

    passes: int
    parameters: dict[int, tuple[int, int]]


class PlainLoader:
    """One of the loaders that an ``Accelerator`` prepared.

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
        return type(None), ()  # nothing follows a copy of a loader

    @property
    def iteration(self) -> int:
        """How many epochs are done; Accelerate counts when the loop comes back after the last
        batch."""
        running = self._running
        if running is None:
            return int(self.loader.iteration)
        return int(running.loader.iteration) + (running.is_over and not running.has_ended)

    def state_dict(self, delivered: int | None = None) -> dict[str, Any]:
        """Where it is: what of "cursor" is "random" is of this process.

        delivered: batches of this epoch that training was given, over all restarts, if not all that
        were handed out are to count.
        """
        running = self._running
        if self._saved is not None:
            return self._saved  # nothing was asked of it since
        if running is None:
            return {"cursor": self._cursor.state_dict(0), "left": False, "trained": False}
        handed_out = running.before + running.given
        # A loop that trains nothing, in a script that trains, is one of validation: what it found
        # before the save is lost, so the next one begins anew.
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
        """Whether the main process alone loads, and knows where it is."""
        return isinstance(self.loader, DataLoaderDispatcher)

    @property
    def whole(self) -> int:
        """How many batches a whole epoch has."""
        batches = len(self._cursor.stock)
        if not self.is_dispatched or self.loader.split_batches:
            return batches
        ranks = self.loader.state.num_processes
        return int(batches // ranks if self.loader._drop_last else -(-batches // ranks))

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """Go on where ``state`` says, with the next iteration; generators stand as at the save.
        Returns why that cannot be, if it cannot. Raises as ``portus.DataCursor``."""
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
        """What ``stock`` gives. loader: the one, or one that ``skip_first_batches`` made of it."""
        if self._saved is not None and self._saved["left"] and loader is self.loader:
            self._now = None
            self._cursor.forget()
        now, self._now = self._now, None
        saved, iteration = self._saved, self.loader.iteration
        batches = stock(loader)
        first = next(batches, _END)
        # An iterator draws as it is made, and that of the run before was made before the save.
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
                # The loop that went on where the state was trained nothing: so does the next one.
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
            # The script went on with a loader of skip_first_batches; its own has to follow.
            self.loader.iteration = getattr(loader, "iteration", 0)

    def _hand_out(self, epoch: _Epoch) -> None:
        """Note that one more batch of this epoch is handed out: it is the current one, whatever
        other loops over this loader came in between."""
        self._running = epoch
        epoch.given += 1
        epoch.is_over = epoch.fetched_last
        saved, self._saved, self._now = self._saved, None, None
        if saved is not None:  # a state was loaded while this loop went on
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
        """True if it came to its own first batch, and had trained none of those before."""
        self.is_of_training = False
        """True if it goes on with an epoch of training."""
        self.iteration: Final = iteration
        self.before: Final[int] = 0 if iteration is None else iteration.before
        self.given = 0
        self.fetched_last = bool(loader.end_of_dataloader)
        """Whether the batch that was fetched last is the last one."""
        self.is_over = False
        """Nothing is left of it."""
        self.has_ended = False
        """The loop came back after the last batch."""
        self.is_left = False
        """The loop went away."""

    def fetch(self, batches: Iterator[Any]) -> Any:
        """The next batch, not the first. Another loop may have left the loader at its end."""
        stale, self.loader.end_of_dataloader = self.loader.end_of_dataloader, False
        try:
            return next(batches, _END)
        finally:
            self.fetched_last = bool(self.loader.end_of_dataloader)
            self.loader.end_of_dataloader = stale or self.fetched_last

    def look(self) -> None:
        """The loop comes back after a batch. Say so if it passed over as many as were delivered
        before a restart, and began to train with the one after them."""
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
        """Say so if the script passes over other numbers of batches than were handed out, of an
        epoch that is not dealt anew."""
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
        """Whether anything was trained since it began."""
        return self._training.since(self._trained_before)

    @property
    def goes_on(self) -> bool:
        """Whether its loop may ask for another batch."""
        return not (self.has_ended or self.is_left)


def follow(loader: Any, ranks: int, fixed: Literal["local", "global"], training: Training) -> None:
    """Follow a loader that was prepared, if it is a plain one. May be called again."""
    if of(loader) is None and _is_plain(loader):
        PlainLoader(loader, ranks, fixed, training)
        told = portus.SeededDataset.why_not_told(loader.dataset)
        if told:
            _log.warning("Portus: %s", told)


def of(loader: Any) -> PlainLoader | None:
    """Return what follows a loader, also one of ``skip_first_batches``; None if nothing does."""
    found = vars(loader).get(_OWN)
    return found if isinstance(found, PlainLoader) else None


def is_within(state: Mapping[str, Any] | None) -> bool:
    """Whether this state of a plain loader, if it is one, is to be gone on with within an epoch."""
    if state is None or state["left"]:
        return False
    position = state["cursor"]["position"]
    return bool(position["batches"] and not position["is_over"])


def note_skipping(made: Any) -> None:
    """A loader was ``made``: if by ``skip_first_batches`` from one that is followed, it is one
    with it."""
    sampler = _skipping(made)
    cursor = None if sampler is None else portus.DataCursor.of(sampler.batch_sampler)
    plain = None if cursor is None else of(cursor.loader)
    if cursor is not None and plain is not None:
        sampler.batch_sampler = cursor.sampler_after(sampler.skip_batches)
        vars(made)[_OWN] = plain


def tell(reason: str) -> None:
    """Say that the rest of an epoch is not gone on with, and why."""
    _log.warning(
        "Portus: the rest of this epoch does not resume where it was, and samples may be "
        "repeated or missed: %s",
        reason,
    )


def drawing_device() -> torch.device:
    """The device whose generator is drawn from beside those of the CPU, if there is one."""
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
