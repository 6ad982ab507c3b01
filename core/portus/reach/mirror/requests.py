"""What the pure part of a mirror asks of whoever performs it.

Its functions are generators: they yield a request, and get the answer, or the error, back. So they
run over a store (``mirror.perform``), and over every history that tests make up.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from portus.reach.mirror.pieces import WantedObject
from portus.reach.mirror.store import ListedObject, MissingError


@dataclass(frozen=True, slots=True)
class GetObject:
    """All of an object, as bytes; or ``MissingError``."""

    name: str


@dataclass(frozen=True, slots=True)
class GetObjects:
    """Several objects, side by side: a list of bytes, with None for what is not there."""

    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class CreateObject:
    """``Store.create``."""

    name: str
    data: bytes


@dataclass(slots=True)
class PutObject:
    """One object: bytes, or a file or a piece of one, which is read from where it lies. ``done``:
    set by who performs it, when the store said that it is there."""

    name: str
    content: bytes | WantedObject
    done: bool = field(default=False)


@dataclass(frozen=True, slots=True)
class PutObjects:
    """Several objects, side by side, in any order. If it raises, some of them may be there, or
    come to be."""

    puts: Sequence[PutObject]


@dataclass(frozen=True, slots=True)
class ListObjects:
    """``Store.list``."""

    prefix: str


@dataclass(frozen=True, slots=True)
class DeleteObjects:
    """``Store.delete``."""

    names: Sequence[str]


Request: TypeAlias = (
    GetObject | GetObjects | CreateObject | PutObjects | ListObjects | DeleteObjects
)

_T = TypeVar("_T")
Steps: TypeAlias = Generator[Request, object, _T]


def get(name: str) -> Steps[bytes | None]:
    """An object; None if it is not there."""
    try:
        found = yield GetObject(name)
    except MissingError:
        return None
    assert isinstance(found, bytes)
    return found


def get_all(names: Sequence[str]) -> Steps[list[bytes | None]]:
    """Several objects; None for those that are not there."""
    found = yield GetObjects(names)
    assert isinstance(found, list)
    return found


def create(name: str, data: bytes) -> Steps[bool]:
    """True if it was made now."""
    made = yield CreateObject(name, data)
    assert isinstance(made, bool)
    return made


def list_objects(prefix: str) -> Steps[Iterator[ListedObject]]:
    """The objects there, in the order of their names."""
    found = yield ListObjects(prefix)
    assert isinstance(found, Iterator)
    return found
