"""The companion callback for Trainers of ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch import Callback

from portus_lightning.companion import CompanionHooks
from portus_lightning.patch import install


class PortusCompanion(CompanionHooks, Callback):
    """Has the hooks that Portus needs. A class of a module, so that a Trainer with it can be
    pickled."""


# At import, which is when a Trainer with a PortusIO is made: no other program's Lightning changes.
install("lightning.pytorch")
