"""The companion callback for Trainers of ``pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning import Callback

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


choose_again("pytorch_lightning", lead_back_what_was_last, is_to_be_passed_over, lead_to_newest)
link_in_one_step("pytorch_lightning", is_with_portus)
