"""``PortusCallback``: ``transformers.Trainer`` saves at the steps that ``portus.Cadence`` says."""

from __future__ import annotations

from typing import Any, Final

from transformers.trainer_callback import ExportableState, TrainerCallback

import portus
from portus_accelerate import pacing


class PortusCallback(TrainerCallback, ExportableState):
    """Saves as often as ``max_overhead`` allows, in place of ``save_steps``.

    Args:
        every: "auto": as often as ``max_overhead`` allows; "30s", "5min", "1h": a time; 100: steps.
        max_overhead: The share of the time without saves that saves may add.
        mtbf: Mean time between failures of the whole job: seconds, or "4h".

    What is saved, where, and which ones are kept is Trainer's own. What was measured is part of
    ``trainer_state.json``, and a resumed training goes on with it. Saves of ``save_steps`` are left
    out, but the last one of a training, and but with ``load_best_model_at_end``, which needs them;
    list it before callbacks of your own that ask for saves. Other strategies save beside it.

    Raises ``portus.UsageError`` for what makes no sense, and when training begins if ``every`` is
    "auto" and the flag is off: it goes by what saves of Portus cost.
    """

    def __init__(
        self,
        every: str | int = "auto",
        max_overhead: float = 0.035,
        mtbf: float | str | None = None,
    ) -> None:
        portus.checked_cadence(every, max_overhead, mtbf)
        self._said: Final[dict[str, Any]] = {
            "every": every,
            "max_overhead": max_overhead,
            "mtbf": mtbf,
        }
        self._cadence: portus.Cadence | None = None

    @property
    def cadence(self) -> portus.Cadence | None:
        """What decides, while a training runs."""
        return self._cadence

    def state(self) -> dict[str, Any]:
        """For ``trainer_state.json``; what is read of it is ``attributes``."""
        saved = None if self._cadence is None else self._cadence.state_dict()
        return {"args": self._said, "attributes": {"saved": saved}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Begin to count, and go on with what a checkpoint says."""
        seen = pacing.is_seen()
        if seen is None and self._said["every"] == "auto" and not portus.is_disabled():
            raise portus.UsageError(
                "PortusCallback(every='auto') uses what saves of Portus cost, and this "
                "Trainer saves without Portus: set PORTUS_ACCELERATE=1, or every='5min'"
            )
        self._cadence = pacing.made(**self._said, is_seen=bool(seen))
        # Of a checkpoint from before there was such a callback Trainer could not save its state.
        mine = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        saved = mine.get("attributes", {}).get("saved")
        if saved is not None:
            self._cadence.load_state_dict(saved)

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """What an evaluation takes is no cost of a save."""
        if self._cadence is not None:
            self._cadence.ignore_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        """Ask for a save if this step is due, and for none of ``save_steps``."""
        assert self._cadence is not None
        is_due = self._cadence.should_save()
        is_last = state.global_step >= state.max_steps
        if is_due:
            control.should_save = True
        elif _is_of_save_steps(args, state) and not is_last:
            control.should_save = False
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """It counts no more."""
        self._cadence = None


def _is_of_save_steps(args: Any, state: Any) -> bool:
    strategy = getattr(args.save_strategy, "value", args.save_strategy)
    return (
        strategy == "steps"
        and not args.load_best_model_at_end
        and state.save_steps > 0
        and state.global_step % state.save_steps == 0
    )
