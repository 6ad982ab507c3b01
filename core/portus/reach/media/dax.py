"""Persistent memory: ``DaxDevice`` on a DAX device, ``DaxFile`` on a file system with DAX.

Theory. A store goes through a mapping, straight to the memory, except for lines that are still in
caches of the processor. So ``persist`` writes back the lines of its ranges and waits. One thread
does both: a fence waits only for what its own thread has flushed. It does not matter who stored the
bytes, since caches are coherent, also with a network card that wrote there. But code that stores
around the caches must fence before it reports the store, as the C library and our helper do.

Nothing here can tell the system to write something back: on a device, msync and fsync are errors.
Where the whole file system must take part (a file without MAP_SYNC), the medium is ``MappedFile``.

A DAX device has no size except that in /sys, cannot be read or written except by mapping it, and
never grows. One that belongs to no NVDIMM namespace (a CXL memory expander, say) is volatile.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final

from portus.engine.media import linux
from portus.engine.media.addresses import AddressRange
from portus.engine.media.base import MediumInfo, MediumKind
from portus.engine.media.file_calls import FileSystemTraits, file_error
from portus.engine.media.process import Descriptor
from portus.engine.spec import Extent
from portus.errors import UsageError
from portus.reach.media.file import MappedFile
from portus.reach.media.pmem import Processor, processor
from portus.reach.media.pool import spans
from portus.reach.media.space import WORD, AddressedMedium, MappedSpace, NoCache, pointer

DAX_FILE: Final = MediumKind("file, DAX", is_persistent_memory=True)
DAX_DEVICE: Final = MediumKind("DAX device", is_device=True, is_persistent_memory=True)

_SYS_DEVICES: Final = "/sys/dev/char"


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The system's facts about a DAX device. ``size`` and ``alignment`` in bytes; ``volatile``: it
    belongs to no NVDIMM namespace."""

    path: str
    size: int
    alignment: int
    volatile: bool


def device_facts(path: str) -> DeviceFacts | None:
    """Return the facts of the device at ``path``; None if it is no DAX device. Opens no device.

    Raises ``MediumError`` if the system does not report them.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISCHR(status.st_mode):
            return None
        number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        place = Path(_SYS_DEVICES, number).resolve()
        if (place / "subsystem").resolve().name != "dax":
            return None
        return DeviceFacts(
            path=path,
            size=int((place / "size").read_text()),
            alignment=int((place / "align").read_text()),
            volatile=not any(part.startswith("ndbus") for part in place.parts),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        cause = error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error))
        raise file_error("ask the system about", path, cause) from error


def is_device(path: str) -> bool:
    """Return whether ``path`` is a DAX device."""
    return device_facts(path) is not None


class DaxDevice(AddressedMedium):
    """A DAX device, or the first part of one, with addresses."""

    def __init__(
        self, facts: DeviceFacts, *, writable: bool, cpu: Processor, size: int | None = None
    ) -> None:
        """size: as in ``SpaceMedium``. Raise ``MediumError`` if it cannot be mapped."""
        try:
            descriptor = Descriptor(facts.path, os.O_RDWR if writable else os.O_RDONLY)
        except OSError as error:
            raise file_error("open", facts.path, error) from error
        with contextlib.closing(descriptor), contextlib.ExitStack() as undo:  # a mapping needs none
            addresses = AddressRange(facts.path, facts.size, alignment=facts.alignment)
            undo.callback(addresses.close)
            addresses.map(facts.size, descriptor.number, writable=writable)
            undo.pop_all()
        info = MediumInfo(DAX_DEVICE, facts.path, WORD, facts.volatile, writable)
        super().__init__(MappedSpace(addresses, facts.size, cpu), info, size)

    def close_but(self, kept: Sequence[Extent]) -> None:
        """Close the medium, but keep the addresses of ``kept``, which begin at pages, valid until
        the process ends: they get a private copy of the bytes.

        Raises ``MediumError`` if there is no memory for that; then they stay the medium's own.
        """
        try:
            self._addresses.close_but(kept)
        finally:
            self.close()


class DaxFile(MappedFile):
    """A file on a file system with DAX, opened for writing: its bytes are the memory itself.

    The mapping is made with MAP_SYNC: whatever the file system must write to find a byte again is
    durable before that byte can be stored to. So only the lines are left to write back.
    """

    kind: ClassVar[MediumKind] = DAX_FILE
    granularity: ClassVar[int] = WORD

    def __init__(
        self, descriptor: Descriptor, file_system: FileSystemTraits, *, cpu: Processor | None = None
    ) -> None:
        """Raise ``MediumError`` if mapping fails, or without libpmem; ``descriptor`` stays open."""
        self._cpu: Final = cpu or processor()
        file_system = replace(file_system, early=False)  # nothing is written back by the system
        super().__init__(descriptor, file_system)

    def _put(self, offset: int, data: memoryview) -> None:
        # Through the mapping: pwrite may change the file system, which would need a sync.
        self._check_length(offset + len(data))
        ctypes.memmove(self._addresses.start + offset, pointer(data), len(data))

    def _write_back(self, ranges: Sequence[Extent]) -> None:
        for offset, length in spans(ranges):
            self._cpu.flush(self._addresses.start + offset, length)
        self._cpu.drain()

    def close_but(self, kept: Sequence[Extent]) -> None:
        """Close the medium as ``DaxDevice.close_but`` does."""
        try:
            self._addresses.close_but(kept)
        finally:
            self.close()

    def _map(self, size: int, descriptor: Descriptor, file_system: FileSystemTraits) -> None:
        self._addresses.map(size, descriptor.number, synchronous=True)


def open_device(
    path: str, *, writable: bool, size: int | None = None, cpu: Processor | None = None
) -> DaxDevice:
    """Open the DAX device at ``path``. Raise ``UsageError`` if it is none, ``MediumError`` if it
    cannot be mapped, or if libpmem is missing (not needed for reading)."""
    facts = device_facts(path)
    if facts is None:
        raise UsageError(f"{path}: expected a DAX device; give the path of one, or of a file")
    cpu = cpu or (processor() if writable else NoCache())
    return DaxDevice(facts, writable=writable, cpu=cpu, size=size)


def accepts_map_sync(descriptor: Descriptor) -> bool:
    """Return whether the file can be mapped so that a flush by the processor is enough."""
    flags = linux.MAP_SHARED_VALIDATE | linux.MAP_SYNC
    length = os.sysconf("SC_PAGESIZE")
    try:
        start = linux.map_pages(0, length, linux.PROT_READ, flags, (descriptor.number, 0))
    except OSError:
        return False
    linux.unmap_pages(start, length)
    return True
