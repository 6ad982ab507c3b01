"""``DataCursor``: the position of a ``DataLoader`` in its epoch, so a resumed run continues there.

**Theory.** The order of an epoch is fixed when its iterator begins: by the states of generators at
that moment, and by the sampler's own state (a seed, the number of the epoch). So these are noted
then. A resumed run restores them, lets the stock sampler begin as it did, and skips the delivered
samples: their numbers are replayed, never their data. The generators of training do not change.

All ranks take the next samples of one sequence in each step, so the delivered ones are its first
part, whatever the number of ranks was. With other ranks or batches, the sequence is made again and
its rest redistributed (``portus.companions.samples.deal``).

To see iterators being made, the cursor takes the place of the loader's index sampler (its batch
sampler, or its sampler if there are no batches), until it is closed.

Loaders that know their position are asked for it, and so is an ``IterableDataset``: their state is
this rank's, and opaque. For prefetched batches their states are kept, and that of the last
delivered batch is saved. torchdata's ``StatefulDataLoader`` knows its position, but not the origin
of its sampler's order if a framework wrapped the sampler; over a map-style dataset the cursor
follows it like any ``DataLoader``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any, Final, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset

from portus.companions.loaders import samplers
from portus.companions.loaders.randomness import capture_randomness, restore_randomness
from portus.companions.samples.deal import Deal, batch_of_ranks
from portus.companions.samples.position import Position
from portus.errors import UsageError

_log: Final = logging.getLogger("portus")

_CPU: Final = torch.device("cpu")
_END: Final = object()

_Start = Mapping[str, Any]
"""The origin of one epoch's order, as its iterator began: states of the loader's generators and of
its "samplers", how to make the whole "sequence", and the states of the global generators."""


class DataCursor:
    """Tracks the position of a data loader, and resumes it at the position of another run.

    Args:
        loader: A ``DataLoader`` of a map-style dataset, whose iterators are tracked from now on. Or
            a loader with ``state_dict`` and ``load_state_dict``, or a ``DataLoader`` without
            workers whose ``IterableDataset`` has them; these track their own position.
        ranks: The number of processes that train together. With a ``DistributedSampler`` they share
            the samples; without one, each process has all of them.
        fixed: The batch that stays the same if the number of ranks changes: "local", the batch of
            each rank, or "global", the number of samples in a step of all ranks.
        dispatch: If one process loads for all ranks, it gives them "batches", one for each rank, or
            "pieces" of one batch. None: each rank loads for itself.

    A dataset is recognised by its length, and by its attribute ``fingerprint`` if that is a text.
    Raises ``UsageError`` for another ``fixed``, and for a loader whose position is unknown.
    """

    is_asked: bool = False
    """True if the loader, or its dataset, gives its position itself."""

    newest: Iteration | None = None
    """The iteration that began last."""

    _waiting: _Resume | None = None
    """The epoch that the next iterator continues."""

    _over: Mapping[str, Any] | None = None
    """The state of an epoch's end that was loaded, until the next one begins."""

    def __new__(cls, loader: Any, *, fixed: str = "local", **_: Any) -> DataCursor:
        reason = cls.why_not(loader)
        if reason:
            raise UsageError(f"loader: {reason}")
        if fixed not in ("local", "global"):
            raise UsageError(f"fixed: expected 'local' or 'global', found {fixed!r}")
        return super().__new__(_AskingCursor if _who_knows(loader) is not None else cls)

    @staticmethod
    def why_not(loader: object) -> str:
        """Return why the position of ``loader`` cannot be known; "" if it can."""
        if _who_knows(loader) is not None:
            return ""
        # Others get the numbers of their samples from a sampler.
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            return ""
        if not isinstance(loader, DataLoader):
            return (
                f"expected a DataLoader, or one with state_dict and load_state_dict, found "
                f"{_name(loader)}"
            )
        if not _has_state(loader.dataset):
            return (
                f"its position in its IterableDataset is unknown: {_name(loader.dataset)} has "
                "no state_dict and load_state_dict"
            )
        return (
            f"its {_name(loader.dataset)} has state_dict, but workers read it, where Portus "
            "cannot call it: use torchdata's StatefulDataLoader, or num_workers=0"
        )

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        ranks: int = 1,
        fixed: Literal["local", "global"] = "local",
        dispatch: samplers.Dispatch | None = None,
    ) -> None:
        self.loader: Any = loader
        self._fixed: Final = fixed
        self._where: Final = "sampler" if loader.batch_sampler is None else "batch_sampler"
        before = DataCursor.of(getattr(loader, self._where))
        if before is not None:  # of a Trainer that did not reach its end
            before.close()
        self.stock: Any = getattr(loader, self._where)
        self._way: Final = samplers.way_of(self.stock, ranks, dispatch)
        self._ranks = ranks if self._way is None else self._way.ranks
        self._batch_before: int | None = None
        """The loader's own batch, if another one replaces it."""
        self._place(_FollowedSampler(self))

    @staticmethod
    def of(sampler: object) -> DataCursor | None:
        """Return the cursor that follows the loader with this index sampler; None if none does."""
        return sampler.cursor if type(sampler) is _FollowedSampler else None

    @property
    def batches(self) -> int:
        """Return the batches that the loader gives in the epoch, including those before a restart:
        the epoch to continue, else the newest one. Raise ``TypeError`` if the sampler has no
        length."""
        resume = self._waiting
        if resume is None and self.newest is not None:
            resume = self.newest.resume
        if resume is None or resume.deal is None:
            return len(self.stock)
        assert self._way is not None
        own, rank = self._way.of_loader(resume.deal)
        return resume.position.batches * self.at_once + own.batches(rank)

    @property
    def at_once(self) -> int:
        """Return the batches that the loader gives in a step."""
        return 1 if self._way is None else self._way.at_once

    def sampler_after(self, batches: int) -> Any:
        """Return the loader's index sampler for a caller that skips its first ``batches`` itself:
        those delivered before a restart are among them."""
        return _FollowedSampler(self, batches)

    def state_dict(
        self, delivered: int, *, is_over: bool = False, iterator: object | None = None
    ) -> dict[str, object]:
        """Return the position in the epoch of this rank's loader, as numbers, texts and tensors.

        delivered: the number of batches that training has received in this epoch, in all restarts.
        is_over: True if training is done with this epoch, even if the loader has more.
        iterator: the iterator of this loader that training uses, or the value that ``newest`` had
            when it began; None: the one that was made last.
        """
        running = getattr(iterator, "_sampler_iter", iterator)
        if not isinstance(running, Iteration):
            running = self.newest
        if self._over is not None:
            return dict(self._over)
        pending = None if is_over else self._pending(running, delivered)
        if pending is not None:
            # As loaded: asking for a first sample here would begin the epoch (decision 0128).
            return dict(pending.loaded)
        start = None if running is None or is_over else running.start
        return {
            "position": self._position(delivered, is_over, running).state(),
            "start": start,
            "now": self.note(None),
            "asked": 0 if running is None else running.request_count,
        }

    def _pending(self, running: Iteration | None, delivered: int) -> _Resume | None:
        """Return the resumed epoch, if training has received nothing since, so its state holds."""
        resume = self._waiting
        if running is not None and (running.has_begun or resume is None):
            resume = running.resume
        is_pending = resume is not None and resume.position.batches == delivered
        return resume if is_pending else None

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        """Resume at the position in ``state``, with the next iterator of the loader.

        Returns the reason if the rest of the epoch cannot be resumed, and "" if it can. Raises
        ``UsageError`` for the state of a newer Portus, and if ``fixed`` is "global" and the samples
        of a step cannot be divided evenly among the ranks; then nothing has changed.
        """
        position = Position.of(state["position"])
        batch = self._batch_for(position)
        reason = position.describe_change(*self._data)
        self._waiting = self._over = None
        if not reason and position.is_over:
            self._over = state
        elif not reason:
            self._waiting, reason = self._resume(position, state, batch)
        if batch is not None:
            self._change_batch(batch)
        # The seed of all epochs, whatever seed this run was given.
        for saved in state["now"]["samplers"][-1:]:
            samplers.put_seed(samplers.chain(self.stock)[-1], saved)
        return reason

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Restore the generators of the loader and of its samplers as at the save: for a run that
        begins its next epoch. In a run that continues within an epoch its iterator does."""
        self._over = None
        self._put(state["now"])

    def forget(self) -> None:
        """Forget the position to resume at: the next epoch is stock's."""
        self._waiting = self.newest = self._over = None

    def keep(self, fetched: int) -> None:
        """Keep the state after ``fetched`` batches, before a prefetching caller requests one more.
        ``state_dict`` then returns that state once so many were delivered, if ``fetched`` is one of
        the last two numbers."""

    def close(self) -> None:
        """Restore the loader's own sampler and batch. May be called again."""
        if self._batch_before is not None:
            self._change_batch(self._batch_before)
            self._batch_before = None
        placed = getattr(self.loader, self._where)
        if isinstance(placed, _FollowedSampler) and placed.cursor is self:
            self._place(self.stock)

    # For the loader.

    def begin(self, passed_over: int) -> Iteration:
        """Begin an iteration; called twice for one epoch if there are workers."""
        self.newest = Iteration(self, self._waiting, passed_over)
        return self.newest

    def start(
        self, resume: _Resume | None, order: samplers.DeliveredOrder
    ) -> tuple[_Start, Iterator[Any] | None]:
        """Return the origin of the first samples' order, and the rest, if that is not all. Add the
        skipped samples to ``order``; log if it differs from the earlier one. Raise ``UsageError``
        if samplers give fewer samples than before."""
        self._over = None
        if resume is None:
            return self.note(capture_randomness(_CPU)), None
        if self._waiting is resume:
            self._waiting = None
        if resume.start is None:
            self._put(resume.loaded["now"])
            return self.note(capture_randomness(_CPU)), None
        now = capture_randomness(_CPU)
        # A sampler without a generator draws its order from torch's: as it was when the epoch
        # began.
        restore_randomness(resume.start["random"], _CPU)
        try:
            if resume.deal is not None:
                self._put(
                    resume.loaded["now"]
                )  # it has drawn the whole order: the next epoch follows
                return resume.start, self._deal(resume.start, resume.deal)
            self._put(resume.start)
            return resume.start, self._skip(resume, order)
        finally:
            restore_randomness(now, _CPU)

    def note(self, random: torch.Tensor | None) -> _Start:
        """Return the origin of the order of an epoch that begins now. random: the states of the
        global generators."""
        return {
            "loader": samplers.generators_of(self.loader),
            "samplers": [samplers.state_of(each) for each in samplers.chain(self.stock)],
            "sequence": None if self._way is None else samplers.sequence_of(self._way.dealt),
            "random": random,
        }

    def _skip(self, resume: _Resume, order: samplers.DeliveredOrder) -> Iterator[Any]:
        """Return the rest of the stock sampler. With prefetching, the sampler was asked for more
        than was delivered: so it is again, and its generators end in the same state, though other
        loaders may have drawn from them since the epoch began."""
        batches, count = iter(self.stock), resume.position.batches * self.at_once
        for number in range(count):
            batch = next(batches, _END)
            if batch is _END:
                raise UsageError(
                    f"{_name(self.stock)} gave {number} batches this time, and {count} of this "
                    "epoch were delivered before: its length is "
                    f"{samplers.length(self.stock)}. Its order must be the same whenever it starts "
                    "with the same seeds and generators"
                )
            order.add(batch)
        self._compare(resume.position, order.after(count))
        asked = resume.loaded.get("asked")
        if asked is None or samplers.is_torchdatas(self.loader, "state_dict"):
            # The next one too: samplers may draw only at the first request.
            return _ResumedIterator(batches, 1)
        # As many requests as before the save: stock samplers draw at the first index, and once more
        # at the end (decision 0128).
        ahead = _ResumedIterator(batches, asked - count)
        samplers.put_generators(self.loader, resume.loaded["now"]["loader"])
        own = samplers.chain(self.stock)
        for each, state in zip(own, resume.loaded["now"]["samplers"], strict=True):
            samplers.put_generators(each, state.get("generators", {}))
        return ahead

    def _compare(self, position: Position, order: str | None) -> None:
        """Warn if the sampler gave other samples for those delivered before."""
        rank, _, digest = (position.order or "").partition(":")
        if order is not None and digest not in ("", order) and rank == str(_rank()):
            _log.warning(
                "portus: %s gave other samples than before the restart for the %d batches of this "
                "epoch that were delivered: from here on samples are repeated and missed. Its "
                "order must follow from its seeds, its generators and its epoch alone, without a "
                "counter of its own: give the sampler state_dict and load_state_dict, or "
                "set_epoch",
                _name(samplers.chain(self.stock)[-1]),
                position.batches,
            )

    def _deal(self, start: _Start, deal: Deal) -> Iterator[Any]:
        sequence = samplers.sequence(start["sequence"])
        if len(sequence) != deal.samples:
            raise UsageError(
                f"the sampler announced {deal.samples} samples, and gave {len(sequence)}"
            )
        assert self._way is not None
        own, rank = self._way.of_loader(deal)
        batches = ([sequence[place] for place in each] for each in own.places(rank))
        if self._way.batches is not None:
            return batches
        return (sample for each in batches for sample in each)

    def _resume(
        self, position: Position, state: Mapping[str, Any], batch: int | None
    ) -> tuple[_Resume | None, str]:
        if state["start"] is None and position.batches:
            return None, "the origin of its order is unknown"
        if state["start"] is None:
            return _Resume(position, None, None, state), ""
        start = state["start"]
        own = self._batch if batch is None else batch
        samples = None if self._way is None else self._way.samples
        if None not in (position.samples, samples) and position.samples != samples:
            return None, f"its sampler had {position.samples} samples, and has {samples} now"
        same = (position.ranks, position.batch) == (self._ranks, own)
        if same and not position.dealt_anew:
            own_samplers = samplers.chain(self.stock)
            if len(start["samplers"]) != len(own_samplers):
                return None, "its samplers are different now"
            for each, was in zip(own_samplers, start["samplers"], strict=True):
                name = samplers.mismatched_number(each, was)
                if name:
                    return None, f"its {_name(each)} does not let its {name} be set"
            return _Resume(position, start, None, state), ""
        before = f"{position.ranks} ranks with {position.batch or 'unknown'} samples each"
        after = f"{self._ranks} ranks with {own or 'unknown'} samples each"
        if (
            self._way is None
            or start["sequence"] is None
            or position.samples is None
            or own is None
        ):
            return None, (
                f"it was dealt to {before} in a step, and is to be dealt to {after}, and the "
                f"order of its sampler is unknown ({_name(samplers.chain(self.stock)[-1])})"
            )
        deal = replace(self._way.deal(position.delivered), batch=own)
        return _Resume(position, start, deal, state), ""

    def _position(self, delivered: int, is_over: bool, running: Iteration | None) -> Position:
        resume = None if running is None else running.resume
        deal, before, digest = None, 0, None
        dealt_anew = resume is not None and resume.deal is not None
        if resume is not None and resume.deal is not None:
            # No digest: other ranks got the first part.
            deal, before = resume.deal, resume.position.batches
        else:
            deal = None if self._way is None else self._way.deal()
            digest = None if running is None else running.order.after(delivered * self.at_once)
        data, fingerprint = self._data
        return Position(
            batches=delivered,
            delivered=0 if deal is None else deal.after(delivered - before),
            ranks=self._ranks,
            batch=self._batch,
            samples=None if deal is None else deal.samples,
            data=data,
            fingerprint=fingerprint,
            dealt_anew=dealt_anew,
            is_over=is_over,
            order=None if digest is None else f"{_rank()}:{digest}",
        )

    def _batch_for(self, position: Position) -> int | None:
        """Return each rank's new batch, if it has to change for a step to have as many samples."""
        if self._fixed == "local" or position.batch is None or self._batch is None:
            return None
        batch = batch_of_ranks(position.ranks * position.batch, self._ranks)
        return None if batch == self._batch else batch

    def _put(self, start: _Start) -> None:
        samplers.put_generators(self.loader, start["loader"])
        own = samplers.chain(self.stock)
        if len(own) == len(start["samplers"]):
            for each, state in zip(own, start["samplers"], strict=True):
                samplers.put(each, state)

    def _change_batch(self, batch: int) -> None:
        assert self._way is not None
        if self._batch_before is None:
            self._batch_before = self._way.batch
        samplers.change_batch(self.stock, self._way, batch)

    @property
    def _data(self) -> tuple[int | None, str | None]:
        """Return the length and the fingerprint of the dataset, as far as it has them."""
        dataset = getattr(self.loader, "dataset", None)
        fingerprint = getattr(dataset, "fingerprint", None)
        return samplers.length(dataset), fingerprint if isinstance(fingerprint, str) else None

    def _place(self, sampler: object) -> None:
        # A DataLoader refuses assignment of another sampler, and a new loader would need the
        # arguments of this one's class.
        object.__setattr__(self.loader, self._where, sampler)
        kept = getattr(self.loader, "_iterator", None)
        if kept is not None and hasattr(kept, "_index_sampler"):
            kept._index_sampler = sampler  # persistent workers keep the sampler they were made with

    @property
    def _batch(self) -> int | None:
        return None if self._way is None else self._way.batch


class _AskingCursor(DataCursor):
    """A cursor for a loader that knows its position, or whose dataset does."""

    is_asked = True

    def __init__(self, loader: Any, *, ranks: int = 1, **_: Any) -> None:
        self.loader = self.stock = loader
        self._asked: Final = _who_knows(loader)
        self._ranks = ranks
        self._kept: dict[int, Any] = {}

    @property
    def batches(self) -> int:
        return len(self.loader)

    def state_dict(
        self, delivered: int, *, is_over: bool = False, iterator: object | None = None
    ) -> dict[str, object]:
        kept = None if is_over else self._kept.get(delivered)
        data, fingerprint = self._data
        position = Position(
            batches=delivered,
            delivered=0,
            ranks=self._ranks,
            batch=None,
            samples=None,
            data=data,
            fingerprint=fingerprint,
            is_over=is_over,
        )
        return {
            "position": position.state(),
            "start": None,
            "now": {"loader": {}, "samplers": []},
            "own": self._state() if kept is None else kept,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> str:
        position = Position.of(state["position"])
        reason = position.describe_change(*self._data)
        if not reason and state.get("own") is None:
            reason = f"its {_name(self._asked)} was not asked for its position"
        if not reason:
            self._asked.load_state_dict(deepcopy(state["own"]))
            if position.is_over and samplers.is_torchdatas(self.loader, "state_dict"):
                # The next iterator is that of the old epoch; sometimes it is made, and another one
                # in its place, which draws twice.
                iter(self.loader)
        if not reason and position.ranks != self._ranks:
            reason = (
                f"it was on {position.ranks} ranks, and is on {self._ranks} now: whether each "
                f"sample comes once depends on {_name(self._asked)}, which got the state of "
                "one of them"
            )
        return reason

    def keep(self, fetched: int) -> None:
        self._kept = {each: kept for each, kept in self._kept.items() if each == fetched - 1}
        self._kept[fetched] = self._state()

    def close(self) -> None:
        """Do nothing: nothing of the loader was changed."""

    def _state(self) -> Any:
        return deepcopy(self._asked.state_dict())  # the owner may change its state later


class Iteration(Iterator[Any]):
    """The numbers of the samples of one epoch, in batches, as a loader asks for them."""

    def __init__(self, cursor: DataCursor, resume: _Resume | None, passed_over: int) -> None:
        self._cursor: Final = cursor
        self._passed_over: Final = passed_over
        self.resume: Final = resume
        delivered = None if resume is None or resume.start is None else resume.position.batches
        self.before: Final[int] = passed_over // cursor.at_once if delivered is None else delivered
        """The batches of its epoch that each rank got before it."""
        self.start: _Start | None = None
        """The origin of its order; None before it has begun."""
        self.order: Final = samplers.DeliveredOrder()
        """The order of its samples, and of those delivered before a restart."""
        self.has_begun = False
        self._asked = 0
        before = cursor.note(capture_randomness(_CPU))
        self._left = iter(cursor.stock) if resume is None else iter(())
        self._stock: Any = self._left if resume is None else None
        """The stock sampler's iterator; None before it began, and for redistributed samples."""
        # Samplers draw or count at the first request. One that did so now has begun.
        if not samplers.is_same(cursor.note(capture_randomness(_CPU)), before):
            self.start, self.has_begun = before, True

    def __next__(self) -> Any:
        if not self.has_begun:
            self.has_begun = True
            self.start, left = self._cursor.start(self.resume, self.order)
            if left is not None:
                self._left = chain(repeat([], self._passed_over), left)
                self._stock = left.rest if isinstance(left, _ResumedIterator) else None
            elif self.resume is not None:
                self._left = self._stock = iter(self._cursor.stock)
        self._asked += 1
        given = next(self._left)
        is_filler = self.resume is not None and self._asked <= self._passed_over
        if not is_filler or self.resume is None or self.resume.start is None:
            self.order.add(given)
        return given

    @property
    def request_count(self) -> int:
        """Return the number of requests to the sampler, over all restarts."""
        if self.resume is None or self.resume.start is None:
            return self._asked
        delivered = self.resume.position.batches * self._cursor.at_once
        return delivered + max(0, self._asked - self._passed_over)

    # For torchdata's loader, whose checkpoints can also be resumed without a cursor.

    def state_dict(self) -> Any:
        """Return the stock iterator's state; for a redistributed epoch {}: torchdata refuses it."""
        return self._stock.state_dict() if _has_state(self._stock) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the position of a loader that no cursor followed."""
        if self.resume is None and _has_state(self._stock):
            self._stock.load_state_dict(state)


class _ResumedIterator(Iterator[Any]):
    """The iterator ``rest`` after ``count`` requests, with their results first."""

    def __init__(self, rest: Iterator[Any], count: int) -> None:
        asked = (next(rest, _END) for _ in range(count))
        self._first: Final = deque(each for each in asked if each is not _END)
        self.rest: Final = rest

    def __next__(self) -> Any:
        return self._first.popleft() if self._first else next(self.rest)


class _FollowedSampler:
    """The stand-in for a loader's index sampler. Code that asks for its class, uses its attributes
    or copies it reaches the stock sampler."""

    cursor: DataCursor
    stock: Any
    passed_over: int
    """The batches that the caller discards."""

    def __init__(self, cursor: DataCursor, passed_over: int = 0) -> None:
        vars(self).update(cursor=cursor, stock=cursor.stock, passed_over=passed_over)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # Frameworks test by isinstance which sampler a loader has, and make new loaders by that.
        return type(self.stock)

    def __iter__(self) -> Iterator[Any]:
        return self.cursor.begin(self.passed_over)

    def __len__(self) -> int:
        return self.cursor.batches

    def __getattr__(self, name: str) -> Any:
        # Before __init__, as in a copy, there is no stock: the lookup would recurse for ever.
        if name.startswith("__") or name in ("cursor", "stock", "passed_over"):
            raise AttributeError(name)
        return getattr(self.stock, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.stock, name, value)

    def __reduce__(self) -> Any:
        # A worker that is spawned, or a copy of the loader, gets the stock sampler.
        return _as_it_is, (self.stock,)


@dataclass(frozen=True, slots=True)
class _Resume:
    """An epoch to continue."""

    position: Position
    start: _Start | None
    """None: its first sample was not requested."""
    deal: Deal | None
    """The redistribution of its rest; None: the stock samplers distribute it, as before."""
    loaded: Mapping[str, Any]
    """The state that it was made from."""


def _who_knows(loader: object) -> Any:
    """Return the owner of the position: the loader, or its dataset; None if neither knows it."""
    dataset = getattr(loader, "dataset", None)
    is_stream = isinstance(dataset, IterableDataset)
    if samplers.is_torchdatas(loader, "state_dict"):
        return loader if is_stream or _has_state(dataset) else None
    if _has_state(loader):
        return loader
    is_here = is_stream and isinstance(loader, DataLoader) and loader.num_workers == 0
    return dataset if is_here and _has_state(dataset) else None


def _has_state(what: object) -> bool:
    methods = (getattr(what, name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, methods))


def _as_it_is(stock: Any) -> Any:
    """Return the sampler of a followed loader's copy: no cursor follows the copy."""
    return stock


def _rank() -> int:
    """Return the rank of this process among those that train together."""
    distributed = torch.distributed
    is_one = not distributed.is_available() or not distributed.is_initialized()
    return 0 if is_one else distributed.get_rank()


def _name(what: object) -> str:
    return type(what).__name__
