"""The findings of ``portus doctor`` about Lightning: whether Trainers find Portus's callbacks."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Final

import portus

DISTRIBUTIONS: Final = {
    "lightning": "lightning.pytorch.callbacks_factory",
    "pytorch-lightning": "pytorch_lightning.callbacks_factory",
}
"""The entry points for callbacks that each distribution's Trainer asks for."""

OLDEST: Final = (2, 4)

Finding = tuple[str, str, str]
"""Name, text, and the remedy, empty if none is needed."""


def findings() -> list[Finding]:
    """Return a finding for each installed Lightning. Imports neither."""
    found = [each for name in DISTRIBUTIONS for each in _finding(name)]
    return found or [("-", "not installed", "")]


def _finding(name: str) -> list[Finding]:
    try:
        number = version(name)
    except PackageNotFoundError:
        return []
    if tuple(int(each) for each in number.split(".")[:2] if each.isdecimal()) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return [(name, f"{number} is older than {oldest}", f"upgrade to {oldest} or later")]
    if portus.is_disabled():
        text = f"{number}: PORTUS_DISABLE is set, so PortusIO lets Lightning save"
        return [(name, text, "unset PORTUS_DISABLE")]
    values = [each.value for each in entry_points(group=DISTRIBUTIONS[name])]
    if not any(value.startswith("portus_lightning.") for value in values):
        text = f"{number}: Trainers do NOT find the callback of Portus: no exact resume, no metrics"
        return [(name, text, "install portus-checkpoint again, in this environment")]
    return [(name, f"{number}: takes effect where a Trainer has plugins=[PortusIO()]", "")]
