"""Where a run was in an epoch: what a checkpoint says of it, and whether it fits the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from portus.errors import UsageError

FORMAT: Final = 1

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """How far an epoch was, and how it was dealt.

    What was delivered to training counts; what a loader fetched ahead does not.
    """

    batches: _Count
    """Batches that each rank was given since the epoch began, over all restarts."""
    delivered: _Count
    """Samples of the epoch's sequence, from its start."""
    ranks: _Positive
    batch: _Positive | None
    """Samples that a rank gets in a step; None if that is not known, or not always the same."""
    samples: _Count | None
    """How many the whole sequence has; None if that is not known."""
    data: _Count | None
    """How many samples the dataset has; None if it does not say."""
    fingerprint: str | None = None
    """What the user says the dataset is; None if nothing."""
    dealt_anew: bool = False
    """Whether a restart in this epoch dealt its rest anew, to other ranks or in other batches."""
    is_over: bool = False
    """Whether training was done with this epoch's batches."""
    order: str | None = None
    """A digest of the samples that a rank was given, and that rank: ``"0:1f..."``; None if it is
    not known."""

    def state(self) -> dict[str, object]:
        """Return the fields as plain values, with the number of the format."""
        return {"format": FORMAT, **msgspec.structs.asdict(self)}

    @classmethod
    def of(cls, state: Mapping[str, object]) -> Position:
        """What ``state`` gave. Raises ``UsageError`` for that of a newer Portus, and for what no
        Portus gave."""
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
        """What changed of the dataset since; nothing if nothing is known to have."""
        if self.data is not None and data is not None and self.data != data:
            return f"the dataset had {self.data} samples, and has {data} now"
        if self.fingerprint is not None and self.fingerprint != fingerprint:
            return f"the dataset's fingerprint was {self.fingerprint!r}, and is {fingerprint!r} now"
        return ""
