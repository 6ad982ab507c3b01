"""The state of Portus in this process: whether Accelerate was changed, and if not, why not."""

from __future__ import annotations

import sys

import portus
from portus_accelerate import FLAG, autoload, is_on
from portus_accelerate.settings import from_environment

ON = "on, "
"""The start of the answer if all is well."""

_told = ""


def tell(text: str) -> None:
    """Record what ``patch`` did, or why it did nothing."""
    global _told
    _told = text


def status() -> str:
    """Return one line that says whether Portus saves for Accelerate in this process. It begins with
    "on, " if so; otherwise it gives the reason."""
    if autoload.failures:
        return autoload.failures[-1]
    if not _told.startswith(ON):
        return _told or _why_not_told()
    try:
        from_environment()
    except portus.UsageError as error:
        return f"the settings are wrong: {error}"
    if portus.is_disabled():
        return "PORTUS_DISABLE is set: Accelerate itself saves"
    return _told


def _why_not_told() -> str:
    if not is_on():
        return f"${FLAG} is not set in this process"
    if "accelerate.accelerator" not in sys.modules and any(
        isinstance(each, autoload.Watcher) for each in sys.meta_path
    ):
        return "Accelerate was not imported"
    return (
        "torch did not call Portus: TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns all such calls off, and "
        "so does a portus-checkpoint that is on the path and not installed"
    )


def is_known(version: str, oldest: tuple[int, ...], newest: tuple[int, ...]) -> bool:
    """Return whether ``version`` is between the two, both included, by their first numbers."""
    parts = version.split("+")[0].split(".")
    numbers = tuple(int(part) for part in parts if part.isdigit())
    return oldest <= numbers[: len(oldest)] <= newest


def spell(oldest: tuple[int, ...], newest: tuple[int, ...]) -> str:
    """Return a range of versions as users write it."""
    return " to ".join(".".join(map(str, each)) for each in (oldest, newest))
