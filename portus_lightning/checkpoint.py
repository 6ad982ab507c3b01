"""``PortusCheckpoint``: Lightning's ``ModelCheckpoint``, at the steps of a ``portus.Cadence``.

Lightning decides what is saved, where, and which ones are kept; this module decides only after
which batches to save. Each copy of Lightning joins ``CadenceHooks`` with its own class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import portus
from portus_lightning import stock
from portus_lightning.patch import plugin_of

KEY: Final = "portus_cadence"
"""The key of the cadence in the callback's part of a checkpoint."""


class CadenceHooks:
    """The hooks and the arguments; the base class before ``ModelCheckpoint``.

    Args:
        every: "auto": as often as ``max_overhead`` allows; "30s", "5min", "1h": a time; 100: steps.
        max_overhead: The share of the time without saves that saves may add.
        mtbf: Mean time between failures of the whole job: seconds, or "4h".

    All other arguments are those of ``ModelCheckpoint``, but for those that say when to save.
    Raises ``portus.UsageError`` for invalid arguments.
    """

    _every_n_train_steps: int
    monitor: str | None
    mode: str
    _generate_state_key: Callable[..., str]

    def __init__(
        self,
        every: str | int = "auto",
        max_overhead: float = portus.Cadence.MAX_OVERHEAD,
        mtbf: float | str | None = None,
        **of_model_checkpoint: Any,
    ) -> None:
        for name in ("every_n_train_steps", "every_n_epochs", "train_time_interval"):
            if of_model_checkpoint.get(name) is not None:
                raise portus.UsageError(
                    f"{name}: PortusCheckpoint saves when `every` says; found "
                    f"{of_model_checkpoint[name]!r}. Leave it out, or add a ModelCheckpoint"
                )
        self._every, self._max_overhead, self._mtbf = every, max_overhead, mtbf
        portus.parse_cadence(every, max_overhead, mtbf)  # refuses invalid arguments
        self.cadence: portus.Cadence | None = None
        """The cadence that decides; None unless a fit runs."""
        self._loaded: dict[str, object] | None = None
        super().__init__(every_n_train_steps=1, **of_model_checkpoint)  # type: ignore[call-arg]
        self._every_n_train_steps = 0

    @property
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.monitor, mode=self.mode, every=self._every)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Start counting. Raise ``portus.UsageError`` if ``every="auto"``, which measures saves,
        and they do not go through a ``PortusIO``."""
        super().setup(trainer, pl_module, stage)  # type: ignore[misc]
        if stage != "fit":
            return
        io = plugin_of(trainer)
        if self._every == "auto" and io is None:
            raise portus.UsageError(
                "PortusCheckpoint(every='auto') uses what saves of Portus cost, and this "
                "Trainer saves without Portus: add plugins=[PortusIO()], or set every='5min'"
            )
        self.cadence = portus.Cadence.create(
            stock.LIGHTNING,
            self._every,
            self._max_overhead,
            self._mtbf,
            is_seen=io is not None and stock.is_on(),
        )
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self.cadence.load_state_dict(loaded)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Save as ``ModelCheckpoint`` with ``every_n_train_steps`` does, if this step is due."""
        assert self.cadence is not None
        # This sets only Lightning's own interval (0 is never), so top-k, deferring a save to a
        # validation and all that follows stay Lightning's.
        self._every_n_train_steps = 1 if self.cadence.should_save() else 0
        try:
            super().on_train_batch_end(trainer, pl_module, *batch)  # type: ignore[misc]
        finally:
            self._every_n_train_steps = 0

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Exclude the time of a validation from the cost of saves."""
        super().on_validation_start(trainer, pl_module)  # type: ignore[misc]
        if self.cadence is not None:
            self.cadence.ignore_step()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)  # type: ignore[misc]
        self.cadence = None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return state if self.cadence is None else {**state, KEY: self.cadence.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # type: ignore[misc]
        saved = state_dict.get(KEY)
        if self.cadence is None:
            self._loaded = saved
        elif saved is not None:
            self.cadence.load_state_dict(saved)
