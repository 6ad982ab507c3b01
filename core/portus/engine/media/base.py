"""The promises of a medium. Read this before you write one.

1. After ``persist(ranges)`` returns, the bytes stored in those ranges before the call survive
   power loss, as far as the medium can promise (``MediumInfo.volatile`` says when it cannot).
2. Nothing else. A store not yet persisted may survive, or not, in any order, torn at any 512
   bytes (a file) or any 8 bytes (memory). No store is atomic: a caller that needs that adds a
   checksum.
3. After ``grow(size)`` returns, every byte below ``size`` can be stored without running out of
   space, reads as zero until stored, and the new size survives power loss.
4. After a failed ``persist`` or ``grow`` that may have lost bytes, the medium is *poisoned*: every
   later ``grow``, ``store`` and ``persist`` raises ``MediumError``; ``load`` still works.
   Durability is unknown, so no caller retries. A user can poison a medium too (``poison``), when
   another writer has changed its bytes: no store of ours may harm that writer.

All methods raise ``MediumError`` for errors of the machine and ``UsageError`` for a range outside
the medium. ``load`` and ``store`` may be called from several threads on disjoint ranges.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from portus.engine.spec import Extent
from portus.errors import MediumError


@dataclass(frozen=True, slots=True)
class MediumKind:
    """A way in which bytes reach a medium, with the facts about it; declared in its module.

    name: in words, for people. is_device: a pool on it fills all of it, so there is no limit, no
        quota, and no space for mirrored objects; `portus format` makes one.
        is_persistent_memory: its bytes are reached by addresses.
    """

    name: str
    is_device: bool = False
    is_persistent_memory: bool = False


PLAIN_FILE: Final = MediumKind("file, pwrite")


@dataclass(frozen=True, slots=True)
class MediumInfo:
    """The facts of a medium. ``name`` is its path, or a word; ``granularity`` in bytes is the unit
    that can tear apart on power loss; ``volatile``: its bytes do not survive power loss (tmpfs,
    plain memory)."""

    kind: MediumKind
    name: str
    granularity: int
    volatile: bool
    writable: bool


class Medium(Protocol):
    """Bytes that can be read, stored and persisted. See the module for the promise."""

    @property
    def info(self) -> MediumInfo:
        """The facts of the medium; the same as long as it is open."""

    @property
    def size(self) -> int:
        """Bytes that can be addressed now. A reader sees growth by another process."""

    @property
    def is_poisoned(self) -> bool:
        """True once the medium accepts no more writes; see 4."""

    def grow(self, size: int) -> None:
        """Make the medium ``size`` bytes long, allocated and durable; never shrinks it."""

    def store(self, offset: int, data: bytes | memoryview) -> None:
        """Put ``data`` (contiguous bytes) at ``offset``; not durable until persisted."""

    def load(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` (writable, contiguous) from ``offset``. Sees every earlier store."""

    def persist(self, ranges: Sequence[Extent]) -> None:
        """Return when every byte stored before in ``ranges`` survives power loss."""

    def close(self) -> None:
        """Release all resources. A second call does nothing. Does not persist."""

    def poison(self, reason: str) -> None:
        """Accept no stores any more, for good; see 4. reason: for messages, as a clause."""


class ReadOnlyMedium(abc.ABC):
    """A medium that can only be read: it refuses stores. ``_refusal``: the error."""

    @property
    def is_poisoned(self) -> bool:
        return False

    def grow(self, size: int) -> None:
        raise self._refusal()

    def store(self, offset: int, data: bytes | memoryview) -> None:
        raise self._refusal()

    def persist(self, ranges: Sequence[Extent]) -> None:
        raise self._refusal()

    def poison(self, reason: str) -> None:
        raise self._refusal()

    @abc.abstractmethod
    def _refusal(self) -> MediumError: ...


@runtime_checkable
class MappedMedium(Medium, Protocol):
    """A medium whose bytes also have addresses in this process, while it is open."""

    def address(self, extent: Extent) -> int:
        """Return the address of ``extent``, writable if the medium is; valid until ``close``.

        It stays valid across ``grow``. Raises ``UsageError`` outside the medium, and
        ``MediumError`` when poisoned.
        """

    def expect(self, extent: Extent) -> None:
        """Announce that bytes of ``extent`` are about to be changed through their address.

        The medium may make their pages present, and changes none of them. Only a hint.
        """

    def wrote(self, extent: Extent) -> None:
        """Announce that bytes of ``extent`` were changed through their address.

        The medium may start to write them back; it does not wait. They count as stored.
        """
