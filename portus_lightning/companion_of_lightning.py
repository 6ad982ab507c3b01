"""The companion callback for Trainers of ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch import Callback

from portus_lightning.companion import (
    CompanionHooks,
    is_to_be_passed_over,
    is_with_portus,
    lead_back_what_was_last,
    lead_to_newest,
)
from portus_lightning.stock import choose_again, link_in_one_step


class PortusCompanion(CompanionHooks, Callback):
    """See ``companion``. A class of a module, so that a Trainer that holds it can be pickled."""


choose_again("lightning.pytorch", lead_back_what_was_last, is_to_be_passed_over, lead_to_newest)
link_in_one_step("lightning.pytorch", is_with_portus)
