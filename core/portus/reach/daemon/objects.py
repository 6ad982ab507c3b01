"""The objects of a tenant: what others mirror to a storage host.

They lie in a directory beside the tenant's pool (``<pool>.objects``), and are synced; or in memory,
if the pool is there. A name is a path of segments, and cannot point outside of the directory.

They are objects, not versions of the pool. A pool is ordered by its commits, so a version that is
mirrored late would become the newest; and a claim ends with its connection. Terms and manifests in
the pool would be the log of a mirror under another name.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

from portus.errors import MediumError, UsageError
from portus.reach.index.pool import PoolWriter
from portus.reach.mirror.folder import Folder
from portus.reach.mirror.store import (
    ListedObject,
    MissingError,
    Part,
    Store,
    check_name,
    check_prefix,
    short,
)

MEMORY: Final = "memory:"
"""The prefix of a host's place whose pools are in memory."""

_OBJECTS: Final = ".objects"
"""The suffix, after the path of a pool, of the directory for what others mirror to its tenant."""


class MemoryStore:
    """A ``Store`` in the memory of this process, and gone with it. Thread-safe."""

    def __init__(self, name: str) -> None:
        """name: for messages."""
        self._name: Final = name
        self._guard: Final = threading.Lock()
        self._objects: Final[dict[str, tuple[bytes, float]]] = {}

    def put(self, name: str, data: bytes) -> None:
        self._keep(name, data, fresh=False)

    def create(self, name: str, data: bytes) -> bool:
        return self._keep(name, data, fresh=True)

    def get(self, name: str) -> bytes:
        with self._guard:
            found = self._objects.get(check_name(name, self._name))
        if found is None:
            raise MissingError(f"{self._name}: there is no {name}")
        return found[0]

    def get_range(self, name: str, start: int, length: int) -> Part:
        found = self.get(name)[start : start + length]
        if len(found) != length:
            raise short(f"{self._name}: {name}", start, length, len(found))
        return found

    def list(self, prefix: str, after: str = "") -> Iterator[ListedObject]:
        check_prefix(prefix, self._name)
        with self._guard:
            found = [
                ListedObject(name, len(data), modified)
                for name, (data, modified) in self._objects.items()
                if name.startswith(prefix) and name > after
            ]
        return iter(sorted(found, key=lambda each: each.name))

    def delete(self, names: Sequence[str]) -> None:
        with self._guard:
            for name in names:
                self._objects.pop(name, None)

    def close(self) -> None:
        """Do nothing: the objects stay for the next user."""

    def _keep(self, name: str, data: bytes, *, fresh: bool) -> bool:
        check_name(name, self._name)
        with self._guard:
            if fresh and name in self._objects:
                return False
            self._objects[name] = data, time.time()
            return True


class Objects:
    """The objects of one tenant, in the bytes that its quota leaves to them. Thread-safe."""

    def __init__(self, tenant: str, writer: PoolWriter, path: str | None) -> None:
        """path: of the pool; None: in memory."""
        self._writer: Final = writer
        self._path: Final = path
        self._store: Final[Store] = (
            MemoryStore(f"objects of {tenant}") if path is None else Folder(f"{path}{_OBJECTS}")
        )
        self._guard: Final = threading.Lock()
        self._sizes: dict[str, int] | None = None
        self._size = 0

    @property
    def store(self) -> Store:
        """The store of the objects. Raises ``UsageError`` for a pool that fills a device."""
        if self._path is not None and self._writer.medium.info.kind.is_device:
            raise UsageError(
                f"{self._path}: a pool on a device has no space for mirrored objects; serve a "
                f"directory, or {MEMORY}SIZE"
            )
        return self._store

    @property
    def size(self) -> int:
        """Bytes of all objects."""
        with self._guard:
            self._list_sizes()
            return self._size

    def put(self, name: str, data: bytes, *, fresh: bool) -> bool:
        """Write an object, see ``Store.create`` and ``put``. Raise ``MediumError`` without room."""
        with self._guard:
            # Counted before it is stored: two at once must not share the same free bytes.
            if not (fresh and name in self._list_sizes()):
                self._reserve(name, len(data))
        if fresh:
            return self.store.create(name, data)
        self.store.put(name, data)
        return True

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects, see ``Store.delete``."""
        self.store.delete(names)
        with self._guard:
            for name in names:
                self._size -= self._list_sizes().pop(name, 0)

    def below(self, prefix: str) -> Store:
        """Return a store of the objects below ``prefix``, a segment, for this host's own use."""
        return _Below(self, f"{prefix}/")

    def _reserve(self, name: str, size: int) -> None:
        """Count the bytes of an object that is about to be written. They stay counted until the
        host restarts, even if the write fails: part of the object may be there."""
        size_max, more = self._writer.max_bytes, size - self._list_sizes().get(name, 0)
        room = max(0, (size_max or 0) - self._writer.medium.size)
        if size_max is not None and self._size + more > room:
            raise MediumError(
                errno.ENOSPC,
                f"{name}: {size} bytes; the quota leaves {room} for all, and "
                f"{self._size} are taken",
            )
        self._list_sizes()[name] = size
        self._size += more

    def _list_sizes(self) -> dict[str, int]:
        if self._sizes is None:
            self._sizes = {each.name: each.size for each in self.store.list("")}
            self._size = sum(self._sizes.values())
        return self._sizes


class _Below:
    """The objects below a prefix, as a ``Store``."""

    def __init__(self, objects: Objects, prefix: str) -> None:
        self._objects: Final = objects
        self._prefix: Final = prefix

    def put(self, name: str, data: bytes) -> None:
        self._objects.put(self._prefix + name, data, fresh=False)

    def create(self, name: str, data: bytes) -> bool:
        return self._objects.put(self._prefix + name, data, fresh=True)

    def get(self, name: str) -> bytes:
        return self._objects.store.get(self._prefix + name)

    def get_range(self, name: str, start: int, length: int) -> Part:
        return self._objects.store.get_range(self._prefix + name, start, length)

    def list(self, prefix: str, after: str = "") -> Iterator[ListedObject]:
        last = self._prefix + after if after else ""
        for each in self._objects.store.list(self._prefix + prefix, last):
            yield ListedObject(each.name.removeprefix(self._prefix), each.size, each.modified)

    def delete(self, names: Sequence[str]) -> None:
        self._objects.delete([self._prefix + name for name in names])

    def close(self) -> None:
        """Do nothing: the objects belong to the host."""
