"""The settings of saves and loads: declared once, for every way to save.

A setting is one declaration: name, type, default, and the sentence below it. Its type says which
values are allowed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Literal, TypedDict

from portus.engine.extensions import MIRROR_OF, extension
from portus.engine.pipeline.audit import Guard
from portus.engine.settings.fits import Count, Fits, Seconds, SomeBytes, SomeSeconds, refuse_misfits

OnError = Literal["warn", "raise"]


def _is_mirror(value: object) -> bool:
    extension(MIRROR_OF)(str(value))  # raises for what is no address
    return True


MirrorAddress = Annotated[str, Fits("an address", _is_mirror)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How versions are saved and loaded. Raises ``UsageError`` for a value that is not allowed."""

    on_error: OnError = "warn"
    """What the next call does after a failed save: "warn" logs the error and training continues,
    "raise" raises it. Until a first save is committed, the error is raised in any case, by
    ``close`` or the end of the training at the latest: a run that saves nothing must not look like
    one that did. (The next save only logs a save that was given up, see ``AbandonedError``, since
    that next one may succeed.) An existing pool that cannot be opened raises at the start, and a
    new one that cannot be created at the first save, whatever this says."""

    snapshot: Literal["auto", "sync", "device"] = "auto"
    """When a state is copied. "auto": tensors that the fence guards, such as those that optimizers
    write, in the background, and the others before ``save`` returns; device memory is first copied
    on the device if that stalls training less. "sync": everything before ``save`` returns.
    "device": device memory is first copied on the device wherever it fits."""

    verify: bool = True
    """False loads without comparing checksums, at your own risk."""

    fence_timeout: SomeSeconds = 60.0
    """The longest time, in seconds, that an optimizer's step waits for a copy, or a call of save
    for a place in the queue. Then that save is given up and training continues. Keep it below the
    process group's timeout."""

    max_bytes: SomeBytes | None = None
    """The largest size of the pool file, in bytes; None: as large as the disk allows. A storage
    host has its own quotas."""

    guard: Guard = "auto"
    """How Portus checks that a version is the state at the call, although others may write
    meanwhile. "exact" detects every changed byte. "probe" detects a change of a whole tensor, and
    costs less. "auto" is exact if that costs at most 5 ms, or 1 % of the time between saves."""

    journal: bool = True
    """Whether to record saves and restarts beside the pool, for ``portus report``."""

    mirror: MirrorAddress | None = None
    """The address to which committed versions are copied in the background, and from which a run
    with an empty pool resumes: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///path``.
    None: ``$PORTUS_MIRROR``, if it is set; "none": no mirror."""

    mirror_keep: Count = 0
    """How many checkpoints that the run removed stay in the mirror, the newest ones."""

    mirror_wait: Seconds = 600.0
    """The longest time, in seconds, that ``close`` waits for the mirror to catch up."""

    durable: Literal[1, 2] = 1
    """How many storage hosts must have a version before it counts as committed. 2 needs a host
    started with ``--replica``; while the two cannot reach each other, saves fail and training
    continues. With 1, versions committed just before the first host was lost may be lost with it.
    """

    def __post_init__(self) -> None:
        refuse_misfits(type(self), asdict(self))

    @property
    def has_mirror(self) -> bool:
        """True if a run with these settings has a mirror, here or by $PORTUS_MIRROR. Raises
        ``UsageError`` if the variable is no address."""
        return extension(MIRROR_OF)(self.mirror) is not None


class SettingsDict(TypedDict, total=False):
    """``Settings`` as keyword arguments, for type checkers, which do not accept a dataclass there;
    a test compares the two."""

    on_error: OnError
    snapshot: Literal["auto", "sync", "device"]
    verify: bool
    fence_timeout: SomeSeconds
    max_bytes: SomeBytes | None
    guard: Guard
    journal: bool
    mirror: MirrorAddress | None
    mirror_keep: Count
    mirror_wait: Seconds
    durable: Literal[1, 2]
