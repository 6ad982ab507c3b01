"""``PortusCheckpoint`` for Trainers of ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch.callbacks import ModelCheckpoint

from portus_lightning.checkpoint import CadenceHooks


class PortusCheckpoint(CadenceHooks, ModelCheckpoint):
    """A ``ModelCheckpoint`` with a cadence: see ``CadenceHooks`` for its arguments."""
