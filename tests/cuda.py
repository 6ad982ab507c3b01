"""The library of a CUDA driver, as far as it is called, on a machine with no such device.

The functions are C functions to who calls them. Device 1 is the last one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any, Final

from portus.reach.transport.cuda import Driver

INVALID_VALUE: Final = 1
INVALID_DEVICE: Final = 101
INVALID_CONTEXT: Final = 201

_CONTEXT: Final = 0x5000
_number = ctypes.POINTER(ctypes.c_int)
_address = ctypes.POINTER(ctypes.c_void_p)


def memfd(_start: int, _size: int) -> int:
    """Any file, in the place of a dmabuf."""
    return os.memfd_create("dmabuf")


class Library:
    """Hands out what ``export`` gives for a range, as a dmabuf. Contexts are kept as CUDA has it:
    a call for an address needs one, and one that is pushed must be popped."""

    def __init__(self, export: Callable[[int, int], int], *, supported: bool = True) -> None:
        """export: raises ``OSError`` for what is no memory of the device."""
        self.ranges: list[tuple[int, int]] = []
        self.retained = 0
        self.pushed: list[int] = []
        self._export: Final = export
        self._supported: Final = supported
        self._call("cuInit", self._init, ctypes.c_uint)
        self._call("cuDeviceGetCount", self._count, _number)
        self._call("cuDeviceGet", self._get, _number, ctypes.c_int)
        self._call("cuDeviceGetAttribute", self._attribute, _number, ctypes.c_int, ctypes.c_int)
        self._call("cuDevicePrimaryCtxRetain", self._retain, _address, ctypes.c_int)
        self._call("cuDevicePrimaryCtxRelease_v2", self._release, ctypes.c_int)
        self._call("cuCtxPushCurrent_v2", self._push, ctypes.c_void_p)
        self._call("cuCtxPopCurrent_v2", self._pop, _address)
        self._call(
            "cuMemGetHandleForAddressRange",
            self._handle,
            *(_number, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_ulonglong),
        )

    def driver(self) -> Driver:
        """The driver that has this library."""
        return Driver(self)

    def _call(self, name: str, function: Callable[..., int], *arguments: Any) -> None:
        setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(function))

    def _init(self, flags: int) -> int:
        return INVALID_VALUE if flags else 0

    def _count(self, count: Any) -> int:
        count[0] = 2
        return 0

    def _get(self, device: Any, ordinal: int) -> int:
        device[0] = ordinal
        return 0 if 0 <= ordinal < 2 else INVALID_DEVICE

    def _attribute(self, value: Any, which: int, device: int) -> int:
        value[0] = self._supported
        return 0 if (which, device in (0, 1)) == (124, True) else INVALID_VALUE

    def _retain(self, context: Any, device: int) -> int:
        context[0] = _CONTEXT + device
        self.retained += 1
        return 0

    def _release(self, _device: int) -> int:
        self.retained -= 1
        return 0

    def _push(self, context: int) -> int:
        self.pushed.append(context)
        return 0 if self.retained else INVALID_CONTEXT

    def _pop(self, context: Any) -> int:
        context[0] = self.pushed.pop()
        return 0

    def _handle(self, handle: Any, start: int, size: int, kind: int, flags: int) -> int:
        if not self.pushed:
            return INVALID_CONTEXT
        if start % mmap.PAGESIZE or size % mmap.PAGESIZE or (kind, flags) != (1, 0):
            return INVALID_VALUE
        try:
            handle[0] = self._export(start, size)
        except OSError:
            return INVALID_VALUE
        self.ranges.append((start, size))
        return 0
