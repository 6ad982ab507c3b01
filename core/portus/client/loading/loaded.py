"""The versions that this process has loaded, so that its journal can say what it resumes from."""

from __future__ import annotations

from typing import Final

from portus.index.groups import ID_SIZE, part_of, part_token
from portus.spec import VersionInfo

_loaded: Final[dict[str, VersionInfo]] = {}


def note_loaded(info: VersionInfo) -> None:
    """A version was loaded; of a model the newest load counts."""
    _loaded[info.model] = info


def take_loaded(model: str) -> tuple[bytes, int] | None:
    """The token and the step of the version that was loaded, and forget it; of a part of a group,
    whichever part of it was loaded, as this rank has it. None if nothing was."""
    info = _loaded.pop(model, None)
    part = part_of(model)
    if part is None:
        return None if info is None else (info.token, info.step)
    for name in list(_loaded):
        other = part_of(name)
        if other is not None and other[0] == part[0]:
            found = _loaded.pop(name)
            info = found if info is None or found.time_ns > info.time_ns else info
    return None if info is None else (part_token(info.token[:ID_SIZE], part[1]), info.step)
