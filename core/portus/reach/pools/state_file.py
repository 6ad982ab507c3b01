"""``StateFile``: the state of a version of a shelf, or of tables, as a file of torch.

The pool has no such file, only its storages and the contents of the version: the pickle of tables,
or the JSON of a shelf. The bytes that ``torch.save`` would put around the storages are made here
when the version is opened, so all that reads files of torch reads these states too. The storages
are read from the pool, verified, as of the log.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from portus.engine.copying.segments import Column, Digests, Sources, Stop
from portus.engine.image.torch_zip import torch_image
from portus.engine.media.base import MediumInfo, ReadOnlyMedium
from portus.engine.state.pickling import pickle_state, torch_format
from portus.errors import CorruptionError, MediumError, UsageError
from portus.reach.format.arrays import dtype_node
from portus.reach.format.items import StoredArray, decode
from portus.reach.index.file_table import PackedFile
from portus.reach.pools.weights_only import array_of, refusing, torch_settings
from portus.reach.versions.open_version import OpenVersion, is_pickle


class StateFile(ReadOnlyMedium):
    """The state of a version without files, as an ``OpenFile``. The CRC32s of its storages are
    zero; torch compares none."""

    number: Final = None

    def __init__(self, version: OpenVersion, *, verify: bool = True) -> None:
        """verify: False compares no digests of storages. Raises ``CorruptionError``."""
        self.version: Final = version
        self._verify: Final = verify
        lengths, contents = version.lengths, version.contents
        with self.naming():
            self.pickle: Final = contents if is_pickle(contents) else _pickle(contents, lengths)
        image = torch_image(
            archive="archive", pickle=self.pickle, lengths=lengths, torch_format=torch_format()
        )
        packed = PackedFile.of("", image)
        self.size: Final = packed.size
        self._spans: Final = packed.spans()
        digests = version.record.digests(np.arange(len(lengths)))
        literals = image.literals(digests, np.zeros(len(lengths), np.uint32))
        self._around: Final = packed.bytes_around(literals)

    @property
    def info(self) -> MediumInfo:
        return self.version.reader.medium.info

    @property
    def medium(self) -> StateFile:
        return self

    def extents(self, offset: Column, length: Column) -> tuple[Column, Column]:
        return offset, length

    def announce(self, offset: Column, length: Column) -> None:
        """Do nothing: reads from a pool need no preparation."""

    def load(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` with bytes around storages. Those of storages stay: ``fetch`` verifies
        these, and no one reads them otherwise."""
        count = len(self.version.lengths)
        for storage, inside, size in self._spans.within(offset, len(target)):
            if storage == count:
                target[:size] = self._around[inside : inside + size]
            target = target[size:]

    def fetch(self, targets: Sources, stop: Stop) -> Digests:
        """See ``RemoteMedium``. The targets are whole units of storages. What the log changes is
        compared here, so the digests are those of the commit."""
        return self._read(targets, targets.address)

    def check(self, sources: Sources, stop: Stop) -> Digests:
        """See ``RemoteMedium`` and ``fetch``."""
        return self._read(sources, None)

    def close(self) -> None:
        """Do nothing: the owner of the version closes it."""

    @contextmanager
    def naming(self) -> Iterator[dict[str, Any]]:
        """Yield the settings of ``torch.load`` for this file; put the version's name into errors,
        and raise ``CorruptionError`` for the errors of a damaged pickle."""
        try:
            with torch.inference_mode(False), refusing():
                yield torch_settings()
        except (CorruptionError, UsageError) as error:
            where = self.version.where
            if str(error).startswith(where):
                raise
            raise type(error)(f"{where}: {error}") from error

    def _read(self, sources: Sources, address: Column | None) -> Digests:
        span = np.searchsorted(self._spans.begin, sources.extent_offset, "right") - 1
        start = sources.extent_offset - self._spans.begin[span]
        storage = self._spans.storage[span]
        return self.version.read(storage, start, sources.length, address, verify=self._verify)

    def _refusal(self) -> MediumError:
        return MediumError(errno.EROFS, f"{self.version.where}: a state is only read")


class _Array(NamedTuple):
    """An array of a shelf: its bytes, as a tensor, and its dtype and sizes."""

    data: torch.Tensor
    dtype: np.dtype[Any]
    sizes: tuple[int, ...]


def _pickle(contents: bytes, lengths: Column) -> bytes:
    """Return the pickle of a shelf whose storages have these lengths. Raises ``CorruptionError``
    for an array that is not all of one of them, and as ``decode``."""
    # Memory that is never touched, and so takes none.
    blank = [torch.UntypedStorage(length, device="cpu") for length in lengths.tolist()]

    def make(array: StoredArray) -> object:
        if not 0 <= array.storage < len(blank) or array.size != lengths[array.storage]:
            raise CorruptionError(f"{array.name}: no storage has its {array.size} bytes")
        storage, dtype = blank[array.storage], array.dtype
        if isinstance(dtype, str):
            whole = torch.empty(0, dtype=getattr(torch, dtype), device="cpu").set_(storage)
            return whole.view(array.sizes)
        data = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        return _Array(data, dtype, array.sizes)

    def reduce(array: _Array) -> Any:
        return array_of, (dtype_node(array.dtype), list(array.sizes), False, array.data)

    found = pickle_state(decode(contents, make), {_Array: reduce})
    if [each._cdata for each in found.storages] != [each._cdata for each in blank]:
        raise CorruptionError("the arrays of a shelf are not in the order of its storages")
    return found.pickle
