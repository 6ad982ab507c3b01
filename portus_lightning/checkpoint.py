"""``PortusCheckpoint``: Lightning's ``ModelCheckpoint``, at the steps that ``portus.Cadence`` says.

What is saved, where, and which ones are kept is Lightning's own: this decides only whether a batch
was one to save after. Each copy of Lightning joins ``CadenceHooks`` with its own class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import portus
from portus_lightning import stock
from portus_lightning.patch import plugin_of

KEY: Final = "portus_cadence"
"""Where the cadence is in the callback's part of a checkpoint."""


class CadenceHooks:
    """The hooks, and the arguments; goes before ``ModelCheckpoint``.

    Args:
        every: "auto": as often as ``max_overhead`` allows; "30s", "5min", "1h": a time; 100: steps.
        max_overhead: The share of the time without saves that saves may add.
        mtbf: Mean time between failures of the whole job: seconds, or "4h".

    All other arguments are those of ``ModelCheckpoint``, but for those that say when to save.
    Raises ``portus.UsageError`` for what makes no sense.
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
        portus.parse_cadence(every, max_overhead, mtbf)  # it counts from the start of the fit
        self._cadence: portus.Cadence | None = None
        self._loaded: dict[str, object] | None = None
        super().__init__(every_n_train_steps=1, **of_model_checkpoint)  # type: ignore[call-arg]
        self._every_n_train_steps = 0

    @property
    def cadence(self) -> portus.Cadence | None:
        """What decides, while a fit runs."""
        return self._cadence

    @property
    def state_key(self) -> str:
        return self._generate_state_key(monitor=self.monitor, mode=self.mode, every=self._every)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin to count. ``every="auto"`` has to see the saves: raises ``portus.UsageError`` where
        they do not go through a ``PortusIO``."""
        super().setup(trainer, pl_module, stage)  # type: ignore[misc]
        if stage != "fit":
            return
        io = plugin_of(trainer)
        if self._every == "auto" and io is None:
            raise portus.UsageError(
                "PortusCheckpoint(every='auto') uses what saves of Portus cost, and this "
                "Trainer saves without Portus: add plugins=[PortusIO()], or set every='5min'"
            )
        self._cadence = portus.Cadence.create(
            stock.LIGHTNING,
            self._every,
            self._max_overhead,
            self._mtbf,
            is_seen=io is not None and stock.is_on(),
        )
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._cadence.load_state_dict(loaded)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Save as ``ModelCheckpoint`` with ``every_n_train_steps`` does, if this step is due."""
        assert self._cadence is not None
        # Only for Lightning's own hook, so that top-k, deferring to a validation and all that
        # follows stay Lightning's. 0 is never.
        self._every_n_train_steps = 1 if self._cadence.should_save() else 0
        try:
            super().on_train_batch_end(trainer, pl_module, *batch)  # type: ignore[misc]
        finally:
            self._every_n_train_steps = 0

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """What a validation takes is no cost of a save."""
        super().on_validation_start(trainer, pl_module)  # type: ignore[misc]
        if self._cadence is not None:
            self._cadence.ignore_step()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)  # type: ignore[misc]
        self._cadence = None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return state if self._cadence is None else {**state, KEY: self._cadence.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # type: ignore[misc]
        saved = state_dict.get(KEY)
        if self._cadence is None:
            self._loaded = saved
        elif saved is not None:
            self._cadence.load_state_dict(saved)
