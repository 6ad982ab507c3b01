"""The distribution of an epoch to ranks, as the known index samplers do it.

Frameworks' samplers are recognized by their names: this layer imports none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from torch.utils.data import BatchSampler, DistributedSampler

from portus.companions.loaders import samplers
from portus.companions.samples.deal import Deal, Tail

Dispatch = Literal["batches", "pieces"]
"""The parts that a process that loads for all ranks gives them: batches, or pieces of one batch."""

_SHARD: Final = ("accelerate.data_loader", "BatchSamplerShard")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochDealing:
    """The distribution of one epoch."""

    batches: BatchSampler | None
    """The sampler that makes batches; None if samples come one by one."""
    dealt: Any
    """The sampler whose samples they contain."""
    samples: int
    """The number of samples in the whole sequence."""
    rank: int = 0
    ranks: int = 1
    tail: Tail = Tail.EVEN
    pieces: int = 1
    """The number of ranks that share a batch of ``batches``."""
    for_all: bool = False
    """Whether the loader gives the samples of all ranks, to be dispatched."""

    @property
    def batch(self) -> int:
        """Return the samples that a rank gets in a step."""
        return 1 if self.batches is None else self.batches.batch_size // self.pieces

    @property
    def at_once(self) -> int:
        """Return the batches that the loader gives in a step."""
        return self.ranks // self.pieces if self.for_all else 1

    def deal(self, delivered: int = 0) -> Deal:
        """Return the distribution of the samples after ``delivered`` to all ranks."""
        return Deal(
            samples=self.samples,
            delivered=delivered,
            ranks=self.ranks,
            batch=self.batch,
            tail=self.tail,
            drop_last=self.batches is not None and self.batches.drop_last,
        )

    def of_loader(self, deal: Deal) -> tuple[Deal, int]:
        """Return the same distribution as this rank's loader does it, and this rank in it."""
        if not self.for_all:
            return deal, self.rank
        together = Deal(
            samples=deal.samples,
            delivered=deal.delivered,
            batch=deal.batch * self.pieces,
            drop_last=deal.drop_last,
        )
        return together, 0


def way_of(stock: Any, ranks: int, dispatch: Dispatch | None) -> EpochDealing | None:
    """Return the distribution of a loader; None if it is unknown. ranks: processes that train
    together."""
    if (type(stock).__module__, type(stock).__qualname__) == _SHARD:
        return _of_one_sequence(
            stock.batch_sampler,
            rank=stock.process_index,
            ranks=stock.num_processes,
            tail=Tail.FULL if stock.even_batches else Tail.ASIS,
            pieces=stock.num_processes if stock.split_batches else 1,
        )
    if dispatch is not None:
        pieces = ranks if dispatch == "pieces" else 1
        return _of_one_sequence(stock, ranks=ranks, tail=Tail.ASIS, pieces=pieces, for_all=True)
    return _of_torch(stock, ranks)


def change_batch(stock: Any, way: EpochDealing, batch: int) -> None:
    """Let each rank get ``batch`` samples in a step, from the next epoch on."""
    for each in samplers.chain(stock):
        if isinstance(each, BatchSampler) and hasattr(each, "batch_size"):
            each.batch_size = batch * way.pieces


def _of_torch(stock: Any, ranks: int) -> EpochDealing | None:
    is_batched = isinstance(stock, BatchSampler)
    is_stock = type(stock).__iter__ is BatchSampler.__iter__
    if is_batched and not (is_stock or samplers.is_torchdatas(stock, "__iter__")):
        return None
    dealt = stock.sampler if is_batched else stock
    batches = stock if is_batched else None
    if isinstance(dealt, DistributedSampler):
        samples = length(dealt.dataset)
        if samples is None:
            return None
        return EpochDealing(
            batches=batches,
            dealt=dealt,
            samples=samples,
            rank=dealt.rank,
            ranks=dealt.num_replicas,
            tail=Tail.CUT if dealt.drop_last else Tail.EVEN,
        )
    samples = length(dealt)
    if samples is None or isinstance(dealt, BatchSampler):
        return None
    if ranks > 1 and samplers.sequence_of(dealt) is None:
        return None  # it may give each rank its own part
    return EpochDealing(batches=batches, dealt=dealt, samples=samples)


def _of_one_sequence(stock: Any, **by_ranks: Any) -> EpochDealing | None:
    """Return the batching by ``stock`` of the whole sequence, which other code distributes to ranks
    as ``by_ranks`` says; None if it does not, if that is unknown, or if pieces would differ in
    size."""
    way = _of_torch(stock, 1)
    if way is None or way.batches is None or isinstance(way.batches.sampler, DistributedSampler):
        return None
    size, way = way.batches.batch_size, replace(way, **by_ranks)
    return None if size % way.pieces or way.ranks % way.pieces else way


def length(what: object) -> int | None:
    """Return the length of a loader; None if it has none."""
    try:
        return len(what)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
