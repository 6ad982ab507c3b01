"""How a run saves and loads: said once, for every way to save."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, TypedDict

from portus.client.snapshot import SnapshotMode
from portus.errors import UsageError
from portus.pipeline.audit import GUARDS, Guard

OnError = Literal["warn", "raise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How versions are saved and loaded. Raises ``UsageError`` for what makes no sense.

    Args:
        on_error: What the next call does after a save failed: "warn" logs it and training goes on,
            "raise" raises it. Until a first save is committed it is raised in any case, and by
            ``close`` or the end of the training at the latest: a run that saves nothing must not
            look like one that did. (One that was given up, see ``AbandonedError``, is only logged
            by the next save: that one may come through.) A pool that cannot be opened at the start
            raises always.
        snapshot: "auto" copies what the fence guards, such as what optimizers write, in the
            background and the rest at once; "sync" copies all at once; "device" clones device
            memory on the device first, if it fits.
        verify: False loads without comparing checksums, on your own account.
        fence_timeout: The longest, in seconds, that an optimizer's step waits for a copy, or a
            call of save for its place in the queue; then that save is given up and training goes
            on. Keep it under the process group's time-out.
        max_bytes: The pool file does not grow beyond this many bytes. A storage host has quotas of
            its own.
        guard: How a version is made sure of to be the state at the call, whoever writes meanwhile.
            "exact" notices every byte; "probe" sees what changes a whole tensor, and costs less;
            "auto" is exact wherever that costs at most 5 ms, or 1 % of the time between saves.
    """

    on_error: OnError = "warn"
    snapshot: Literal["auto", "sync", "device"] = "auto"
    verify: bool = True
    fence_timeout: float = 60.0
    max_bytes: int | None = None
    guard: Guard = "auto"

    def __post_init__(self) -> None:
        if self.on_error not in ("warn", "raise"):
            raise UsageError(f"on_error: expected 'warn' or 'raise', found {self.on_error!r}")
        modes = [mode.value for mode in SnapshotMode]
        if self.snapshot not in modes:
            raise UsageError(f"snapshot: expected one of {modes}, found {self.snapshot!r}")
        if not isinstance(self.verify, bool):
            raise UsageError(f"verify: expected True or False, found {self.verify!r}")
        if not (isinstance(self.fence_timeout, int | float) and self.fence_timeout > 0):
            raise UsageError(
                f"fence_timeout: expected seconds over 0, found {self.fence_timeout!r}"
            )
        limit = self.max_bytes
        if limit is not None and not (isinstance(limit, int) and limit > 0):
            raise UsageError(f"max_bytes: expected bytes, or None, found {limit!r}")
        if self.guard not in GUARDS:
            raise UsageError(f"guard: expected one of {list(GUARDS)}, found {self.guard!r}")


class SettingsDict(TypedDict, total=False):
    """``Settings`` as keyword arguments, for type checkers; a test compares the two."""

    on_error: OnError
    snapshot: Literal["auto", "sync", "device"]
    verify: bool
    fence_timeout: float
    max_bytes: int | None
    guard: Guard


def as_arguments(settings: Settings) -> SettingsDict:
    """What ``Settings(**...)`` makes equal ones of; also of a class derived from it."""
    made = asdict(settings)
    return {name: made[name] for name in SettingsDict.__annotations__}  # type: ignore[return-value]
