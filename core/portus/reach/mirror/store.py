"""What a mirror asks of an object store. Read this before you write one.

1. What ``put`` or ``create`` gave back is there for everybody from then on, whole, and survives, as
   far as the store can promise.
2. An object is replaced as a whole or not at all: nobody ever gets a part of one, or a mixture.
3. Of several ``create`` of one name one alone is told True, whoever they are. Where a store cannot
   do that, two writers of one mirror are not kept apart, and nothing else is lost.
4. Nothing else. What raised may have taken effect, may take effect later, or twice: also after its
   caller was killed, and after whatever he asked for since. A list may lack what is newest.

Names are paths below the prefix that the store was opened for, with slashes, of ASCII letters,
digits and ``-_.=``. All methods block, may be called from several threads, and raise:

- ``TransportError``: the store could not be asked, or did not answer. Try again later.
- ``UsageError``: it answered, and refuses: wrong credentials, no such bucket, no right to do this.
- ``UnwritableError``, which is one: no right to write. By ``put``, ``create`` and ``copy`` alone.
- ``MediumError``: it has no room.
- ``MissingError``: there is no such object. By ``get``, ``get_range`` and ``copy`` alone.

A message names the cause and the address, and no secret.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from portus.errors import PortusError, UsageError

PART_SIZE: Final = 8 << 20
"""Bytes of a part that suit every store: a few of them are in memory at once, beside a training."""

Part = bytes | memoryview


class MissingError(PortusError):
    """An error: the store has no object of that name."""


class UnwritableError(UsageError):
    """The store knows who asks, who has no right to write there; or it keeps no two writers apart:
    a directory without hard links."""


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One object as a store lists it. ``size`` in bytes; ``modified``: Unix time in seconds, by the
    clock of the store."""

    name: str
    size: int
    modified: float


class Store(Protocol):
    """A store of objects. Whoever opened it closes it."""

    def put(self, name: str, data: bytes) -> None:
        """Make ``data`` the object of that name, whatever it was before."""

    def create(self, name: str, data: bytes) -> bool:
        """The same, if there is no such object yet; False, and nothing changes, if there is one. It
        may be what an earlier, or a repeated, request of the same caller made."""

    def get(self, name: str) -> bytes:
        """All of an object."""

    def get_range(self, name: str, start: int, into: memoryview) -> None:
        """Fill ``into`` (writable, contiguous) with what begins at byte ``start``. Raises
        ``CorruptionError`` if the object ends before."""

    def list(self, prefix: str, after: str = "") -> Iterator[ListedObject]:
        """The objects whose names begin with ``prefix``, whole segments or nothing (``"a/b/"``),
        and come after ``after``, in the order of their names. Asks for a page at a time, as it is
        used: who needs the first one alone pays for no more."""

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects. Those that are not there are no error. If it raises, any of them may be
        gone, now or later."""

    def close(self) -> None:
        """Let go of connections. A second call does nothing."""


@runtime_checkable
class FileStore(Store, Protocol):
    """A store of objects of any size."""

    def put_stream(self, name: str, parts: Iterable[Part], size: int) -> None:
        """Make ``parts``, end to end, an object, as ``put`` does, but ask for each part when it is
        needed, and let go of it once it is sent; about ``size`` bytes in all. What asking raises is
        raised, and nothing has changed then."""

    def copy(self, name: str, target: str, size: int) -> bool:
        """Make the object ``name``, of ``size`` bytes, the object ``target`` as well, as ``put``
        does, without asking for its bytes; False, and nothing changes, if the store copies none
        that large. Raises ``MissingError``."""
