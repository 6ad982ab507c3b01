"""What optimizers waited at the fence for, in this process."""

from __future__ import annotations

import time

from portus.engine.pipeline.run import Save


class Fenced:
    """Counts from when it is made on."""

    def __init__(self) -> None:
        self._seconds = 0.0
        release = Save.release

        def timed(save: Save, timeout_s: float) -> bool:
            start = time.perf_counter()
            try:
                return release(save, timeout_s)
            finally:
                self._seconds += time.perf_counter() - start

        setattr(Save, "release", timed)  # noqa: B010

    def taken(self) -> float:
        """Seconds since it was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
