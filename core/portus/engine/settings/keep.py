"""``Keep``: which versions of a model stay. One value, for pools and for their mirrors.

A value, because no YAML, command line, storage host or mirror can carry a function of the user. It
decides from the step, the time and the metrics of each version alone. Versions that files and pins
hold stay in addition. A version that the rule has dropped stays dropped, whatever versions are
added, so each commit can apply it to the versions that exist then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

from portus.engine.settings.fits import is_number, is_text, parse_seconds
from portus.engine.spec import VersionInfo
from portus.errors import UsageError

METRICS_MAX: Final = 64
"""The most metrics of one version."""

_NAME_MAX: Final = 200
_WITHIN_MAX_S: Final = 1e12
"""A longer time means always: no version is older."""

_MODES: Final = ("min", "max")

_TEXT: Final = "'last=2,every=1000,within=24h,best=val_loss:min:3'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """A rule for which versions stay: each version that at least one of these fields names. Raises
    ``UsageError`` for a value that is not allowed.

    Args:
        last: The newest versions, this many, at least 1.
        every: The first version at or after each multiple of this many steps, for ever.
        within: The versions saved at most this long before the newest one: seconds, or "30s",
            "5min", "24h", "7d".
        best: ``("val_loss", "min", 3)`` keeps the three versions with the lowest ``val_loss``, as
            given to ``save(metrics=)``, until there are better ones; "max" keeps the highest. Of
            equal versions the newer ones stay.
    """

    last: int = 2
    every: int | None = None
    within: float | str | None = None
    best: tuple[str, str, int] | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.last):
            raise UsageError(f"keep: expected last to be at least 1, found {self.last!r}")
        if self.every is not None and not _is_count(self.every):
            raise UsageError(f"keep: expected every to be at least 1 step, found {self.every!r}")
        if self.within is not None:
            object.__setattr__(self, "within", parse_seconds("keep: within", self.within))
        if self.best is not None:
            object.__setattr__(self, "best", _check_best(self.best))

    @classmethod
    def of(cls, value: object) -> Keep | None:
        """Return a ``Keep`` from the value that a user passes: a number (of newest versions), a
        ``Keep``, or a mapping of its fields, as in YAML. None keeps all. Raises ``UsageError``."""
        if value is None or isinstance(value, Keep):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return cls(last=value)
        if isinstance(value, Mapping):
            known = [field.name for field in fields(cls)]
            unknown = sorted(str(name) for name in value if name not in known)
            if unknown:
                raise UsageError(f"keep: unknown {unknown}; there are {known}")
            return cls(**value)
        raise UsageError(
            f"keep: expected at least 1, or None for all, or a portus.Keep, found {value!r}"
        )

    @classmethod
    def parse(cls, text: str) -> Keep:
        """Return a ``Keep`` from a command line: a number, or the fields, as in
        ``last=2,every=1000,within=24h,best=val_loss:min:3``. Raises ``UsageError``."""
        said: dict[str, object] = {}
        for each in text.split(","):
            name, equals, value = each.strip().partition("=")
            if not equals:
                name, value = "last", name
            if name in said or (not equals and "," in text):
                raise UsageError(f"keep: expected a number, or such as {_TEXT}, found {text!r}")
            said[name] = value if name == "within" else _whole(value)
        best = said.get("best")
        if isinstance(best, str):
            metric, _, rest = best.rpartition(":")
            metric, _, mode = metric.rpartition(":")
            said["best"] = (metric, mode, _whole(rest))
        made = cls.of(said)
        assert made is not None
        return made

    def staying(self, versions: Sequence[VersionInfo]) -> list[VersionInfo]:
        """Return those of ``versions`` that stay: all versions of one model, in the order of their
        commits, oldest first."""
        places = set(range(max(0, len(versions) - self.last), len(versions)))
        if self.every is not None:
            places |= _first_of_each(versions, self.every)
        if self.within is not None and versions:
            since_ns = versions[-1].time_ns - round(min(float(self.within), _WITHIN_MAX_S) * 1e9)
            places |= {place for place, each in enumerate(versions) if each.time_ns >= since_ns}
        if self.best is not None:
            places |= _best(versions, *self.best)
        return [versions[place] for place in sorted(places)]


def check_metrics(metrics: Mapping[str, object] | None) -> dict[str, float]:
    """Return the metrics to save a version with. Infinite ones and NaN are left out: they are never
    the best. Raises ``UsageError`` for values that are no numbers, and for too many."""
    found: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        if not _is_name(name):
            raise UsageError(
                f"metrics: expected names of 1 to {_NAME_MAX} characters, found {name!r:.80}"
            )
        try:
            number = float(value)  # type: ignore[arg-type]  # a tensor of one element too
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise UsageError(f"metrics: {name}: expected a number, found {value!r:.80}") from error
        if math.isfinite(number):
            found[name] = number
    if len(found) > METRICS_MAX:
        raise UsageError(f"metrics: expected at most {METRICS_MAX}, found {len(found)}")
    return found


def _first_of_each(versions: Sequence[VersionInfo], every: int) -> set[int]:
    """Return the places of the lowest step at or after each multiple of ``every``; if a step came
    twice, the newer one."""
    found: dict[int, int] = {}
    for place, each in enumerate(versions):
        multiple = each.step // every
        if multiple >= 1:
            before = found.setdefault(multiple, place)
            if each.step <= versions[before].step:
                found[multiple] = place
    return set(found.values())


def _best(versions: Sequence[VersionInfo], metric: str, mode: str, count: int) -> set[int]:
    sign = 1 if mode == "min" else -1
    scored = [
        (sign * each.metrics[metric], -place)
        for place, each in enumerate(versions)
        if metric in each.metrics
    ]
    return {-place for _, place in sorted(scored)[:count]}


def _check_best(best: object) -> tuple[str, str, int]:
    if isinstance(best, Sequence) and not isinstance(best, str) and len(best) == 3:
        metric, mode, count = best
        if _is_name(metric) and mode in _MODES and _is_count(count):
            return metric, mode, count
    raise UsageError(
        f"keep: expected best to be such as ('val_loss', 'min', 3), with 'min' or 'max', found "
        f"{best!r}"
    )


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _NAME_MAX and is_text(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and is_number(value) and value >= 1


def _whole(text: str) -> object:
    """Return ``text`` as a number if it is one; else the text, which its field then refuses."""
    return int(text) if text.isascii() and text.isdecimal() else text
