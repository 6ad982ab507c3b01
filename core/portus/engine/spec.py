"""The nouns that every floor shares: frozen, validated, free of torch and of I/O."""

from __future__ import annotations

import enum
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from portus.errors import UsageError

PAGE: Final = 4096
"""Bytes. No two commits write the same page (V1); every reservation is a multiple of it."""


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A run of bytes in a pool: ``offset`` from its start and ``length``, both in bytes."""

    offset: int
    length: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 0:
            raise UsageError(f"extent out of range: offset {self.offset}, length {self.length}")

    @property
    def end(self) -> int:
        """The first byte after the extent."""
        return self.offset + self.length


class TensorKind(enum.Enum):
    """The class of a tensor when it was saved, so that it is loaded as the same class."""

    TENSOR = "tensor"
    PARAMETER = "parameter"
    BUFFER = "buffer"


class TensorSpec(msgspec.Struct, frozen=True):
    """The layout of one tensor over its storage.

    ``name`` is its key path in the state, joined by dots. ``dtype`` is torch's name without the
    ``torch.`` (``"float32"``). ``strides`` and ``offset`` count elements, as torch does;
    ``storage`` is an index into the storages of the state, or -1 for a meta tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int
    offset: int
    kind: TensorKind = TensorKind.TENSOR
    requires_grad: bool = False
    conjugate: bool = False
    negative: bool = False


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One committed version of a model.

    ``id`` is unique in its pool and grows; ``commit`` is the commit that made it visible, the order
    that "newest" means (V4); ``step`` is the caller's, and may come twice. ``token`` is 16 random
    bytes by which a pointer names the version. ``size`` is the sum of its storages in bytes, shared
    ones included. ``time_ns`` is Unix time in nanoseconds. ``inexact``: another process wrote a
    part of it while that was copied, so it may hold bytes of several moments. ``metrics``: those it
    was saved with, by name, for ``Keep(best=)``. These two do not identify a version, so
    comparisons ignore them.
    """

    model: str
    id: int
    commit: int
    step: int
    token: bytes
    time_ns: int
    size: int
    inexact: bool = field(default=False, compare=False)
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)


def check_step(step: object) -> int:
    """Return a step of training, as a user passes one. Raise ``UsageError`` if it is not a step."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]  # fails for what is no integer
    except TypeError as error:
        raise UsageError(f"step: expected an integer, found {step!r:.80}") from error
    if number < 0:
        raise UsageError(f"step: expected 0 or more, found {number}")
    if number >= 1 << 63:
        raise UsageError(f"step: expected less than 2**63, found {number}")
    return number
