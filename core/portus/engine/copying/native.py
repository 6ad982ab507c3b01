"""The optional helper in C: one call for a whole list of segments, without Python's lock.

``native.c`` has no hash of its own. It calls the xxHash inside the ``xxhash`` extension module, and
the CRC32 inside the one of ``isal``, whose functions are found by name in those files. A helper of
another version, or with other results than theirs, is refused with a warning, and pure Python does
the work, as it does without a helper.

It also closes descriptors in children of the ``fork()`` of C, which pure Python cannot.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import random
import zlib
from typing import Final

import numpy as np
import xxhash
from isal import isal_zlib

from portus.engine.copying.segments import Column, Crcs, Digests, Segments, Stop
from portus.engine.format.checksum import digest

_log: Final = logging.getLogger("portus")

PATH: Final = os.path.join(os.path.dirname(__file__), "_native.so")

ABI: Final = 9
"""The same numbers as in ``native.c``."""

PIECE: Final = 16 << 10  # decision 0003: 32 KiB take 1.4 times as long
"""Bytes that are copied, and then hashed while the smallest cache still holds them."""

WRITTEN: Final = 128 << 10
"""Bytes that are copied, hashed, and then written to a file, while the next cache holds them."""

PATIENT_THREAD_MIN: Final = 1 << 20
"""Bytes from which a thread of low priority is worth its start, while no thread waits."""

SECOND_THREAD_MIN: Final = 32 << 20
"""Bytes from which a second thread is worth its start, while a thread waits."""

# The fields of ``struct hash``, in order. Builds for x86 that pick the best instructions of the
# processor at run time export that choice under a second name.
_FUNCTIONS: Final = (
    ("XXH3_createState",),
    ("XXH3_freeState",),
    ("XXH3_128bits_reset",),
    ("XXH3_128bits_update_dispatch", "XXH3_128bits_update"),
    ("XXH3_128bits_digest",),
    ("XXH3_128bits_dispatch", "XXH3_128bits"),
)

_CRC: Final = ("crc32_gzip_refl",)
"""The last field: CRC32 as zip files have it, of Intel's ISA-L inside the ``isal`` module."""


class _RefusedError(Exception):
    """The reason why there is no helper."""


class Helper:
    """The engine of ``native.c``."""

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)
            # No hash of our own: so both engines run the same code (decision 0003).
            self._hash_library = ctypes.CDLL(_xxhash_path())
            self._crc_library = ctypes.CDLL(isal_zlib.__file__)
            self._hash = (ctypes.c_void_p * (len(_FUNCTIONS) + 1))(
                *(_function(self._hash_library, names) for names in _FUNCTIONS),
                _function(self._crc_library, _CRC),
            )
            _declare(self._library)
        except (OSError, AttributeError) as error:
            raise _RefusedError(str(error)) from error
        if (found := self._library.portus_abi()) != ABI:
            raise _RefusedError(f"{path}: expected version {ABI}, found {found}")

    def move(
        self,
        segments: Segments,
        target: Column | None,
        digests: Digests,
        stop: Stop,
        crcs: Crcs | None = None,
        file: int = -1,
        kept: ctypes.c_int64 | None = None,
    ) -> None:
        size = segments.size
        # The most that it may use: the helper reads ``stop.awaited`` while it works, and starts the
        # second thread only once another thread waits.
        threads = int(size >= PATIENT_THREAD_MIN)
        if size >= SECOND_THREAD_MIN and len(os.sched_getaffinity(0)) > 1:
            threads = 2
        result = self._library.portus_move(
            self._hash,
            len(segments),
            *(_pointer(column) for column in (segments.address, target)),
            *(_pointer(column) for column in (segments.length, segments.row)),
            PIECE if file < 0 else WRITTEN,
            threads,
            digests.ctypes.data,
            None if crcs is None else crcs.ctypes.data,
            file,
            None if kept is None else ctypes.addressof(kept),
            stop.flags_address,
        )
        if result < -1:
            raise OSError(-1 - result, os.strerror(-1 - result))
        if result < 0:
            raise MemoryError("no memory for the state of a hash")
        if result > 0:
            stop.check()

    def close_in_children(self, numbers: ctypes.Array[ctypes.c_int32]) -> None:
        """Have every forked child, also of C's ``fork()``, close the descriptors that are in
        ``numbers`` by then, each plus one, and put 0 there. Once for a process."""
        result = self._library.portus_close_in_children(ctypes.addressof(numbers), len(numbers))
        if result != 0:
            raise MemoryError("no memory for a hook of fork")


def load(path: str) -> Helper | None:
    """Return the helper at ``path``, loaded and tested. Return None if there is none, or, with a
    warning in the log, if it cannot be used."""
    if not os.path.exists(path):  # no compiler at the build, or no Linux: nothing to warn of
        return None
    try:
        found = Helper(path)
        if not _agrees(found):
            raise _RefusedError(f"{path}: expected the digests of xxhash and CRC32s, found others")
    except _RefusedError as error:
        _log.warning(
            "portus: the helper in C is not used, so saves take longer: %s. In a clone, "
            "rebuild it with `make setup` or `python core/build_native.py`",
            error,
        )
        return None
    return found


@functools.cache
def helper() -> Helper | None:
    """Return the helper of this installation, which the first call looks for."""
    return load(PATH)


def _xxhash_path() -> str:
    path = getattr(getattr(xxhash, "_xxhash", None), "__file__", None)
    if not isinstance(path, str):
        raise OSError("xxhash: expected an extension module, found none")
    return path


def _function(library: ctypes.CDLL, names: tuple[str, ...]) -> int | None:
    name = next((name for name in names if hasattr(library, name)), names[-1])
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value


def _declare(library: ctypes.CDLL) -> None:
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    library.portus_abi.argtypes = []
    library.portus_move.argtypes = [
        pointer,
        number,
        *[pointer] * 4,
        *[number] * 2,
        *[pointer] * 2,
        number,
        *[pointer] * 2,
    ]
    library.portus_close_in_children.argtypes = [pointer, number]
    for name in ("abi", "move", "close_in_children"):
        getattr(library, f"portus_{name}").restype = number


def _pointer(column: Column | None) -> int | None:
    if column is None:
        return None
    assert column.dtype == np.int64
    assert column.flags.c_contiguous
    return column.ctypes.data


def _agrees(engine: Helper) -> bool:
    """Return True if it copies, and hashes as ``xxhash``: at once, in pieces, over two segments."""
    data = np.frombuffer(random.Random(0).randbytes(2 * PIECE + 800), np.uint8)
    copied = ~data  # differs from ``data`` in each byte that is not copied
    address, length = data.ctypes.data, len(data)
    starts = np.array([0, 3, 3 + 200, 3 + 200 + 17], np.int64)
    segments = Segments(
        address=address + starts,
        offset=starts,
        length=np.diff(starts, append=length),
        row=np.array([0, 1, 1, 2], np.int64),
    )
    target = copied.ctypes.data + starts
    digests, crcs = np.zeros((3, 16), np.uint8), np.zeros(3, np.uint32)
    engine.move(segments, target, digests, Stop(), crcs)
    units = [data.data[start:end] for start, end in ((0, 3), (3, 220), (220, length))]
    if digests.tobytes() != b"".join(map(digest, units)) or not np.array_equal(data, copied):
        return False
    return bool(crcs.tolist() == [zlib.crc32(unit) for unit in units])
