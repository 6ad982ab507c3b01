"""The companion callback for Trainers of ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch import Callback

from portus_lightning.companion import (
    CompanionHooks,
    chose,
    is_there,
    linked,
    prepare_to_choose,
    saving,
)
from portus_lightning.stock import choose, save_late


class PortusCompanion(CompanionHooks, Callback):
    """See ``companion``. A class of a module, so that a Trainer that holds it can be pickled."""


choose("lightning.pytorch", prepare_to_choose, chose)
save_late("lightning.pytorch", saving, is_there, linked)
