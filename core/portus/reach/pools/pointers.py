"""What loads call where they find a pointer, see ``portus.engine.extensions``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from portus.engine.loading.open_file import OpenFile
from portus.errors import UsageError, printable
from portus.reach.format.reference import Reference, decode
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry
from portus.reach.pools.resolve import is_removed, use_reference
from portus.reach.pools.version_file import files_opened

Result = TypeVar("Result")


def use_pointer(where: str, act: Callable[[OpenFile], Result]) -> Result:
    """Return what ``act`` gives for the file in a pool that the pointer at ``where`` leads to."""

    def use(reader: PoolReader, entry: VersionEntry, reference: Reference) -> list[Result]:
        with files_opened(reader, entry, reference.part) as found:
            return [act(file) for file in found.values()][:1]

    for result in use_reference(where, use):
        return result
    raise UsageError(f"{printable(where)} leads to a version that has no files")


def is_pointer_good(data: bytes, path: str) -> bool:
    """Return whether the pointer with the bytes ``data`` is whole, and is not known to lead to
    nothing from ``path``. Raises ``CorruptionError`` for a damaged one."""
    pointer = decode(data)
    return pointer is None or not is_removed(pointer, path)
