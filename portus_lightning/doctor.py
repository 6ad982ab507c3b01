"""What ``portus doctor`` says about Lightning: whether Trainers find what Portus adds to them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Final

import portus

DISTRIBUTIONS: Final = {
    "lightning": "lightning.pytorch.callbacks_factory",
    "pytorch-lightning": "pytorch_lightning.callbacks_factory",
}
"""By the name of a distribution, the entry points that its Trainer asks for callbacks."""

OLDEST: Final = (2, 4)

Finding = tuple[str, str, str]
"""Name, text, and what to do about it, empty if nothing."""


def findings() -> list[Finding]:
    """Return a finding for each installed Lightning. Imports neither."""
    found = [each for name in DISTRIBUTIONS for each in _finding(name)]
    return found or [("-", "not installed", "")]


def _finding(name: str) -> list[Finding]:
    try:
        number = version(name)
    except PackageNotFoundError:
        return []
    if _parts(number) < OLDEST:
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


def _parts(number: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(each) for each in number.split(".")[:2] if each.isdecimal())
