"""Makes the companions of saves to a directory, see ``portus.engine.pipeline.request``."""

from __future__ import annotations

import os

from portus.companions.job.journal import JOURNALS, Journal
from portus.engine.directory.folder import FOLDER
from portus.engine.job.settings import Settings
from portus.engine.pipeline.request import Companion
from portus.errors import UsageError, printable
from portus.reach.mirror.address import mirror_of
from portus.reach.training.file_mirror import DirectoryMirror


def companions_of(directory: str, settings: Settings) -> list[Companion]:
    """Return the companions of saves to a directory: its journal and its mirror, if the settings
    have them. Raises ``UsageError`` for settings that only pools have."""
    refuse_settings_of_pools(settings, f"{printable(directory)} is a directory of files")
    name = os.path.basename(directory) or "checkpoints"
    home = os.path.join(directory, FOLDER, JOURNALS)
    found: list[Companion] = []
    address = mirror_of(settings.mirror)
    if address is not None:
        found.append(
            DirectoryMirror(
                address, name, settings, root=directory, checkpoints=directory, home=home
            )
        )
    if settings.journal:  # last: it observes training from now on
        # There is no place for it while there is no directory.
        found.insert(0, Journal(name, lambda: home if os.path.isdir(directory) else None))
    return found


def refuse_settings_of_pools(settings: Settings, what: str) -> None:
    """Raise ``UsageError`` for settings that only pools have. what: says that there are files."""
    if settings.max_bytes is not None:
        raise UsageError(
            f"max_bytes: {what}, which have no largest size together; keep= says how many stay, or "
            "the framework does"
        )
    if settings.durable != 1:
        raise UsageError(f"durable: {what}; only storage hosts have copies")
