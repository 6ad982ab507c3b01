"""The mirror that settings name."""

from __future__ import annotations

import os

from portus.engine.job.settings import UNMIRRORED, Settings
from portus.reach.mirror.address import MIRROR_VARIABLE, StoreAddress, parse


def mirror_of(settings: Settings) -> StoreAddress | None:
    """Return the mirror of the settings, else of ``$PORTUS_MIRROR``; None without one. Raises
    ``UsageError`` for text that is not an address."""
    said = settings.mirror
    text = said if said is not None else os.environ.get(MIRROR_VARIABLE) or UNMIRRORED
    if text == UNMIRRORED:
        return None
    return parse(text, "mirror" if said is not None else f"${MIRROR_VARIABLE}")
