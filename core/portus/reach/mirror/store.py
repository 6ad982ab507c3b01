"""The interface that a mirror needs of an object store. Read this before you write one.

1. After ``put`` or ``create`` has returned, everyone finds the object, whole, and it survives, as
   far as the store can promise.
2. The store replaces an object as a whole: no reader ever gets a part of one, or a mixture.
3. Of several calls of ``create`` for one name only one returns True, whoever makes them. If a store
   cannot do that, two writers of one mirror are not kept apart, and nothing else is lost.
4. Nothing else. A call that raised may have taken effect, may take effect later, or twice: also
   after its caller was killed, and after later calls. A list may lack the newest objects.

Names are paths below the prefix that the store was opened for, with slashes, of ASCII letters,
digits and ``-_.=``. All methods block, may be called from several threads, and raise:

- ``TransportError``: the store could not be reached, or did not answer. Try again later.
- ``UsageError``: it answered, and refuses: wrong credentials, no such bucket, no right to do this.
- ``UnwritableError``, which is one: no right to write. Only by ``put``, ``create`` and ``copy``.
- ``MediumError``: it has no room.
- ``MissingError``: there is no such object. Only by ``get``, ``get_range`` and ``copy``.

A message names the cause and the address, and no secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from portus.errors import CorruptionError, PortusError, UsageError

PART_SIZE: Final = 8 << 20
"""Bytes of a part that suit every store: a few of them are in memory at once, beside a training."""

Part = bytes | memoryview


class MissingError(PortusError):
    """An error: the store has no object of that name."""


class UnwritableError(UsageError):
    """The store knows the user, who has no right to write there; or it cannot keep two writers
    apart: a directory without hard links."""


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One object of a store's list. ``size`` in bytes; ``modified``: Unix time in seconds, by the
    clock of the store."""

    name: str
    size: int
    modified: float


class Store(Protocol):
    """A store of objects of any size. Its opener closes it."""

    def put(self, name: str, data: bytes) -> None:
        """Make ``data`` the object of that name, and replace an earlier one."""

    def create(self, name: str, data: bytes) -> bool:
        """Make ``data`` the object of that name, if there is none yet. Return False, and change
        nothing, if there is one, which an earlier or repeated request of the caller may have
        made."""

    def get(self, name: str) -> bytes:
        """Return all of an object."""

    def get_range(self, name: str, start: int, length: int) -> Part:
        """Return ``length`` bytes of an object from byte ``start`` on. Raises ``CorruptionError``
        if it ends before."""

    def list(self, prefix: str, after: str = "") -> Iterator[ListedObject]:
        """Yield the objects whose names begin with ``prefix``, whole segments or nothing
        (``"a/b/"``), and come after ``after``, in the order of their names. Requests a page at a
        time, as it is used: a caller that needs only the first object pays for no more."""

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects, and ignore missing ones. If it raises, any of them may be gone, now or
        later."""

    def put_stream(self, name: str, parts: Iterable[Part], size: int, *, unless: str = "") -> None:
        """Make ``parts``, end to end, an object, as ``put`` does, but take each part when it is
        needed, and release it once it is sent; about ``size`` bytes in all. Raises the errors of
        making a part, and ``StaleError`` if the object ``unless`` exists once the parts were taken;
        then nothing has changed."""

    def copy(self, name: str, target: str, size: int) -> bool:
        """Make the object ``name``, of ``size`` bytes, the object ``target`` as well, as ``put``
        does, but within the store. Return False, and change nothing, if the store copies none that
        large. Raises ``MissingError``."""

    def close(self) -> None:
        """Close the connections. A second call does nothing."""


NAME_SIZE_MAX: Final = 900
"""Bytes. The smallest limit of a store is 1,024 (Google and S3); the rest is for the prefix."""

_SEGMENT: Final = "[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,254}"
"""At most 255 characters, as in file systems."""

_NAME: Final = re.compile(f"{_SEGMENT}(?:/{_SEGMENT})*")


def is_name(name: str) -> bool:
    """Return whether an object may have this name."""
    return len(name) <= NAME_SIZE_MAX and _NAME.fullmatch(name) is not None


def check_name(name: str, where: object) -> str:
    """Return ``name``, if an object may have it. Raise ``UsageError`` if not."""
    if is_name(name):
        return name
    raise UsageError(
        f"{where}: an object cannot be called {name!r:.100}; expected segments of ASCII letters, "
        f"digits and '-_.=', none with '.' in front or of more than 255, {NAME_SIZE_MAX} in all"
    )


def check_prefix(prefix: str, where: object) -> str:
    """Return ``prefix``, whole segments or "", without its last slash. Raise ``UsageError``."""
    if not prefix:
        return ""
    if not prefix.endswith("/"):
        raise UsageError(f"{where}: a list of {prefix!r:.100}; expected whole segments, as 'a/b/'")
    return check_name(prefix[:-1], where)


def short(what: str, start: int, expected: int, found: int) -> CorruptionError:
    """Return the error of an object that ends before the requested range does."""
    return CorruptionError(f"{what}: expected {expected} bytes from byte {start} on, found {found}")
