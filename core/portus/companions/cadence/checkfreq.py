"""Where CheckFreq copies a state first: on the device, or to the host.

Source: J. Mohan, A. Phanishayee, V. Chidambaram, "CheckFreq: Frequent, Fine-Grained DNN
Checkpointing", FAST'21, Algorithm 1.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields

from portus.engine.settings.numbers import not_negative, over_zero


class SnapshotPlace(str, enum.Enum):
    """Where the copy is made that training waits for."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a training and its saves take. Seconds and bytes; the paper's names behind.

    ``step_s``: an iteration (Ti). ``update_s``: of it, the update of the weights (Tw).
    ``host_copy_s``: a copy of the state to the host (Tc). ``device_copy_s``: a copy on the device
    (Tg). ``store_s``: from the host to storage (Ts). ``size``: of the state (m). ``device_used``:
    what training takes of the device at most (M). ``device_size``: what it has (Mmax); 0 without.

    Raises ``UsageError`` for what is under 0, and for a step of 0 s.
    """

    step_s: float
    update_s: float
    host_copy_s: float
    device_copy_s: float
    store_s: float
    size: int = 0
    device_used: int = 0
    device_size: int = 0

    def __post_init__(self) -> None:
        over_zero("step_s", self.step_s, "seconds")
        for field in fields(self):
            unit = "seconds" if field.name.endswith("_s") else "bytes"
            not_negative(field.name, getattr(self, field.name), unit)

    @property
    def fits_device(self) -> bool:
        """True if the device has room for a second copy of the state."""
        return self.device_size - self.device_used > self.size


def place_snapshot(profile: Profile) -> tuple[SnapshotPlace, float]:
    """Where Algorithm 1 copies, and what that stalls training for (To, s): on the device if there
    is room, and if training stands still no longer for it than for a copy to the host, which goes
    on until the next update."""
    window = profile.step_s - profile.update_s
    host_stall = max(0.0, profile.host_copy_s - window)
    rounding = 1e-12 * profile.host_copy_s
    if profile.fits_device and profile.device_copy_s <= host_stall + rounding:
        return SnapshotPlace.DEVICE, profile.device_copy_s
    return SnapshotPlace.HOST, host_stall
