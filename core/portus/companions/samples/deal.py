"""The dealing of the rest of an epoch's sequence to ranks, as the stock samplers deal all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from portus.errors import UsageError


class Tail(Enum):
    """How ranks get samples in turn, and what happens to the last ones if there is not one for each
    turn."""

    EVEN = "even"
    """One sample each, as torch's ``DistributedSampler`` deals. Samples from the start of the
    sequence are repeated until each rank has the same number."""
    CUT = "cut"
    """One sample each. The last ones are left out, so that each rank has the same number."""
    FULL = "full"
    """A batch each, as Accelerate deals. Samples from the start are repeated until each rank's last
    batch is full. This is also for split batches, whose pieces are the batches here."""
    ASIS = "as is"
    """A batch each. Some ranks may get fewer samples, and one batch less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """The dealing of the samples of an epoch that are left.

    Places are those in the epoch's sequence. All ranks get the same number of batches, except with
    ``Tail.ASIS``. Raises ``UsageError`` for numbers out of range.
    """

    samples: int
    """The number of samples in the whole sequence."""
    delivered: int = 0
    """The number of samples that were delivered, from the start of the sequence."""
    ranks: int = 1
    batch: int = 1
    """Samples that a rank gets in a step."""
    tail: Tail = Tail.EVEN
    drop_last: bool = False
    """True to leave out a rank's last batch unless it is full."""

    def __post_init__(self) -> None:
        for name, least in (("samples", 0), ("delivered", 0), ("ranks", 1), ("batch", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"{name}: expected a number, {least} or more, found {value!r}")
        if self.delivered > self.samples:
            raise UsageError(
                f"delivered: expected at most the {self.samples} samples of the epoch, found "
                f"{self.delivered}"
            )

    @property
    def step(self) -> int:
        """Samples that all ranks get in a step."""
        return self.ranks * self.batch

    def batches(self, rank: int) -> int:
        """Return how many batches ``rank`` still gets."""
        dealt = self._count_of(rank)
        return dealt // self.batch if self.drop_last else -(-dealt // self.batch)

    def places(self, rank: int) -> Iterator[list[int]]:
        """Yield the batches that ``rank`` still gets."""
        dealt = self._count_of(rank)
        for number in range(self.batches(rank)):
            first = number * self.batch
            last = min(first + self.batch, dealt)
            yield [self._place(rank, each) for each in range(first, last)]

    def after(self, batches: int) -> int:
        """Return how many samples are delivered after ``batches`` more batches of each rank."""
        return min(self.samples, self.delivered + batches * self.step)

    def _count_of(self, rank: int) -> int:
        """Return how many samples ``rank`` gets, repeated ones included."""
        left = self.samples - self.delivered
        if self.tail is Tail.EVEN:
            return -(-left // self.ranks)
        if self.tail is Tail.CUT:
            return left // self.ranks
        steps, rest = divmod(left, self.step)
        if self.drop_last or not rest:
            return steps * self.batch
        if self.tail is Tail.FULL:
            return (steps + 1) * self.batch
        own = max(0, min(self.batch, rest - rank * self.batch))
        return steps * self.batch + own

    def _place(self, rank: int, number: int) -> int:
        """Return the place in the sequence of the ``number``-th sample of ``rank``."""
        if self.tail in (Tail.EVEN, Tail.CUT):
            place = self.delivered + number * self.ranks + rank
        else:
            step, within = divmod(number, self.batch)
            place = self.delivered + step * self.step + rank * self.batch + within
        # Past the end the sequence repeats, more than once if it is short.
        return place if place < self.samples else (place - self.samples) % self.samples


def batch_of_ranks(step: int, ranks: int) -> int:
    """Return the samples for each rank, if a step has ``step`` samples whatever the number of
    ranks. Raise ``UsageError`` if they cannot all get the same number."""
    if step % ranks:
        fits = [str(count) for count in range(1, step + 1) if step % count == 0]
        raise UsageError(
            f"a step of {step} samples cannot be dealt to {ranks} ranks evenly: expected "
            f"{_list(fits)} ranks, or let each rank's batch stay as it is"
        )
    return step // ranks


def _list(fits: list[str]) -> str:
    shown = fits if len(fits) <= _FITS_MAX else [*fits[: _FITS_MAX - 1], "...", fits[-1]]
    return ", ".join(shown[:-1]) + f" or {shown[-1]}" if len(shown) > 1 else shown[0]


_FITS_MAX: Final = 8
