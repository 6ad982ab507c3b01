"""``PortusCallback``: ``transformers.Trainer`` saves at the steps of a ``portus.Cadence``.

The flag adds it if the settings have ``every``. It cannot move a script's own calls of
``save_state``; such a script asks ``should_save``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from transformers.trainer_callback import ExportableState, TrainerCallback

import portus
from portus_accelerate.settings import ACCELERATE

_trainings: Final[list[bool]] = []
"""An item for each ``Trainer.train`` under way: whether Portus sees its saves."""


@contextlib.contextmanager
def training(*, seen: bool) -> Iterator[None]:
    """Mark the training of a ``Trainer``. seen: whether its saves go through Portus."""
    _trainings.append(seen)
    try:
        yield
    finally:
        _trainings.pop()


def is_seen() -> bool | None:
    """Return whether Portus sees the saves of the ``Trainer`` at work; None: the flag is off."""
    return _trainings[-1] if _trainings else None


class PortusCallback(TrainerCallback, ExportableState):
    """Makes ``transformers.Trainer`` save as often as ``max_overhead`` allows, instead of by
    ``save_steps``.

    Args:
        every: "auto" saves as often as ``max_overhead`` allows. "30s", "5min" or "1h" is a time.
            A number is that many steps.
        max_overhead: How much all saves together may add to the time of a training without saves,
            as a fraction.
        mtbf: Mean time between failures of the whole job: seconds, or a text like "4h".

    Trainer decides what is saved, where, and which checkpoints are kept. The measurements are in
    ``trainer_state.json``, and a resumed training continues with them. The saves of ``save_steps``
    are skipped, with two exceptions: the last one of a training, and all of them if
    ``load_best_model_at_end`` is set, which needs them. The saves of other strategies stay. List
    this callback before your own callbacks that request saves.

    Raises ``portus.UsageError`` for a value that is not allowed. It raises the same when training
    begins if ``every`` is "auto" and the flag is off, because it measures saves that Portus makes.
    """

    def __init__(
        self,
        every: str | int = "auto",
        max_overhead: float = portus.Cadence.MAX_OVERHEAD,
        mtbf: float | str | None = None,
    ) -> None:
        portus.parse_cadence(every, max_overhead, mtbf)
        said = {"every": every, "max_overhead": max_overhead, "mtbf": mtbf}
        self._said: Final[dict[str, Any]] = said
        self._cadence: portus.Cadence | None = None

    @property
    def cadence(self) -> portus.Cadence | None:
        """Return the cadence of the training that runs; None if none runs."""
        return self._cadence

    def state(self) -> dict[str, Any]:
        """Return the state for ``trainer_state.json``; Trainer restores its ``attributes``."""
        saved = None if self._cadence is None else self._cadence.state_dict()
        return {"args": self._said, "attributes": {"saved": saved}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Start counting, and continue from a checkpoint's measurements."""
        seen = is_seen()
        if seen is None and self._said["every"] == "auto" and not portus.is_disabled():
            raise portus.UsageError(
                "PortusCallback(every='auto') uses what saves of Portus cost, and this "
                "Trainer saves without Portus: set PORTUS_ACCELERATE=1, or every='5min'"
            )
        self._cadence = portus.Cadence.create(ACCELERATE, **self._said, is_seen=bool(seen))
        # From a checkpoint without this callback Trainer could not save the callback's state.
        mine = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        saved = mine.get("attributes", {}).get("saved")
        if saved is not None:
            self._cadence.load_state_dict(saved)

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Exclude the time of an evaluation from the cost of saves."""
        if self._cadence is not None:
            self._cadence.ignore_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        """Ask for a save if this step is due, and skip those of ``save_steps``."""
        assert self._cadence is not None
        is_due = self._cadence.should_save()
        if is_due:
            control.should_save = True
            return control
        is_of_save_steps = (
            args.save_strategy == "steps"
            and not args.load_best_model_at_end
            and state.save_steps > 0
            and state.global_step % state.save_steps == 0
        )
        # Not by ``state.save_steps``: that is saved, and a run without Portus would use it.
        if is_of_save_steps and state.global_step < state.max_steps:
            control.should_save = False
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Stop counting."""
        self._cadence = None
