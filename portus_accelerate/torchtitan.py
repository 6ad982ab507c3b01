"""TorchTitan 0.3: a checkpoint manager that saves in the background, into stock's directories.

In a recipe, in place of ``CheckpointManager.Config``:

    checkpoint=PortusCheckpoints.Config(enable=True, interval=500)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.components.checkpointer.base import MODEL, OPTIMIZER
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager

from portus.dcp import PortusStorageWriter, load
from portus_accelerate.titan import load_newest, purge, save


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
            self._writer = PortusStorageWriter(mirror=config.mirror)

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,  # TorchTitan's
        to_hf: bool = False,
    ) -> Any:
        """Save as ``CheckpointManager`` does."""
        if to_hf:
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        is_late = async_mode != AsyncMode.DISABLED
        optimizers = self.states.get(OPTIMIZER)
        return save(self._writer, state_dict, checkpoint_id, self.pg, optimizers, is_late=is_late)

    def dcp_load(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        from_hf: bool,
        from_quantized: bool,
    ) -> None:
        """Load as ``CheckpointManager`` does; verify every byte. Raises ``CorruptionError``."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, checkpoint_id)
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _load(self, step: int = -1) -> bool:
        return load_newest(super()._load, self.folder, step)

    def _maybe_wait_for_staging(self) -> None:
        # TorchTitan calls this right before its optimizers step.
        self._writer.fence()

    def _purge_stale_checkpoints(self) -> None:
        purge(self._writer, self.folder, self.keep_latest_k)

    def _close(self) -> None:
        if hasattr(self, "_writer"):
            self._writer.close()
        super()._close()
