"""The declaration of a message: its number and name, its sender, and its states.

``messages`` declares them all. The order of a conversation, the limit of each body and the frames
that are accepted (``connection``) follow from that.

A mistake in a declaration is ours: it is an ``AssertionError``, when the module is imported.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, TypeVar

from msgspec import inspect

_OVERHEAD: Final = 128
"""Bytes of a body besides its fields, at most: msgpack's own, and room for a later ``HELLO``."""

_HOSTS: Final = 64
"""The least number of a host's messages; those of a client are below."""


class Phase(enum.Enum):
    """The state of a conversation."""

    NEW = "new"
    GREETED = "greeted"
    CHALLENGED = "challenged"
    PROVING = "proving"
    READY = "ready"
    ASKED = "asked"
    PULLING = "pulling"
    CLOSED = "closed"


Moves = Mapping[Phase, Phase]
"""The states in which a message may be sent, and the state that follows each."""

ASK: Final = {Phase.READY: Phase.ASKED}
ANSWER: Final = {Phase.ASKED: Phase.READY}


@dataclass(frozen=True, slots=True, eq=False)
class MessageKind:
    """The declaration of a message. ``body_size_max``: bytes of a body, at most. ``type``: the
    class of its bodies; None if these are plain bytes. ``has_digest``: False if others check them.
    """

    number: int
    name: str
    moves: Moves
    body_size_max: int
    type: type[Any] | None = None
    has_digest: bool = True

    @property
    def from_client(self) -> bool:
        """True if a client sends it."""
        return self.number < _HOSTS

    @property
    def is_payload(self) -> bool:
        """True if its bodies are plain bytes."""
        return self.type is None

    @property
    def is_request(self) -> bool:
        """True if a host must answer it."""
        return self.from_client and self.moves.get(Phase.READY) is Phase.ASKED


class _HasKind(Protocol):
    kind: ClassVar[MessageKind]


Declared = TypeVar("Declared", bound=_HasKind)


class Vocabulary:
    """The messages of a protocol, in the order of their numbers."""

    def __init__(self) -> None:
        self._kinds: Final[dict[int, MessageKind]] = {}

    def __iter__(self) -> Iterator[MessageKind]:
        return iter(sorted(self._kinds.values(), key=lambda kind: kind.number))

    def get(self, number: int) -> MessageKind | None:
        """Return the message kind with a number, or None."""
        return self._kinds.get(number)

    def message(
        self, number: int, name: str, moves: Moves | None = None
    ) -> Callable[[type[Declared]], type[Declared]]:
        """Declare the decorated class as a message. number: below 64 if clients send it. moves:
        by default those of a request, or of the answer to one."""

        def declare(body: type[Declared]) -> type[Declared]:
            size_max = _OVERHEAD + _size_max(inspect.type_info(body), name)
            usual = ASK if number < _HOSTS else ANSWER
            body.kind = self._add(MessageKind(number, name, moves or usual, size_max, body))
            return body

        return declare

    def payload(
        self, number: int, name: str, moves: Moves, body_size_max: int, *, has_digest: bool
    ) -> MessageKind:
        """Declare frames of plain bytes."""
        return self._add(MessageKind(number, name, moves, body_size_max, None, has_digest))

    def _add(self, kind: MessageKind) -> MessageKind:
        for other in self._kinds.values():
            if kind.number == other.number or kind.name == other.name:
                raise AssertionError(
                    f"message {kind.number}, {kind.name}: {other.number} is {other.name} already"
                )
        self._kinds[kind.number] = kind
        return kind


def _size_max(field: inspect.Type, name: str) -> int:
    """Return the bytes that a value takes in msgpack, at most. Raise ``AssertionError`` for a value
    without a limit."""
    match field:
        case inspect.StructType():
            return sum(_size_max(each.type, f"{name}.{each.name}") for each in field.fields)
        case inspect.BytesType(max_length=int(length)):
            return 5 + length
        case inspect.StrType(max_length=int(length)):
            return 5 + 4 * length  # characters, of four bytes at most
        case inspect.ListType(max_length=int(length)):
            return 5 + length * _size_max(field.item_type, name)
        case inspect.IntType() | inspect.BoolType() | inspect.EnumType():
            return 16
    raise AssertionError(f"message {name}: it has no limit")
