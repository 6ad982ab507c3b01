"""What is declared of a message: number, name, who says it and when, its limit, its handler.

``messages`` declares them all. The order of a conversation (``session``), the frames that are taken
(``connection``) and the methods of a storage host that answer (``handlers``) follow from that.

A mistake in a declaration is ours: it is an ``AssertionError``, when the module is imported.
"""

from __future__ import annotations

import enum
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, TypeVar

SMALL: Final = 8 << 10
"""Bytes of a body, at most, where nothing else is declared."""

_HOSTS: Final = 64
"""Numbers of the host's messages are not below; those of a client's are."""


class Phase(enum.Enum):
    """Where a conversation is."""

    NEW = "new"
    GREETED = "greeted"
    CHALLENGED = "challenged"
    PROVING = "proving"
    READY = "ready"
    ASKED = "asked"
    LOOKING = "looking"
    READING = "reading"
    CHECKING = "checking"
    CONNECTING = "connecting"
    PUSHING = "pushing"
    BEGINNING = "beginning"
    SAVING = "saving"
    OFFERED = "offered"
    PULLING = "pulling"
    SHARING = "sharing"
    PLACING = "placing"
    GETTING = "getting"
    FINDING = "finding"
    CONFIRMING = "confirming"
    ABANDONING = "abandoning"
    CLOSED = "closed"


Moves = Mapping[Phase, Phase]
"""The states in which a message may be said, and which state follows."""

_WAITING: Final = frozenset({Phase.READY, Phase.SAVING})
"""The host waits for a request."""


@dataclass(frozen=True, slots=True, eq=False)
class MessageKind:
    """What is declared of a message. ``body_size_max``: bytes of a body, at most. ``handler``: the
    method of a host that answers; empty if this is no request. ``type``: the class of its bodies;
    None if these are plain bytes."""

    number: int
    name: str
    moves: Moves
    body_size_max: int
    handler: str = ""
    type: type[Any] | None = None

    @property
    def from_client(self) -> bool:
        """True if a client says it."""
        return self.number < _HOSTS

    @property
    def is_payload(self) -> bool:
        """True if its bodies are plain bytes."""
        return self.type is None

    @property
    def is_request(self) -> bool:
        """True if a host has to answer it: a client says it while the host waits for a request, and
        the conversation goes on."""
        before = _WAITING & self.moves.keys()
        return self.from_client and any(self.moves[each] is not Phase.CLOSED for each in before)


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
        """The one with that number."""
        return self._kinds.get(number)

    def client(
        self,
        number: int,
        name: str,
        moves: Moves,
        *,
        handler: str = "",
        body_size_max: int = SMALL,
    ) -> Callable[[type[Declared]], type[Declared]]:
        """Declares the class below as a message that clients say."""
        if not 0 < number < _HOSTS:
            raise AssertionError(f"message {name}: {number} is a number of the host's messages")

        def declare(body: type[Declared]) -> type[Declared]:
            kind = MessageKind(number, name, moves, body_size_max, handler, body)
            body.kind = self._add(kind)
            return body

        return declare

    def host(
        self, number: int, name: str, moves: Moves, *, body_size_max: int = SMALL
    ) -> Callable[[type[Declared]], type[Declared]]:
        """Declares the class below as a message that hosts say."""
        if not _HOSTS <= number < 256:
            raise AssertionError(f"message {name}: {number} is no number of a host's message")

        def declare(body: type[Declared]) -> type[Declared]:
            kind = MessageKind(number, name, moves, body_size_max, type=body)
            body.kind = self._add(kind)
            return body

        return declare

    def payload(self, number: int, name: str, moves: Moves, body_size_max: int) -> MessageKind:
        """Declares frames of plain bytes."""
        return self._add(MessageKind(number, name, moves, body_size_max))

    def _add(self, kind: MessageKind) -> MessageKind:
        for other in self._kinds.values():
            if kind.number == other.number or kind.name == other.name:
                raise AssertionError(
                    f"message {kind.number}, {kind.name}: {other.number} is {other.name} already"
                )
        if kind.is_request != bool(kind.handler):
            raise AssertionError(
                f"message {kind.name}: it is a request, and no handler is declared"
                if kind.is_request
                else f"message {kind.name}: it is no request, so {kind.handler!r} never hears it"
            )
        self._kinds[kind.number] = kind
        return kind

    def order(self) -> dict[tuple[Phase, MessageKind], Phase]:
        """Return the state that follows each state and message, sorted by the state before."""
        moves = {(before, kind): after for kind in self for before, after in kind.moves.items()}
        states = list(Phase)
        return dict(sorted(moves.items(), key=lambda move: states.index(move[0][0])))

    def handlers(self, *owners: type) -> dict[MessageKind, tuple[type, Callable[..., Any]]]:
        """The method of one of ``owners`` that answers, for each request, with its owner. A handler
        has the declared name behind an underscore, and takes one argument, ``message``, of the
        class of the message.

        Raises ``AssertionError`` for a request without a handler, a handler of another message, and
        a handler that no message names.
        """
        where = " or ".join(f"{owner.__qualname__} of {owner.__module__}" for owner in owners)
        there = {
            (owner, name): method
            for owner in owners
            for name, method in vars(owner).items()
            if name.startswith("_") and _takes_a_message(method)
        }
        found = {}
        for kind in self:
            if not kind.is_request:
                continue
            name = f"_{kind.handler}"
            owner = next((owner for owner in owners if (owner, name) in there), None)
            if owner is None:
                raise AssertionError(
                    f"message {kind.name}: its handler is declared as {kind.handler!r}, and "
                    f"{where} has no method {name}(self, message)"
                )
            method = there.pop((owner, name))
            taken = typing.get_type_hints(method).get("message")
            if taken is not kind.type:
                raise AssertionError(
                    f"message {kind.name}: {name} of {where} takes {taken}, expected {kind.type}"
                )
            found[kind] = owner, method
        if there:
            left = ", ".join(name for _, name in there)
            raise AssertionError(f"{left} of {where}: no message names it as handler")
        return found


def _takes_a_message(method: object) -> bool:
    return inspect.isfunction(method) and [*inspect.signature(method).parameters] == [
        "self",
        "message",
    ]
