"""``Image``: the place of every byte of a file, before any storage is copied; ``StoredFile``: the
places and digests of the storages of a file that is there, whatever its format.

An image is literal bytes and storages, each at a known offset. A format is a function from a state
to an image; a writer of images knows no format. Some literal bytes depend on the stored ones
(checksums, a directory that has them), so ``literals`` is called once all storages were copied. All
places are known from the start, and so is the size of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from portus.engine.format.checksum import UNIT, digest, unit_counts
from portus.errors import CorruptionError, UsageError

Column = NDArray[np.int64]
"""(n,) int64."""

Digests = NDArray[np.uint8]
"""(units, 16) uint8: xxh3_128 of each unit (16 MiB) of each storage, one storage after another. An
empty storage has one row, the digest of no bytes."""

Crcs = NDArray[np.uint32]
"""(n,) uint32: the CRC32 of each storage."""


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes at an offset of a file."""

    offset: int
    data: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The layout of one file of ``size`` bytes.

    ``offset`` and ``length``: of each storage, in bytes; storages do not overlap, nor do literals.
    ``literals``: takes the digests and CRCs of the stored storages, and returns all bytes around
    them, in order of their offsets. Bytes that neither literals nor storages cover are zero.
    """

    size: int
    offset: Column
    length: Column
    literals: Callable[[Digests, Crcs], Sequence[Literal]]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.length):
            raise UsageError(
                f"storages of an image: {len(self.offset)} offsets, {len(self.length)} lengths"
            )


def bytes_image(data: bytes) -> Image:
    """Return the image of a file of these bytes, without storages."""
    none, literals = np.zeros(0, np.int64), [Literal(0, data)]
    return Image(size=len(data), offset=none, length=none, literals=lambda *_: literals)


Read = Callable[[int, int], bytes]
"""``read(offset, length)``: at most ``length`` bytes of a file, fewer only at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """The contents of a file.

    ``keys``: of the storages, as the file has them; ``offset`` and ``length`` are columns in that
    order. ``digests``: of each unit of each storage in that order; None if the file has none, as
    one of stock torch or safetensors.
    """

    name: str
    size: int
    keys: tuple[str, ...]
    offset: Column
    length: Column
    digests: Digests | None

    def units(self, index: int) -> Iterator[tuple[int, int, bytes | None]]:
        """Yield offset, length and digest of each unit of a storage."""
        first = int(unit_counts(self.length[:index]).sum())
        offset, length = int(self.offset[index]), int(self.length[index])
        for at, begin in enumerate(range(0, max(1, length), UNIT), first):
            noted = None if self.digests is None else self.digests[at].tobytes()
            yield offset + begin, min(UNIT, length - begin), noted

    def places_of(self, key: str) -> list[str]:
        """Return the places of a storage in the state, for messages."""
        return [key]

    def verify(self, read: Read) -> None:
        """Read all storages. Raise ``CorruptionError`` for a storage that differs from the saved
        one, as far as the file can show."""
        for index in range(len(self.keys)):
            self._verify(index, read)

    def _verify(self, index: int, read: Read) -> None:
        for offset, length, noted in self.units(index):
            data = exactly(read, offset, length, self.name)
            if noted is not None and digest(data) != noted:
                raise CorruptionError(
                    f"{self.name}: storage {self.keys[index]}: {length} bytes at {offset} do not "
                    "match their digest"
                )


def exactly(read: Read, offset: int, length: int, name: str) -> bytes:
    """Return ``length`` bytes. Raise ``CorruptionError`` if there are fewer."""
    data = read(offset, length)
    while len(data) < length and (more := read(offset + len(data), length - len(data))):
        data += more  # Linux reads 2 GiB at once, at most
    if len(data) != length:
        raise CorruptionError(f"{name}: byte {offset}: expected {length} bytes, found {len(data)}")
    return data
