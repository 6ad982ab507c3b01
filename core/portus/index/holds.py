"""The reference files that lead to a pool, as clients of a storage host told of them.

A client knows its own files, from one directory of one machine. So the host keeps what each says,
until it is told that it is gone: whoever looks from elsewhere finds that a version is held. They
are where the links of a pool file are (``links_directory``), by their ids, and mean the same there.
"""

from __future__ import annotations

import os
import threading
from typing import Final

from portus.errors import CorruptionError, UsageError
from portus.format.reference import SIZE_MAX, Reference, decode
from portus.index.directory import make_directory
from portus.media.base import FileSystem
from portus.spec import Extent

HOLDS_MAX: Final = 1 << 16
"""Of one pool."""

_NEW: Final = ".new"


class PoolHolds:
    """The reference files that a storage host keeps for one pool. Thread-safe."""

    def __init__(self, directory: str | None, files: FileSystem) -> None:
        """directory: for the files, made at the first; None: in memory, as the pool is."""
        self._directory: Final = directory
        self._files: Final = files
        self._guard: Final = threading.Lock()
        self._known: Final[dict[str, bytes]] = {}
        self._pins: Final[dict[str, bytes]] = {}
        self._references: Final[dict[str, Reference]] = {}
        if directory is not None:
            for name in files.entries(directory):
                data = self._read(os.path.join(directory, name))
                reference = None if data is None else _decoded(data)
                if data is not None and reference is not None:
                    self._note(reference, data)

    def keep(self, name: str, data: bytes) -> None:
        """Return when it is durable. Raises ``UsageError`` for what is no reference file of that
        id, or one too many, and ``MediumError``."""
        reference = _decoded(data)
        if reference is None or reference.id != name:
            raise UsageError(f"hold {name}: this is not a reference file with that id")
        with self._guard:
            if name not in self._known and len(self._known) >= HOLDS_MAX:
                raise UsageError(
                    f"hold {name}: a tenant can hold at most {HOLDS_MAX} reference files"
                )
            if self._directory is not None:
                self._store(self._directory, name, data)
            self._note(reference, data)

    def let_go(self, name: str) -> None:
        """Forget it. It is no error if it is not there. Raises ``MediumError``."""
        with self._guard:
            self._pins.pop(name, None)
            self._references.pop(name, None)
            if self._known.pop(name, None) is not None and self._directory is not None:
                self._files.remove(os.path.join(self._directory, name))

    def references(self) -> list[Reference]:
        """What each of them says."""
        with self._guard:
            return list(self._references.values())

    def model_of(self, name: str) -> str | None:
        """Return the model that the reference file ``name`` belongs to; None if not on record."""
        with self._guard:
            found = self._references.get(name)
            return None if found is None else found.model

    def pinned(self) -> set[bytes]:
        """The tokens of versions that are pinned: nobody retires them."""
        with self._guard:
            return set(self._pins.values())

    def after(self, name: str, size_max: int) -> list[bytes]:
        """The next ones, by id, of ``size_max`` bytes at most."""
        with self._guard:
            found, size = [], 0
            for each in sorted(known for known in self._known if known > name):
                size += len(self._known[each])
                if size > size_max:
                    break
                found.append(self._known[each])
            return found

    def _note(self, reference: Reference, data: bytes) -> None:
        self._known[reference.id] = data
        self._references[reference.id] = reference
        if reference.is_pin:
            self._pins[reference.id] = bytes.fromhex(reference.token)

    def _store(self, directory: str, name: str, data: bytes) -> None:
        make_directory(directory)
        path = os.path.join(directory, name)
        self._files.remove(f"{path}{_NEW}")
        medium = self._files.create(f"{path}{_NEW}", len(data))
        try:
            medium.store(0, data)
            medium.persist([Extent(0, len(data))])
        finally:
            medium.close()
        self._files.replace(f"{path}{_NEW}", path)
        self._files.sync(directory)

    def _read(self, path: str) -> bytes | None:
        status = self._files.status(path)
        if path.endswith(_NEW) or status is None or not 0 < status.size <= SIZE_MAX:
            return None
        medium = self._files.open(path, writable=False)
        try:
            data = bytearray(medium.size)
            medium.load(0, memoryview(data))
        finally:
            medium.close()
        return bytes(data)


def _decoded(data: bytes) -> Reference | None:
    try:
        return decode(data)
    except CorruptionError:
        return None
