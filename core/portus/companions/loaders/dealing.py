"""How the index samplers that we know deal an epoch to ranks.

Those of frameworks are known by their names: this floor imports none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from torch.utils.data import BatchSampler, DistributedSampler

from portus.companions.loaders import samplers
from portus.companions.samples.deal import Deal, Tail

Dispatch = Literal["batches", "pieces"]
"""What a process that loads for all ranks hands out: a batch to each, or a piece of one batch."""

_SHARD: Final = ("accelerate.data_loader", "BatchSamplerShard")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochDealing:
    """How one epoch is dealt."""

    batches: BatchSampler | None
    """The sampler that makes batches; None if samples come one by one."""
    dealt: Any
    """The sampler that they are made of."""
    samples: int
    """How many the whole sequence has."""
    rank: int = 0
    ranks: int = 1
    tail: Tail = Tail.EVEN
    pieces: int = 1
    """Ranks that share a batch of ``batches``."""
    for_all: bool = False
    """Whether the loader gives the samples of all ranks, to be dispatched."""

    @property
    def batch(self) -> int:
        """Samples that a rank gets in a step."""
        return 1 if self.batches is None else self.batches.batch_size // self.pieces

    @property
    def at_once(self) -> int:
        """Batches that the loader gives in a step."""
        return self.ranks // self.pieces if self.for_all else 1

    def deal(self, delivered: int = 0) -> Deal:
        """How the samples that are left after ``delivered`` are dealt to all ranks."""
        return Deal(
            samples=self.samples,
            delivered=delivered,
            ranks=self.ranks,
            batch=self.batch,
            tail=self.tail,
            drop_last=self.batches is not None and self.batches.drop_last,
        )

    def of_loader(self, deal: Deal) -> tuple[Deal, int]:
        """Return the same deal as the loader of this rank does it, and which rank it is then."""
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
    """Return how a loader deals; None if that is not known. ranks: processes that train
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
    """Let each rank get ``batch`` samples in a step, from the next epoch that begins on."""
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
        return None  # it may give each rank a part of its own
    return EpochDealing(batches=batches, dealt=dealt, samples=samples)


def _of_one_sequence(stock: Any, **by_ranks: Any) -> EpochDealing | None:
    """Return how ``stock`` batches the whole sequence, which other code deals to ranks as
    ``by_ranks`` says; None if it does not, if that is not known, or if pieces would differ in
    size."""
    way = _of_torch(stock, 1)
    if way is None or way.batches is None or isinstance(way.batches.sampler, DistributedSampler):
        return None
    size, way = way.batches.batch_size, replace(way, **by_ranks)
    return None if size % way.pieces or way.ranks % way.pieces else way


def length(what: object) -> int | None:
    """Return the length of a loader; None if it does not say."""
    try:
        return len(what)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
