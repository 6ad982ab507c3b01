"""Media that are stored to: what all have in common, and those whose bytes are loaded and stored
one by one, like memory (``SpaceMedium``)."""

from __future__ import annotations

import abc
import ctypes
import errno
import threading
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from portus.engine.media.addresses import AddressRange
from portus.engine.media.base import MediumInfo, MediumKind
from portus.engine.media.file_calls import advice
from portus.engine.spec import Extent
from portus.errors import MediumError, UsageError
from portus.reach.media.pmem import Processor
from portus.reach.media.pool import bounds, spans

WORD: Final = 8
"""Bytes that a processor stores atomically."""


_BLOCK: Final = 2 << 20


class Space(Protocol):
    """The bytes of a medium, as a process sees them: a store is in caches at first."""

    @property
    def size(self) -> int:
        """Bytes of the whole space."""

    def store(self, offset: int, data: memoryview) -> None:
        """Store ``data`` at ``offset``."""

    def load(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset`` on."""

    def flush(self, offset: int, length: int) -> None:
        """Begin to write back these bytes."""

    def drain(self) -> None:
        """Wait until the bytes that this thread flushed survive power loss."""

    def close(self) -> None:
        """Release the space. A second call does nothing."""


class WritableMedium(abc.ABC):
    """The checks that all media make which are stored to, and their poison."""

    _poison = ""

    @property
    @abc.abstractmethod
    def info(self) -> MediumInfo: ...

    @property
    def is_poisoned(self) -> bool:
        """True after a persist, or the sync of a growth, has failed; and after ``poison``."""
        return bool(self._poison)

    def poison(self, reason: str) -> None:
        """Poison the medium, see ``Medium``."""
        self._poison = self._poison or f"{self.info.name}: accepts no more writes: {reason}"

    def store(self, offset: int, data: bytes | memoryview) -> None:
        """Store bytes; an error leaves these bytes, and only these, undefined."""
        self._check_writable()
        view = memoryview(data)
        self._check_range(offset, view.nbytes)
        if not view.c_contiguous:
            raise UsageError(f"{self.info.name}: store from memory that has gaps")
        if view.nbytes:
            self._put(offset, view.cast("B"))

    def persist(self, ranges: Sequence[Extent]) -> None:
        """Return when the ranges are durable. Any failure poisons the medium."""
        self._check_writable()
        for extent in bounds(ranges):
            self._check_range(extent.offset, extent.length)
        if not any(length for _, length in spans(ranges)):
            return
        try:
            self._write_back(ranges)
        except OSError as error:
            raise self._poison_after("persist", error) from error

    @abc.abstractmethod
    def _put(self, offset: int, data: memoryview) -> None: ...

    @abc.abstractmethod
    def _write_back(self, ranges: Sequence[Extent]) -> None:
        """Make the ranges durable. Raises ``OSError``."""

    @abc.abstractmethod
    def _check_open(self) -> None: ...

    @abc.abstractmethod
    def _check_range(self, offset: int, length: int) -> None: ...

    def _check_writable(self) -> None:
        self._check_open()
        if not self.info.writable:
            raise UsageError(f"{self.info.name}: opened for reading; open it with writable=True")
        self._check_sound()

    def _check_sound(self) -> None:
        if self._poison:
            raise MediumError(errno.EIO, self._poison)

    def _poison_after(self, operation: str, error: OSError) -> MediumError:
        self._poison = (
            f"{self.info.name}: accepts no more writes: {operation} failed ({error.strerror}), so "
            "bytes stored since the previous persist may be lost; older bytes can still be "
            f"loaded; {advice(error)}, then open it again"
        )
        return MediumError(error.errno, self._poison)


class SpaceMedium(WritableMedium):
    """A medium over a space, or over the first part of it. Owns the space."""

    def __init__(self, space: Space, info: MediumInfo, size: int | None = None) -> None:
        """size: bytes to use, which ``grow`` increases; None: all of them."""
        self._info: Final = info
        self._space: Final = space
        self._size = space.size if size is None else size
        self._growing: Final = threading.Lock()
        self._closed = False

    @property
    def info(self) -> MediumInfo:
        return self._info

    @property
    def size(self) -> int:
        """Bytes in use."""
        return self._size

    def grow(self, size: int) -> None:
        """Use more of the space, cleared first. Raise ``MediumError`` (ENOSPC) beyond its end."""
        self._check_writable()
        with self._growing:
            if size > self._size:
                self._extend(self._size, size)
                self._size = size

    def load(self, offset: int, target: memoryview) -> None:
        """Load through the mapping. A line that the memory lost ends the process (SIGBUS)."""
        self._check_open()
        self._check_range(offset, target.nbytes)
        if target.readonly or not target.c_contiguous:
            raise UsageError(f"{self._info.name}: load into memory that is read-only or has gaps")
        if target.nbytes:
            self._space.load(offset, target.cast("B"))

    def close(self) -> None:
        """Close the medium and its mapping. No address may be used any more."""
        self._closed = True
        self._space.close()

    def _put(self, offset: int, data: memoryview) -> None:
        self._space.store(offset, data)

    def _extend(self, before: int, size: int) -> None:
        if size > self._space.size:
            raise MediumError(
                errno.ENOSPC,
                f"{self._info.name}: cannot grow from {before} to {size} bytes: the device has "
                f"{self._space.size}; keep fewer versions, or take a larger one",
            )
        # A device still has its old bytes, but a medium that grew must read as zeros.
        zeros = memoryview(bytes(min(size - before, 1 << 20)))
        for offset in range(before, size, len(zeros)):
            self._space.store(offset, zeros[: size - offset])
        try:
            self._write_back([Extent(before, size - before)])
        except OSError as error:
            raise self._poison_after("growth", error) from error

    def _write_back(self, ranges: Sequence[Extent]) -> None:
        for offset, length in spans(ranges):
            self._space.flush(offset, length)
        # By the thread that flushed: a fence waits only for the flushes of its own thread.
        self._space.drain()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self._info.name}: used after it was closed")

    def _check_range(self, offset: int, length: int) -> None:
        if offset < 0 or offset + length > self._size:
            raise UsageError(
                f"{self._info.name}: bytes {offset} to {offset + length} are outside the "
                f"{self._size} bytes of it"
            )


class NoCache:
    """The ``Processor`` of memory that never has to be written back."""

    def flush(self, address: int, length: int) -> None:
        """Do nothing."""

    def drain(self) -> None:
        """Do nothing."""


class MappedSpace:
    """Memory at addresses of this process, written back by its processor. A ``Space``."""

    def __init__(self, addresses: AddressRange, size: int, cpu: Processor) -> None:
        self.addresses: Final = addresses
        self.size: Final = size
        self._cpu: Final = cpu

    def store(self, offset: int, data: memoryview) -> None:
        ctypes.memmove(self.addresses.start + offset, pointer(data), data.nbytes)

    def load(self, offset: int, target: memoryview) -> None:
        ctypes.memmove(pointer(target), self.addresses.start + offset, target.nbytes)

    def flush(self, offset: int, length: int) -> None:
        self._cpu.flush(self.addresses.start + offset, length)

    def drain(self) -> None:
        self._cpu.drain()

    def close(self) -> None:
        self.addresses.close()


class AddressedMedium(SpaceMedium):
    """A medium whose space is mapped into this process."""

    def __init__(self, space: MappedSpace, info: MediumInfo, size: int | None = None) -> None:
        """size: as in ``SpaceMedium``."""
        super().__init__(space, info, size)
        self._addresses: Final = space.addresses
        self._present: Final = set[int]()
        """Blocks of pages that were mapped."""

    def address(self, extent: Extent) -> int:
        """Return the address of an extent, which is writable if the medium is."""
        self._check_open()
        self._check_sound()
        self._check_range(extent.offset, extent.length)
        return self._addresses.start + extent.offset

    def expect(self, extent: Extent) -> None:
        """Map new pages, in one call."""
        self.wrote(extent)
        if not self._present.issuperset(blocks := blocks_of(extent)):
            self._addresses.populate(extent)
            self._present.update(blocks)

    def wrote(self, extent: Extent) -> None:
        """Check the extent: only ``persist`` writes back."""
        self._check_writable()
        self._check_range(extent.offset, extent.length)


def blocks_of(extent: Extent) -> range:
    """Return the numbers of the blocks that have pages of ``extent``. They are remembered as
    mapped: to map 288 MiB that are mapped already takes 20 ms of a processor."""
    return range(extent.offset // _BLOCK, -(-extent.end // _BLOCK))


def pointer(view: memoryview) -> int:
    """Return the address of the first byte of ``view``, which is not empty."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


MEMORY: Final = MediumKind("memory")


class Memory(AddressedMedium):
    """Fresh memory of this process, zeroed, with addresses that stay put. Lost at ``close``.

    The system gives pages as they are touched: unlike a file, memory that was granted by ``grow``
    may still run out (the kernel then ends a process).
    """

    def __init__(self, size: int = 0, *, name: str = "memory") -> None:
        self.space: Final = MappedSpace(AddressRange(name, size), size, NoCache())
        info = MediumInfo(MEMORY, name, WORD, volatile=True, writable=True)
        super().__init__(self.space, info, 0)
        self.grow(size)

    def _extend(self, before: int, size: int) -> None:
        self._addresses.map(size)
