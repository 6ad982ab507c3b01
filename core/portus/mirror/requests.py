"""What the pure part of a mirror asks of whoever performs it.

Its functions are generators: they yield a request, and get the answer, or the error, back. So they
run over a store (``mirror.perform``), and over every history that ``portus.testing`` makes up.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from portus.mirror.store import Entry, MissingError
from portus.mirror.units import Pack


@dataclass(frozen=True, slots=True)
class Get:
    """All of an object, as bytes; or ``MissingError``."""

    name: str


@dataclass(frozen=True, slots=True)
class GetAll:
    """Several objects, side by side: a list of bytes, with None for what is not there."""

    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class Create:
    """``Store.create``."""

    name: str
    data: bytes


@dataclass(slots=True)
class Put:
    """One object: bytes, or a pack that is read from where it lies. ``done``: set by who performs
    it, when the store said that it is there, and what was sent was hashed once more."""

    name: str
    content: bytes | Pack
    done: bool = field(default=False)


@dataclass(frozen=True, slots=True)
class PutAll:
    """Several objects, side by side, in any order. If it raises, some of them may be there, or
    come to be."""

    puts: Sequence[Put]


@dataclass(frozen=True, slots=True)
class List:
    """``Store.list``."""

    prefix: str


@dataclass(frozen=True, slots=True)
class Delete:
    """``Store.delete``."""

    names: Sequence[str]


Request: TypeAlias = Get | GetAll | Create | PutAll | List | Delete

_T = TypeVar("_T")
Steps: TypeAlias = Generator[Request, object, _T]


def get(name: str) -> Steps[bytes | None]:
    """An object; None if it is not there."""
    try:
        found = yield Get(name)
    except MissingError:
        return None
    assert isinstance(found, bytes)
    return found


def get_all(names: Sequence[str]) -> Steps[list[bytes | None]]:
    """Several objects; None for those that are not there."""
    found = yield GetAll(names)
    assert isinstance(found, list)
    return found


def create(name: str, data: bytes) -> Steps[bool]:
    """True if it was made now."""
    made = yield Create(name, data)
    assert isinstance(made, bool)
    return made


def listed(prefix: str) -> Steps[Iterator[Entry]]:
    """The objects there, in the order of their names."""
    found = yield List(prefix)
    assert isinstance(found, Iterator)
    return found
