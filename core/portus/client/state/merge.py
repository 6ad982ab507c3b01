"""What a version holds besides tensors, put into a state that is there."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch

from portus.client.state.walk import (
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

_Row = list[object] | tuple[object, ...] | deque[object]


class Merge:
    """Puts what a version holds besides tensors into a state, whose tensors stay where they are.

    Containers of the state that can be changed are changed in place; a tuple that holds a tensor
    is made again around it. ``complete``: the tensors of both are the same, so what the state lacks
    is added, and lists get the length that they had. ``keep``: the key paths that are asked for.
    """

    def __init__(self, *, complete: bool, keep: Callable[[str], bool] | None) -> None:
        self._complete: Final = complete
        self._keep: Final = keep

    def merged(self, old: object, value: object, path: str = "") -> object:
        """What goes in the place of ``old``, at a key path."""
        if is_plain(value):
            return old
        if isinstance(old, torch.Tensor):
            return _filled(old, value) if self._is_kept(path) else old
        if isinstance(old, dict) and isinstance(value, dict):
            self._merge_dict(old, value, path)
        elif isinstance(old, ROWS) and isinstance(value, ROWS):
            return self._merged_row(old, value, path)
        elif isinstance(old, NAMESPACES) and isinstance(value, NAMESPACES):
            self._merge_dict(vars(old), vars(value), path)
        elif is_dataclass(old) and type(value) is type(old):
            for name, new in fields_of(value).items():
                merged = self.merged(getattr(old, name, None), new, below(path, name))
                object.__setattr__(old, name, merged)
        else:
            return value if self._is_whole(value, path) else old
        return old

    def _merge_dict(self, old: dict[Any, Any], value: dict[Any, Any], path: str) -> None:
        for key, new in value.items():
            if key in old:
                old[key] = self.merged(old[key], new, below(path, key))
            elif self._complete:
                old[key] = new

    def _merged_row(self, old: _Row, value: _Row, path: str) -> object:
        is_leaf = children(value) is None
        if is_leaf and not self._is_kept(path):
            return old
        items, news = list(old), list(value)
        names = getattr(value, "_fields", range(len(news)))
        both = min(len(items), len(news))
        rest = news if self._complete or is_row([*items, *news]) else items
        paths = [path if is_leaf else below(path, each) for each in names]
        items = [*map(self.merged, items[:both], news[:both], paths[:both]), *rest[both:]]
        if isinstance(old, tuple):
            return tuple.__new__(type(old), items)
        if isinstance(old, list):
            old[:] = items
        else:
            old.clear()
            old.extend(items)
        return old

    def _is_kept(self, path: str) -> bool:
        return self._keep is None or self._keep(path)

    def _is_whole(self, value: object, path: str) -> bool:
        """True if there is no tensor in ``value``, whose place is elsewhere, and all is asked
        for."""
        found = ((below(path, name) if name else path, each) for name, each in leaves(value))
        return all(not is_plain(each) and self._is_kept(name) for name, each in found)


def _filled(old: torch.Tensor, value: object) -> object:
    """A tensor that is no plain one comes with what is no tensor: it is copied in place, if torch
    can do that."""
    if not isinstance(value, torch.Tensor):
        return old
    if type(value) is type(old) and value.shape == old.shape and value.dtype == old.dtype:
        with contextlib.suppress(RuntimeError, NotImplementedError), torch.no_grad():
            return old.copy_(value)
    return value
