"""The newest commit of this process, whatever it went to."""

from __future__ import annotations

from portus.engine.spec import VersionInfo

_newest: VersionInfo | None = None


def note(version: VersionInfo) -> None:
    """Note that a save of this process was committed."""
    global _newest
    _newest = version


def newest() -> VersionInfo | None:
    """Return what this process committed last; None if it committed nothing."""
    return _newest
