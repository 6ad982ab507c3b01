"""The write-back of the processor's caches to persistent memory, through libpmem.

Only the parts of libpmem that take any address are used, on our own mappings. The calls with which
PMDK maps a file itself end the interpreter on a DAX device without an NVDIMM namespace.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from typing import Final, Protocol

from portus.errors import MediumError

LINE: Final = 64
"""Bytes of a line, which a processor's cache writes back as a whole."""

LIBRARY: Final = "libpmem.so.1"
_NO_FLUSH: Final = "PMEM_NO_FLUSH"


class Processor(Protocol):
    """Writes cache lines back. Methods may raise ``OSError``; a real processor never does."""

    def flush(self, address: int, length: int) -> None:
        """Begin to write back the lines of these bytes, whichever processor stored to them."""

    def drain(self) -> None:
        """Return when the lines that this thread flushed survive power loss."""


class Libpmem:
    """``Processor`` by libpmem, which knows what this processor can do."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._flush: Final = library.pmem_flush
        self._flush.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._flush.restype = None
        self._drain: Final = library.pmem_drain
        self._drain.argtypes = []
        self._drain.restype = None

    def flush(self, address: int, length: int) -> None:
        """Flush whole lines; other threads run meanwhile."""
        self._flush(address, length)

    def drain(self) -> None:
        """Execute a store fence."""
        self._drain()


def processor(library: str = LIBRARY) -> Libpmem:
    """Return this machine's ``Processor``. Raise ``MediumError`` if libpmem is missing, or
    configured to do nothing."""
    if os.environ.get(_NO_FLUSH) == "1":
        raise MediumError(
            errno.EINVAL,
            f"{_NO_FLUSH}=1 keeps libpmem from flushing caches, so nothing would survive a "
            "power loss: unset it",
        )
    return _load(library)


@functools.cache
def _load(library: str) -> Libpmem:
    try:
        return Libpmem(ctypes.CDLL(library))
    except (OSError, AttributeError) as error:
        raise MediumError(
            errno.ENOENT,
            f"{library} is needed to write persistent memory, and cannot be loaded ({error}): "
            "install libpmem1 (Debian, Ubuntu) or libpmem (Fedora, SUSE)",
        ) from error
