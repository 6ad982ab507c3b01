"""The bytes of one tensor of a version, verified, in pieces of bounded size. No torch.

A version is verified unit by unit (16 MiB of a storage), so each read covers at least one unit. The
last unit is kept, so requests for neighbours in it, one after another, read it once.
"""

from __future__ import annotations

import contextlib
import mmap
import tempfile
from collections.abc import Iterator
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from portus.engine.copying.local import fetch
from portus.engine.copying.segments import Source, Stop
from portus.engine.format.checksum import DIGEST_SIZE, UNIT
from portus.engine.format.dtypes import ITEM_SIZES
from portus.engine.spec import Extent, TensorSpec
from portus.errors import CorruptionError, MediumError, UsageError
from portus.reach.index.in_place import InPlaceReader
from portus.reach.index.log import NOT_LOGGED, LogState
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionRecord
from portus.reach.versions.parts import part

PIECE: Final = 16 << 20
"""Bytes of a tensor that is not contiguous, in one piece."""

Raw = npt.NDArray[np.uint8]


class Storages:
    """The storages of a pinned version. Holds one unit in memory, and the changes in its log."""

    def __init__(
        self, reader: PoolReader, record: VersionRecord, logged: LogState = NOT_LOGGED
    ) -> None:
        self._reader: Final = reader
        self._record: Final = record
        self._logged: Final = logged
        self._in_place: Final = InPlaceReader(reader.medium, record, logged)
        self._extents: Final[dict[int, tuple[Extent, ...]]] = {}
        self._unit: tuple[int, int] | None = None
        self._held: Final[Raw] = np.empty(UNIT, np.uint8)

    def length(self, storage: int) -> int:
        """Return the bytes of a storage."""
        return int(self._record.storages["length"][storage])

    def require(self, storage: int, size: int) -> None:
        """Raise ``CorruptionError`` unless there is such a storage, of ``size`` bytes or more."""
        count = len(self._record.storages)
        if not 0 <= storage < count or self.length(storage) < size:
            raise CorruptionError(f"expected {size} bytes in storage {storage} of {count}")

    def read(self, storage: int, start: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes from ``start`` to ``end`` of a storage; each piece is valid until the
        next.

        Raises ``CorruptionError`` and ``MediumError``.
        """
        while start < end:
            rank, inside = divmod(start, UNIT)
            self._load(storage, rank)
            taken = min(UNIT - inside, end - start)
            yield self._held.data[inside : inside + taken]
            start += taken

    def _load(self, storage: int, rank: int) -> None:
        if self._unit == (storage, rank):
            return
        self._unit = None
        start = rank * UNIT
        length = min(UNIT, self.length(storage) - start)
        if storage in self._in_place:
            self._in_place.read(storage, rank, self._held.data[:length])
            self._unit = (storage, rank)
            return
        if storage not in self._extents:
            self._extents[storage] = self._record.storage_extents(storage)
        source = Source(
            self._held.ctypes.data,
            length,
            tuple(part(self._extents[storage], start, start + length)),
        )
        [found] = fetch(self._reader.medium, [source], Stop())
        row = int(self._record.storages["first_unit"][storage]) + rank
        expected = bytes(self._record.units["digest"][row])
        if found.tobytes() != expected:
            raise CorruptionError(
                f"storage {storage} is damaged within {length} bytes from byte {start}: expected "
                f"digest {expected.hex()}, found {found.tobytes().hex()}"
            )
        assert len(found) == DIGEST_SIZE
        self._logged.over(storage, start, self._held.data[:length])
        self._unit = (storage, rank)


def tensor_bytes(storages: Storages, spec: TensorSpec, near: str) -> Iterator[memoryview]:
    """Yield the elements of a tensor in row-major order; each piece is valid until the next.

    near: a directory with room for a storage, for tensors that are not contiguous.
    Raises ``CorruptionError`` and ``MediumError``, and ``UsageError`` for lazy bits on a dtype
    without arithmetic in numpy.
    """
    size = ITEM_SIZES[spec.dtype]
    if 0 in spec.shape:
        return
    last = sum((n - 1) * step for n, step in zip(spec.shape, spec.strides, strict=True))
    storages.require(spec.storage, (spec.offset + last + 1) * size)
    if _is_contiguous(spec) and not (spec.conjugate or spec.negative):
        start = spec.offset * size
        yield from storages.read(spec.storage, start, start + prod(spec.shape) * size)
        return
    with _spill(storages, spec.storage, near) as raw:
        yield from _gather(raw, spec, size)


def _is_contiguous(spec: TensorSpec) -> bool:
    expected = 1
    for length, stride in zip(reversed(spec.shape), reversed(spec.strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _gather(raw: Raw, spec: TensorSpec, size: int) -> Iterator[memoryview]:
    dtype: np.dtype[Any] = _NUMERIC.get(spec.dtype, np.dtype(f"V{size}"))
    view: npt.NDArray[Any] = np.ndarray(
        spec.shape, dtype, raw.data, spec.offset * size, [step * size for step in spec.strides]
    )
    for block in _blocks(view, max(1, PIECE // size)):
        yield _resolve(spec, np.ascontiguousarray(block)).reshape(-1).view(np.uint8).data


def _blocks(view: npt.NDArray[Any], count: int) -> Iterator[npt.NDArray[Any]]:
    """Yield parts of an array of about ``count`` elements, in row-major order."""
    if view.size <= count or view.ndim == 0:
        yield view
        return
    rows = count // max(1, view.size // len(view))
    if rows:
        for first in range(0, len(view), rows):
            yield view[first : first + rows]
    else:
        for row in view:
            yield from _blocks(row, count)


_NUMERIC: Final[dict[str, np.dtype[Any]]] = {
    "complex64": np.dtype("<c8"),
    "complex128": np.dtype("<c16"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
"""Dtypes for which torch has lazy bits, and numpy has arithmetic."""


def _resolve(spec: TensorSpec, block: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if not (spec.conjugate or spec.negative):
        return block
    if spec.dtype not in _NUMERIC:
        raise UsageError(
            f"{spec.name}: a lazy negative or conjugate of {spec.dtype}; use a .pt file"
        )
    block = block.conj() if spec.conjugate else block
    return -block if spec.negative else block


@contextlib.contextmanager
def _spill(storages: Storages, storage: int, near: str) -> Iterator[Raw]:
    """Yield all bytes of a storage, for access in any order. They are in a file without a name, so
    they need not be in memory at once."""
    length = storages.length(storage)
    try:
        with tempfile.TemporaryFile(dir=near) as file:
            for piece in storages.read(storage, 0, length):
                file.write(piece)
            file.flush()
            # Not closed here: it goes with the last array that refers to it.
            yield np.frombuffer(mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ), np.uint8)
    except MediumError:
        raise
    except OSError as error:
        raise MediumError(
            error.errno, f"{near}: cannot hold a storage of {length} bytes: {error.strerror}"
        ) from error
