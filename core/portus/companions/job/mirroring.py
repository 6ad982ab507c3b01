"""The mirror that settings name."""

from __future__ import annotations

import os

from portus.engine.job.settings import UNMIRRORED, Settings
from portus.errors import UsageError
from portus.reach.mirror.address import MIRROR_VARIABLE, StoreAddress, StoreKind, parse


def mirror_of(settings: Settings) -> StoreAddress | None:
    """Return the mirror of the settings, else of ``$PORTUS_MIRROR``; None without one. Raises
    ``UsageError`` for text that is not an address."""
    said = settings.mirror
    text = said if said is not None else os.environ.get(MIRROR_VARIABLE) or UNMIRRORED
    if text == UNMIRRORED:
        return None
    return parse(text, "mirror" if said is not None else f"${MIRROR_VARIABLE}")


def require_mirror_of_files(settings: Settings, what: str, instead: str) -> None:
    """Raise ``UsageError`` if the mirror of the settings is on a storage host, whose objects are
    small. what: describes the files; instead: the advice."""
    address = mirror_of(settings)
    if address is not None and address.kind is StoreKind.HOST:
        raise UsageError(
            f"mirror: {what}, and objects on a storage host are small; mirror to a bucket or a "
            f"directory, or {instead}"
        )
