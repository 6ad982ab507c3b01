"""``PortusCheckpoint`` for Trainers of ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch.callbacks import ModelCheckpoint

from portus_lightning.checkpoint import CadenceHooks


class PortusCheckpoint(CadenceHooks, ModelCheckpoint):
    """See ``checkpoint.CadenceHooks``, and ``ModelCheckpoint`` for all other arguments."""
