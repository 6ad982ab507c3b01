"""Words for people: sizes, counts, paths, moments and durations."""

from __future__ import annotations

import os
import time
from datetime import datetime


def size(size: float) -> str:
    """Return a number of bytes for people."""
    rank = min(6, max(0, int(size).bit_length() - 1) // 10)
    value, unit = size / 1024**rank, ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")[rank]
    return f"{value:.0f} {unit}" if rank == 0 or value >= 100 else f"{value:.1f} {unit}"


def count(count: int, noun: str) -> str:
    """Return ``1 version``, ``2 versions``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def path(path: str) -> str:
    """Return a path for people: from the current directory, if that is shorter."""
    return min(os.path.relpath(path), path, key=len)


def age(time_ns: int, now_ns: int | None = None) -> str:
    """Return how long ago a moment was, for people."""
    passed_s = ((time.time_ns() if now_ns is None else now_ns) - time_ns) / 1e9
    if passed_s < 0:
        return "in the future"
    units = ((60, 1, "s"), (3600, 60, "min"), (2 * 86400, 3600, "h"), (float("inf"), 86400, "days"))
    unit_s, unit = next((unit_s, unit) for limit_s, unit_s, unit in units if passed_s < limit_s)
    return f"{passed_s / unit_s:.0f} {unit} ago"


def moment(time_ns: int) -> str:
    """Return a moment in local time and ISO 8601."""
    return datetime.fromtimestamp(time_ns // 10**9).astimezone().isoformat()


def seconds(seconds: float) -> str:
    """Return a duration for people."""
    if 0 < seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if seconds < 172_800 else f"{seconds / 86_400:.3g} days"
