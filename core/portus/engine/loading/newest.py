"""The newest checkpoint that verifies, while a training may be removing some."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from portus.engine.loading.over import RestoreOptions
from portus.engine.loading.patterns import Patterns
from portus.engine.loading.restore_report import RestoreReport
from portus.errors import CorruptionError, MediumError, StaleError, TransportError

_log: Final = logging.getLogger("portus")

_TRIES: Final = 5
"""A load starts again when what it found was removed under it, this often."""

Found = TypeVar("Found")
Result = TypeVar("Result")


class StepSource(Protocol):
    """A committed checkpoint. As text: what the log calls it."""

    def load(self, names: Patterns, *, verify: bool, **settings: Any) -> Any:
        """Return the state, or what of it matches; see ``Checkpointer.load``. Raises
        ``StaleError`` if it was removed meanwhile."""

    def restore_into(self, state: object, options: RestoreOptions) -> RestoreReport:
        """Copy it over ``state``; see ``Checkpointer.restore_into``. Raises as ``load``."""


def use_newest(choose: Callable[[], Sequence[Found]], use: Callable[[Found], Result]) -> Result:
    """Return what ``use`` gives for the last of what ``choose`` returns that verifies; older ones
    are used only with an error in the log (V4). Raises the error of the newest damaged one if none
    verifies, and ``StaleError`` if each time what was chosen was removed meanwhile.
    """
    for _ in range(_TRIES - 1):
        # Chosen anew each time: a training removes checkpoints while this loads them.
        with contextlib.suppress(StaleError, TransportError):
            return _use_last(choose(), use)
    return _use_last(choose(), use)


def _use_last(found: Sequence[Found], use: Callable[[Found], Result]) -> Result:
    failures: list[CorruptionError | MediumError] = []
    for each in reversed(found):
        if failures:
            _log.error("%s; FALLING BACK to %s", failures[-1], each)
        try:
            return use(each)
        except (CorruptionError, MediumError) as error:
            failures.append(error)
    # Damage is raised rather than an error of the disk, which may pass.
    raise next((each for each in failures if isinstance(each, CorruptionError)), failures[-1])
