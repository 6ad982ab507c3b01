"""The newest checkpoint that verifies, while a training may be removing some."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from portus.engine.loading.patterns import Patterns
from portus.engine.loading.restore_over import RestoreOptions, RestoreReport
from portus.engine.spec import VersionInfo
from portus.errors import CorruptionError, MediumError, StaleError, TransportError

_log: Final = logging.getLogger("portus")

_TRIES: Final = 5
"""The most times that a load starts again because its checkpoint was removed meanwhile."""

Found = TypeVar("Found")
Result = TypeVar("Result")


class StepSource(Protocol):
    """A committed checkpoint. As text: its name in the log."""

    def load(self, names: Patterns, *, verify: bool, **settings: Any) -> Any:
        """Return the state, or its matching part; see ``Checkpointer.load``. Raises ``StaleError``
        if it was removed meanwhile."""

    def restore_into(self, state: object, options: RestoreOptions) -> RestoreReport:
        """Copy it over ``state``; see ``Checkpointer.restore_into``. Raises as ``load``."""


def use_newest(choose: Callable[[], Sequence[Found]], use: Callable[[Found], Result]) -> Result:
    """Return the result of ``use`` for the last checkpoint of ``choose`` that verifies. Older ones
    are used only with an error in the log (V4). Raises the error of the newest damaged one if none
    verifies, and ``StaleError`` if the chosen one was removed meanwhile each time."""
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


_loaded: Final[dict[str, VersionInfo]] = {}
"""The versions that this process has loaded, so that its journal can say what it resumes from."""


def note_loaded(info: VersionInfo) -> None:
    """Note that a version was loaded; the newest load of each model counts."""
    _loaded[info.model] = info


def take_loaded(model: str) -> tuple[bytes, int] | None:
    """Return token and step of the version that was loaded, or None, and forget it."""
    info = _loaded.pop(model, None)
    return None if info is None else (info.token, info.step)
