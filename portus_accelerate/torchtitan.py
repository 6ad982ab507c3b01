"""TorchTitan 0.3: a checkpoint manager that saves in the background, into stock's directories.

In a recipe, in place of ``CheckpointManager.Config``:

    checkpoint=PortusCheckpoints.Config(enable=True, interval=500)
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch.distributed as dist
from torchtitan.components.checkpointer.dcp import CheckpointManager

import portus
from portus.dcp import PortusStorageWriter
from portus_accelerate.titan import WRITER, steps_in, take_over

_log: Final = logging.getLogger("portus_accelerate")


class PortusCheckpoints(CheckpointManager):
    """Saves and loads with the policies of ``CheckpointManager``, to the same directories. That
    class handles Hugging Face's layout."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The options of ``CheckpointManager``; saves run in the background unless ``async_mode``
        is "disabled"."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """"async_with_pinned_mem" acts as "async": nothing is staged."""

        mirror: str | None = None
        """The mirror, as in ``portus.Settings``."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            if self.async_mode == "async_with_pinned_mem":
                self.async_mode = "async"

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        if self.enable:
            setattr(self, WRITER, PortusStorageWriter(mirror=config.mirror))

    def _load(self, step: int = -1) -> bool:
        """Load the checkpoint of ``step``. If that is -1, the newest, and it is damaged, load the
        one before it, and so on. Raise ``CorruptionError`` if all are damaged, or a named one."""
        try:
            return bool(super()._load(step))
        except portus.CorruptionError as error:
            if step != -1:
                raise
            first = error
        for path in steps_in(self.folder)[1:]:
            if os.path.exists(os.path.join(path, ".metadata")):
                if dist.get_rank() == 0:
                    _log.error("portus: passed over: %s; continuing from %s", first, path)
                with contextlib.suppress(portus.CorruptionError):
                    return bool(super()._load(int(os.path.basename(path).split("-")[1])))
        raise first


take_over(PortusCheckpoints)
