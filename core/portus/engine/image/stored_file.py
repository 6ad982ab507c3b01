"""``StoredFile``: the places and digests of the storages of a checkpoint file, whatever its
format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from portus.engine.format.checksum import UNIT, digest, unit_counts
from portus.engine.image.image import Column, Digests
from portus.errors import CorruptionError

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
    if len(data) != length:
        raise CorruptionError(f"{name}: byte {offset}: expected {length} bytes, found {len(data)}")
    return data
