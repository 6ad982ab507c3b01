"""The values of a version that are not tensors, put into an existing state."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable
from operator import is_
from typing import Any, Final

import torch

from portus.engine.state.walk import (
    NAMESPACES,
    ROWS,
    below,
    children,
    fields_of,
    is_dataclass,
    is_plain,
    is_row,
    leaves,
)

_NOTHING: Final = object()

_Row = list[object] | tuple[object, ...] | deque[object]


class Merge:
    """Puts the values of a version, except tensors, into a state, whose tensors stay in place.

    Containers of the state that can be changed are changed in place; a tuple that holds a tensor is
    made again around it. ``complete``: the tensors of both are the same, so values that the state
    lacks are added, and lists get their saved length. ``keep``: the requested key paths.
    """

    def __init__(self, *, complete: bool, keep: Callable[[str], bool] | None) -> None:
        self._complete: Final = complete
        self._keep: Final = keep

    def merge(self, old: object, value: object, path: str = "") -> object:
        """Return the value that replaces ``old``, at a key path."""
        if is_plain(value):
            return old
        if isinstance(old, torch.Tensor):
            return _fill(old, value) if self._is_kept(path) else old
        if isinstance(old, dict) and isinstance(value, dict):
            self._merge_dict(old, value, path)
        elif isinstance(old, ROWS) and isinstance(value, ROWS):
            return self._merged_row(old, value, path)
        elif isinstance(old, NAMESPACES) and isinstance(value, NAMESPACES):
            self._merge_dict(vars(old), vars(value), path)
        elif is_dataclass(old) and type(value) is type(old):
            for name, new in fields_of(value).items():
                merged = self.merge(getattr(old, name, None), new, below(path, name))
                object.__setattr__(old, name, merged)
        else:
            return value if self._is_whole(value, path) else old
        return old

    def _merge_dict(self, old: dict[Any, Any], value: dict[Any, Any], path: str) -> None:
        for key, new in value.items():
            if key in old:
                old[key] = self.merge(old[key], new, below(path, key))
            elif self._complete:
                added = self._add(new, below(path, key))
                if added is not _NOTHING:
                    old[key] = added

    def _add(self, value: object, path: str) -> object:
        """Return the value to add to a state that lacks it, without tensors."""
        if self._is_whole(value, path):
            return value
        if not isinstance(value, dict) or type(value) not in (dict, OrderedDict):
            return _NOTHING
        parts = ((key, self._add(each, below(path, key))) for key, each in value.items())
        kept = type(value)((key, each) for key, each in parts if each is not _NOTHING)
        return kept or _NOTHING

    def _merged_row(self, old: _Row, value: _Row, path: str) -> object:
        is_leaf = children(value) is None
        if is_leaf and not self._is_kept(path):
            return old
        items, news = list(old), list(value)
        names = getattr(value, "_fields", range(len(news)))
        both = min(len(items), len(news))
        more = [self._is_whole(each, path) for each in news[both:]]
        is_taken = (self._complete and all(more)) or is_row([*items, *news])
        rest = news if is_taken else items
        paths = [path if is_leaf else below(path, each) for each in names]
        before = items
        items = [*map(self.merge, items[:both], news[:both], paths[:both]), *rest[both:]]
        if isinstance(old, tuple):
            is_same = len(items) == len(before) and all(map(is_, items, before))
            return old if is_same else _tuple_like(old, items)
        if isinstance(old, list):
            old[:] = items
        else:
            old.clear()
            old.extend(items)
        return old

    def _is_kept(self, path: str) -> bool:
        return self._keep is None or self._keep(path)

    def _is_whole(self, value: object, path: str) -> bool:
        """Return True if ``value`` has no tensor, whose place would be elsewhere, and is all
        requested."""
        found = ((below(path, name) if name else path, each) for name, each in leaves(value))
        return all(not is_plain(each) and self._is_kept(name) for name, each in found)


def _tuple_like(old: tuple[object, ...], items: list[object]) -> object:
    """Return a tuple of the class of ``old``."""
    if hasattr(old, "n_sequence_fields"):  # as torch.max returns
        return type(old)(items)
    # Not by calling the class: a named tuple takes its fields as separate arguments.
    return tuple.__new__(type(old), items)


def _fill(old: torch.Tensor, value: object) -> object:
    """Return ``old`` with the values of ``value``, a tensor of a special class, copied in place if
    torch can do that; else ``value``."""
    if not isinstance(value, torch.Tensor):
        return old
    if type(value) is type(old) and value.shape == old.shape and value.dtype == old.dtype:
        with contextlib.suppress(RuntimeError, NotImplementedError), torch.no_grad():
            return old.copy_(value)
    return value
