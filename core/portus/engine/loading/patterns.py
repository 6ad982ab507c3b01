"""Shell patterns of key paths: they select a part of a state."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any, Final

from portus.errors import UsageError

Patterns = str | Sequence[str] | None

_NEAR_MAX: Final = 5
_HEADS_MAX: Final = 2000
"""Key paths that the error for a missing one names, and searches."""

_DROPPED: Final = object()

_SINGLE: Final = frozenset({type(None), bool, int, float, str})
"""A list or tuple of only these is one leaf, as in ``engine.state.walk``, which is heavy."""


class Matcher:
    """Matches key paths with some shell patterns; a path below a matching one matches too."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns: Final = list(patterns)
        self._unmet: Final = set(patterns)
        self._seen: Final[dict[str, None]] = {}

    def __call__(self, name: str) -> bool:
        found = [
            pattern
            for pattern in self._patterns
            if fnmatch.fnmatchcase(name, pattern) or name.startswith(pattern + ".")
        ]
        self._unmet.difference_update(found)
        self._seen[name] = None
        return bool(found)

    def complain(self, where: str) -> None:
        """Raise ``UsageError`` if a pattern has matched no key path so far."""
        for pattern in self._patterns:
            if pattern in self._unmet:
                raise UsageError(f"{where}: no key path matches {pattern!r}; {self._near(pattern)}")

    def _near(self, pattern: str) -> str:
        """Return paths that may have been meant, cut to the depth of the pattern."""
        stem = pattern.removesuffix(".*")
        depth = stem.count(".") + 1
        heads = list(dict.fromkeys(".".join(each.split(".")[:depth]) for each in self._seen))
        near = difflib.get_close_matches(stem, heads[:_HEADS_MAX], _NEAR_MAX)
        if near:
            return f"near it are {', '.join(near)}"
        tops = dict.fromkeys(each.split(".")[0] for each in self._seen)
        return f"paths begin with {', '.join(list(tops)[:_NEAR_MAX])}"


def matcher(names: Patterns) -> Matcher | None:
    """Return a matcher of the patterns that a user gave; None for all key paths. Raise
    ``UsageError`` for a value that is no pattern."""
    if names is None:
        return None
    given: Any = names
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    patterns = [given] if is_one else list(given)
    if not all(isinstance(each, str) for each in patterns):
        raise UsageError(f"names: expected a pattern, or a list of patterns, found {names!r:.80}")
    return Matcher(patterns)


def part_of(value: Any, keep: Matcher, keys: tuple[object, ...] = ()) -> Any:
    """Return the matching part of a state: other entries of dicts disappear, and other items of
    lists and tuples become None. keys: of ``value`` in the whole state."""
    if isinstance(value, dict) and value:
        pairs = [(key, part_of(each, keep, (*keys, key))) for key, each in value.items()]
        kept = {key: each for key, each in pairs if each is not _DROPPED}
        return _make_like(value, kept) if kept or not keys else _DROPPED
    if type(value) in (list, tuple) and not _SINGLE.issuperset(map(type, value)):
        parts = [part_of(each, keep, (*keys, index)) for index, each in enumerate(value)]
        if all(each is _DROPPED for each in parts) and keys:
            return _DROPPED
        return type(value)(None if each is _DROPPED else each for each in parts)
    return value if keep(".".join(map(str, keys))) else _DROPPED


def _make_like(value: dict[Any, Any], kept: dict[Any, Any]) -> dict[Any, Any]:
    if type(value) is dict:
        return kept
    for key in [key for key in value if key not in kept]:
        del value[key]
    value.update(kept)
    return value
