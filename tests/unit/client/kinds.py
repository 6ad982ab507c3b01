"""Classes of a user, at the top level of a module, where they can be found by name."""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import torch

from portus.client.state.codecs import register_codec


class Color(enum.Enum):
    RED = "red"
    GREEN = (1, 2)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mode(str, enum.Enum):
    MIN = "min"
    MAX = "max"


class Rights(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()
    RUN = enum.auto()


Point = namedtuple("Point", ["x", "y"])


class LoudPoint(Point):
    __slots__ = ()

    def __new__(cls, x: int, y: int) -> LoudPoint:
        RAN.append("__new__")
        return super().__new__(cls, x, y)


class Batch(NamedTuple):
    tensor: torch.Tensor
    label: str = "none"


@dataclasses.dataclass
class Config:
    width: int
    weight: torch.Tensor | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    width: int
    name: str


@dataclasses.dataclass
class Loud:
    """Says so if any of its code runs."""

    width: int

    def __post_init__(self) -> None:
        RAN.append("__post_init__")

    def __setattr__(self, name: str, value: object) -> None:
        RAN.append(f"__setattr__ {name}")
        object.__setattr__(self, name, value)


@dataclasses.dataclass
class Dangerous:
    path: str

    def __del__(self) -> None:
        RAN.append("__del__")


class Attributes(dict[str, Any]):
    """Like the one of Lightning: attributes are keys."""

    def __setitem__(self, key: str, value: object) -> None:
        RAN.append("__setitem__")
        super().__setitem__(key, value)


class Ordered(OrderedDict[str, Any]):
    pass


class Outer:
    class Block(torch.nn.Module):
        pass

    @staticmethod
    def anneal(step: float) -> float:
        return step


class CustomTensor(torch.Tensor):
    pass


def schedule(step: int) -> float:
    return 1.0 / (step + 1)


class Replay:
    """What only a codec can save: it has a lock, and so no pickle either."""

    def __init__(self, rows: Any, note: Any = None) -> None:
        self.rows = rows
        self.note = note
        self.lock = threading.Lock()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Replay) and (self.rows, self.note) == (other.rows, other.note)

    __hash__ = None  # type: ignore[assignment]

    def encoded(self) -> dict[str, object]:
        return {"rows": self.rows, "note": self.note}

    @classmethod
    def decoded(cls, state: dict[str, object]) -> Any:
        return cls(state["rows"], state["note"])


register_codec(Replay, Replay.encoded, Replay.decoded, name="tests.Replay")


RAN: list[str] = []
"""What ran of the code of these classes."""
