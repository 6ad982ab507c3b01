"""TorchTitan 0.3: a checkpoint manager that saves in the background, into stock's directories.

In a recipe, in place of ``CheckpointManager.Config``:

    checkpoint=PortusCheckpoints.Config(enable=True, interval=500)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.components.checkpointer.dcp import CheckpointManager

from portus.dcp import PortusStorageWriter
from portus_accelerate.titan import WRITER, load_newest, take_over


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
        return load_newest(super()._load, self.folder, step)


take_over(PortusCheckpoints)
