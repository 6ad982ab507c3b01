"""Equality that sees all that a state must bring back: types, order, signs of zero, NaN bits."""

from __future__ import annotations

import argparse
import collections
import ctypes
import dataclasses
import functools
import io
import struct
import types
from typing import Any

import numpy as np
import torch


def raw_bytes(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


def assert_same(one: Any, other: Any, path: str = "state") -> None:
    """Fails with the path of the first place where the two differ."""
    assert type(one) is type(other), (path, type(one), type(other))
    if isinstance(one, torch.Tensor):
        _same_tensor(one, other, path)
    elif isinstance(one, float):
        assert struct.pack(">d", one) == struct.pack(">d", other), (path, one, other)
    elif isinstance(one, complex):
        assert_same((one.real, one.imag), (other.real, other.imag), path)
    elif isinstance(one, np.ndarray):
        _same_array(one, other, path)
    elif isinstance(one, np.generic):
        assert one.dtype == other.dtype, path
        assert one.tobytes() == other.tobytes(), (path, one, other)
    elif isinstance(one, dict):
        _same_dict(one, other, path)
    elif isinstance(one, (list, tuple, collections.deque)):
        assert len(one) == len(other), (path, one, other)
        assert getattr(one, "maxlen", None) == getattr(other, "maxlen", None), path
        for place, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{path}[{place}]")
    elif isinstance(one, (argparse.Namespace, types.SimpleNamespace)):
        assert_same(vars(one), vars(other), path)
    elif isinstance(one, (set, frozenset)):
        _same_set(one, other, path)
    elif isinstance(one, io.BytesIO):
        assert_same(
            [one.getvalue(), one.tell(), vars(one)], [other.getvalue(), other.tell(), vars(other)]
        )
    elif isinstance(one, slice):
        assert_same([one.start, one.stop, one.step], [other.start, other.stop, other.step], path)
    elif isinstance(one, functools.partial):
        assert_same([one.func, one.args, one.keywords], [other.func, other.args, other.keywords])
    elif dataclasses.is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in dataclasses.fields(one)]
        for name in names:
            assert_same(getattr(one, name, None), getattr(other, name, None), f"{path}.{name}")
    else:
        assert one == other, (path, one, other)
        assert isinstance(one, int) or repr(one) == repr(other), (path, one, other)


def _same_dict(one: Any, other: Any, path: str) -> None:
    assert len(one) == len(other), (path, [*one], [*other])
    for (key, left), (other_key, right) in zip(one.items(), other.items(), strict=True):
        assert_same(key, other_key, f"{path} key {key!r}")
        assert_same(left, right, f"{path}[{key!r}]")
    assert getattr(one, "default_factory", None) is getattr(other, "default_factory", None), path
    assert_same(
        getattr(one, "__dict__", None), getattr(other, "__dict__", None), f"{path}.__dict__"
    )


def _same_set(one: Any, other: Any, path: str) -> None:
    assert len(one) == len(other), (path, one, other)
    for left, right in zip(sorted(one, key=_order), sorted(other, key=_order), strict=True):
        assert_same(left, right, path)


def _order(value: object) -> tuple[str, str]:
    return type(value).__name__, repr(
        sorted(map(_order, value)) if isinstance(value, frozenset) else value
    )


def _same_array(one: Any, other: Any, path: str) -> None:
    assert one.dtype == other.dtype, (path, one.dtype, other.dtype)
    assert one.shape == other.shape, (path, one.shape, other.shape)
    if one.flags.c_contiguous or one.flags.f_contiguous:
        assert one.flags.c_contiguous == other.flags.c_contiguous, path
        assert one.flags.f_contiguous == other.flags.f_contiguous, path
    assert one.tobytes() == other.tobytes(), (path, one, other)
    assert other.flags.writeable, path


def _same_tensor(one: Any, other: Any, path: str) -> None:
    for look in ("dtype", "shape", "requires_grad", "is_meta"):
        assert getattr(one, look) == getattr(other, look), (path, look)
    for ask in ("stride", "storage_offset", "is_conj", "is_neg"):
        assert getattr(one, ask)() == getattr(other, ask)(), (path, ask)
    assert getattr(one, "_is_buffer", False) == getattr(other, "_is_buffer", False), path
    if not one.is_meta:
        assert raw_bytes(one.untyped_storage()) == raw_bytes(other.untyped_storage()), path
