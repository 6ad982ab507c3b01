"""The versions that this process has loaded, so that its journal can say what it resumes from."""

from __future__ import annotations

from typing import Final

from portus.engine.spec import VersionInfo

_loaded: Final[dict[str, VersionInfo]] = {}


def note_loaded(info: VersionInfo) -> None:
    """Note that a version was loaded; the newest load of each model counts."""
    _loaded[info.model] = info


def take_loaded(model: str) -> tuple[bytes, int] | None:
    """Return token and step of the version that was loaded, or None, and forget it."""
    info = _loaded.pop(model, None)
    return None if info is None else (info.token, info.step)
