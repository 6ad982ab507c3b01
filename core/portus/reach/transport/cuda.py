"""Memory of CUDA devices as a file descriptor, by which a network card reaches it. No torch.

The driver's library exports a range of its addresses as a dmabuf, in whole pages of this machine. A
machine without such a device has no library, and older libraries lack the call.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any, Final

from portus.errors import TransportError

LIBRARY: Final = "libcuda.so.1"

_DMABUF_SUPPORTED: Final = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, of CUDA's cuda.h
_DMABUF_DESCRIPTOR: Final = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

_pointer = ctypes.c_void_p
_CALLS: Final[dict[str, list[Any]]] = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGetCount": [_pointer],
    "cuDeviceGet": [_pointer, ctypes.c_int],
    "cuDeviceGetAttribute": [_pointer, ctypes.c_int, ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [_pointer, ctypes.c_int],
    "cuDevicePrimaryCtxRelease_v2": [ctypes.c_int],
    "cuCtxPushCurrent_v2": [_pointer],
    "cuCtxPopCurrent_v2": [_pointer],
    "cuMemGetHandleForAddressRange": [
        *(_pointer, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_ulonglong)
    ],
}
"""The calls of the library, with the types of their arguments. Each returns an int, 0 for
success."""


class Driver:
    """The CUDA driver of this machine. Devices are numbered as this process sees them."""

    def __init__(self, library: Any) -> None:
        """Raise ``TransportError`` if the driver cannot be used."""
        self._library: Final = library
        for name, arguments in _CALLS.items():
            call = getattr(library, name, None)
            if call is None:
                raise TransportError(f"the CUDA driver has no {name}: it is older than 11.7")
            call.argtypes, call.restype = arguments, ctypes.c_int
        self._do("cuInit", 0)

    def count(self) -> int:
        """Return the number of devices. Raises ``TransportError``."""
        return self._number("cuDeviceGetCount")

    def exports(self, device: int) -> bool:
        """Return True if the memory of a device can be exported as a dmabuf. Raises
        ``TransportError``."""
        return self._number("cuDeviceGetAttribute", _DMABUF_SUPPORTED, self._device(device)) != 0

    def export(self, device: int, address: int, length: int) -> tuple[int, int]:
        """Return a dmabuf that contains these bytes of a device's memory: a descriptor, which the
        caller closes, and the offset of the first byte. Raises ``TransportError``."""
        # The driver exports whole pages of the host only.
        start = address - address % mmap.PAGESIZE
        end = -(-(address + length) // mmap.PAGESIZE) * mmap.PAGESIZE
        number, context, popped = self._device(device), _pointer(), _pointer()
        self._do("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        try:
            self._do("cuCtxPushCurrent_v2", context)
            try:
                descriptor = self._number(
                    "cuMemGetHandleForAddressRange", start, end - start, _DMABUF_DESCRIPTOR, 0
                )
            finally:
                # torch uses this thread's current context, which must be as it was.
                self._do("cuCtxPopCurrent_v2", ctypes.byref(popped))
        finally:
            self._do("cuDevicePrimaryCtxRelease_v2", number)
        return descriptor, address - start

    def _device(self, device: int) -> int:
        return self._number("cuDeviceGet", device)

    def _number(self, name: str, *arguments: int) -> int:
        found = ctypes.c_int()
        self._do(name, ctypes.byref(found), *arguments)
        return found.value

    def _do(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise TransportError(f"{name} failed with CUresult {status}")


@functools.cache
def driver() -> Driver:
    """Return the CUDA driver of this machine. Raise ``TransportError`` if there is none."""
    try:
        return Driver(ctypes.CDLL(LIBRARY))
    except OSError as error:
        raise TransportError(f"there is no CUDA driver: {error}") from error
