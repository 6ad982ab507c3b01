"""The companion callback for Trainers of ``pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning import Callback

from portus_lightning.companion import CompanionHooks
from portus_lightning.patch import install


class PortusCompanion(CompanionHooks, Callback):
    """The hooks that Portus needs. A class of a module, so a Trainer with it can be pickled."""


# At import, which is when a Trainer with a PortusIO is made: Lightning is unchanged in other
# programs.
install("pytorch_lightning")
