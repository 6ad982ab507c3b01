"""The companion callback for Trainers of ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch import Callback

from portus_lightning.companion import CompanionHooks
from portus_lightning.patch import install


class PortusCompanion(CompanionHooks, Callback):
    """See ``companion``. A class of a module, so that a Trainer that holds it can be pickled."""


install("lightning.pytorch")
