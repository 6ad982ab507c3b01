"""The newest commit of this process, at any place."""

from __future__ import annotations

from portus.engine.spec import VersionInfo

_newest: VersionInfo | None = None


def note(version: VersionInfo) -> None:
    """Note that a save of this process was committed."""
    global _newest
    _newest = version


def newest() -> VersionInfo | None:
    """Return the newest commit of this process; None if there is none."""
    return _newest
