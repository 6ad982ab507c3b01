"""The companion callback for Trainers of ``pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning import Callback

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


choose("pytorch_lightning", prepare_to_choose, chose)
save_late("pytorch_lightning", saving, is_there, linked)
