"""The companion callback for Trainers of ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch import Callback

from portus_lightning.companion import CompanionHooks, is_to_be_passed_over
from portus_lightning.stock import choose_again


class PortusCompanion(CompanionHooks, Callback):
    """See ``companion``. A class of a module, so that a Trainer that holds it can be pickled."""


choose_again("lightning.pytorch", is_to_be_passed_over)
