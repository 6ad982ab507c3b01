"""Classes that golden pools name. Their names and members stay as they are for ever."""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple


class Color(enum.Enum):
    RED = 1
    GREEN = 2


class Style(enum.Flag):
    BOLD = 1
    ITALIC = 2
    WIDE = 4


class Point(NamedTuple):
    x: float
    y: float


@dataclasses.dataclass
class Settings:
    name: str
    rate: float
    layers: list[int]


class Attributes(dict[str, object]):
    """A dict with a name of its own, and attributes."""


def double(value: int) -> int:
    return 2 * value
