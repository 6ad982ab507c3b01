"""``PortusCheckpoint`` for Trainers of ``pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning.callbacks import ModelCheckpoint

from portus_lightning.checkpoint import CadenceHooks


class PortusCheckpoint(CadenceHooks, ModelCheckpoint):
    """A ``ModelCheckpoint`` with a cadence: see ``CadenceHooks`` for its arguments."""
