"""``PortusCompanion`` and ``PortusCheckpoint``, for Trainers of ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from portus_lightning.checkpoint import CadenceHooks
from portus_lightning.companion import CompanionHooks
from portus_lightning.patch import install


class PortusCompanion(CompanionHooks, Callback):
    """The hooks that Portus needs. A class of a module, so a Trainer with it can be pickled."""


class PortusCheckpoint(CadenceHooks, ModelCheckpoint):
    """A ``ModelCheckpoint`` with a cadence: see ``CadenceHooks`` for its arguments."""


# At import, also in a process that unpickles a Trainer: Lightning is unchanged in other programs.
install("lightning.pytorch")
