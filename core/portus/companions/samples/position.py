"""The position of a run in an epoch, as a checkpoint has it, and whether it fits the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from portus.errors import UsageError

FORMAT: Final = 1

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of an epoch, and how the epoch was dealt.

    Only samples that were delivered to training count, not those that a loader fetched ahead.
    """

    batches: _Count
    """Batches that each rank was given since the epoch began, restarts included."""
    delivered: _Count
    """Samples of the epoch's sequence, from its start."""
    ranks: _Positive
    batch: _Positive | None
    """Samples that a rank gets in a step; None if unknown, or not always the same."""
    samples: _Count | None
    """The number of samples in the whole sequence; None if unknown."""
    data: _Count | None
    """The number of samples in the dataset; None if unknown."""
    fingerprint: str | None = None
    """The user's identifier of the dataset; None if there is none."""
    dealt_anew: bool = False
    """True if a restart in this epoch dealt its rest again, to other ranks or in other batches."""
    is_over: bool = False
    """True if training was done with this epoch's batches."""
    order: str | None = None
    """A digest of the samples that a rank was given, and that rank: ``"0:1f..."``; None if
    unknown."""

    def state(self) -> dict[str, object]:
        """Return the fields as plain values, with the number of the format."""
        return {"format": FORMAT, **msgspec.structs.asdict(self)}

    @classmethod
    def of(cls, state: Mapping[str, object]) -> Position:
        """Return the position of a ``state``. Raise ``UsageError`` for one of a newer Portus, and
        for a wrong one."""
        found = state.get("format")
        if isinstance(found, int) and not isinstance(found, bool) and found > FORMAT:
            raise UsageError(
                f"the position in the data has format {found}, and this Portus knows {FORMAT}: "
                "resume with the Portus that saved it, or a newer one"
            )
        if found != FORMAT:
            raise UsageError(
                f"the position in the data: expected format {FORMAT}, found {found!r}: this "
                "checkpoint was changed, or not saved by Portus"
            )
        try:
            return msgspec.convert(dict(state), cls)
        except msgspec.ValidationError as error:
            raise UsageError(f"the position in the data: {error}") from error

    def describe_change(self, data: int | None, fingerprint: str | None) -> str:
        """Return how the dataset changed since; "" if no change is known."""
        if self.data is not None and data is not None and self.data != data:
            return f"the dataset had {self.data} samples, and has {data} now"
        if self.fingerprint is not None and self.fingerprint != fingerprint:
            return f"the dataset's fingerprint was {self.fingerprint!r}, and is {fingerprint!r} now"
        return ""
