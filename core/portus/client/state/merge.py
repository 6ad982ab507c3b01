"""What a version holds besides tensors, put into a state that is there."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import types
from collections import deque
from typing import Any, Final

import torch

from portus.client.state.classes import fields_of
from portus.client.state.codecs import codec_of
from portus.client.state.leaves import PLAIN

HOLE: Final = object()
"""Where a tensor was, in what a version holds besides tensors."""

_Row = list[object] | tuple[object, ...] | deque[object]
_ROWS: Final = (list, tuple, deque)
_NAMESPACES: Final = (argparse.Namespace, types.SimpleNamespace)


class Merge:
    """Puts what a version holds besides tensors into a state, whose tensors stay where they are.

    Containers of the state that can be changed are changed in place; a tuple that holds a tensor
    is made again around it. An object of a registered class is replaced. ``complete``: the tensors
    of both are the same, so what the state lacks is added, and lists get the length that they had.
    """

    def __init__(self, *, complete: bool) -> None:
        self._complete: Final = complete

    def merged(self, old: object, value: object) -> object:
        """What goes in the place of ``old``."""
        if value is HOLE:
            return old
        if isinstance(old, torch.Tensor):
            return _filled(old, value)
        if codec_of(type(value)) is not None:
            return value
        if isinstance(old, dict) and isinstance(value, dict):
            self._merge_dict(old, value)
        elif isinstance(old, _ROWS) and isinstance(value, _ROWS):
            return self._merged_row(old, value)
        elif isinstance(old, _NAMESPACES) and isinstance(value, _NAMESPACES):
            self._merge_dict(vars(old), vars(value))
        elif _is_dataclass(old) and type(value) is type(old):
            for name, new in fields_of(value).items():
                object.__setattr__(old, name, self.merged(getattr(old, name, None), new))
        else:
            return old if _has_hole(value) else value
        return old

    def _merge_dict(self, old: dict[Any, Any], value: dict[Any, Any]) -> None:
        for key, new in value.items():
            if key in old:
                old[key] = self.merged(old[key], new)
            elif self._complete:
                old[key] = new

    def _merged_row(self, old: _Row, value: _Row) -> object:
        items, news = list(old), list(value)
        both = min(len(items), len(news))
        is_one_leaf = PLAIN.issuperset(map(type, (*items, *news)))
        rest = news[both:] if self._complete or is_one_leaf else items[both:]
        items = [*map(self.merged, items[:both], news[:both]), *rest]
        if isinstance(old, tuple):
            return tuple.__new__(type(old), items)
        if isinstance(old, list):
            old[:] = items
        else:
            old.clear()
            old.extend(items)
        return old


def _filled(old: torch.Tensor, value: object) -> object:
    """A tensor that is no plain one comes with what is no tensor: it is copied in place, if torch
    can do that."""
    if not isinstance(value, torch.Tensor):
        return old
    if type(value) is type(old) and value.shape == old.shape and value.dtype == old.dtype:
        with contextlib.suppress(RuntimeError, NotImplementedError), torch.no_grad():
            return old.copy_(value)
    return value


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _has_hole(value: object) -> bool:
    """True if a tensor was left out of ``value``, which is no place to put it into."""
    if codec_of(type(value)) is not None:  # made whole
        return False
    if isinstance(value, dict):
        return any(map(_has_hole, value.values()))
    if isinstance(value, _ROWS):
        return any(map(_has_hole, value))
    return value is HOLE or (_is_dataclass(value) and _has_hole(fields_of(value)))
