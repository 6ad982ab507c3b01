"""The objects of a tenant: what others mirror to a storage host.

They lie in a directory beside the tenant's pool (``<pool>.objects``), synced; or in memory, where
the pool is. Names are whole paths of segments, and lead nowhere else.

Objects, and no versions of the pool: a pool is ordered by its commits, so a version that is
mirrored late would become the newest, and a claim lives only as long as its connection. Terms and
manifests in the pool would be the log of a mirror by another name.
"""

from __future__ import annotations

import bisect
import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from portus.errors import MediumError
from portus.reach.mirror.names import bytes_of, checked_name, checked_prefix, short, writable_bytes
from portus.reach.mirror.store import Buffer, ListedObject, MissingError, Store


class MemoryStore:
    """A ``Store`` in the memory of this process, gone with it. Thread-safe."""

    def __init__(self, name: str) -> None:
        """name: for messages."""
        self._name: Final = name
        self._guard: Final = threading.Lock()
        self._names: Final[list[str]] = []
        self._objects: Final[dict[str, tuple[bytes, float]]] = {}

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        self._keep(name, b"".join(bytes_of(part, self._name) for part in parts), fresh=False)

    def create(self, name: str, data: bytes) -> bool:
        return self._keep(name, data, fresh=True)

    def get(self, name: str) -> bytes:
        with self._guard:
            found = self._objects.get(checked_name(name, self._name))
        if found is None:
            raise MissingError(f"{self._name}: there is no {name}")
        return found[0]

    def get_range(self, name: str, start: int, into: memoryview) -> None:
        target, data = writable_bytes(into, start, self._name), self.get(name)
        found = data[start : start + target.nbytes]
        if len(found) != target.nbytes:
            raise short(f"{self._name}: {name}", start, target.nbytes, len(found))
        target[:] = found

    def list(self, prefix: str, after: str = "") -> Iterator[ListedObject]:
        checked_prefix(prefix, self._name)
        while True:  # ends: each turn goes on after the one before
            with self._guard:
                at = max(bisect.bisect_left(self._names, prefix), bisect.bisect(self._names, after))
                if at == len(self._names) or not self._names[at].startswith(prefix):
                    return
                after = self._names[at]
                data, modified = self._objects[after]
            yield ListedObject(after, len(data), modified)

    def delete(self, names: Sequence[str]) -> None:
        with self._guard:
            for name in names:
                if self._objects.pop(name, None) is not None:
                    del self._names[bisect.bisect_left(self._names, name)]

    def close(self) -> None:
        """Nothing to let go of: what is there stays for who comes next."""

    def _keep(self, name: str, data: bytes, *, fresh: bool) -> bool:
        checked_name(name, self._name)
        with self._guard:
            if name not in self._objects:
                bisect.insort(self._names, name)
            elif fresh:
                return False
            self._objects[name] = data, time.time()
            return True


class Objects:
    """The objects of one tenant, which has so much room. Thread-safe."""

    def __init__(self, store: Store, room: Callable[[], int | None]) -> None:
        """room: bytes that they may have together, now; None: no bound."""
        self.store: Final = store
        self._room: Final = room
        self._guard: Final = threading.Lock()
        self._sizes: dict[str, int] | None = None
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes of all."""
        with self._guard:
            self._known()
            return self._size

    def put(self, name: str, data: bytes, *, fresh: bool) -> bool:
        """See ``Store.create``, and ``Store.put``. Raises ``MediumError`` if there is no room."""
        with self._guard:
            if not (fresh and name in self._known()):
                self._reserve(name, len(data))
        if fresh:
            made = self.store.create(name, data)
        else:
            self.store.put(name, [data])
            made = True
        return made

    def delete(self, names: Sequence[str]) -> None:
        """See ``Store.delete``."""
        self.store.delete(names)
        with self._guard:
            for name in names:
                self._size -= self._known().pop(name, 0)

    def below(self, prefix: str) -> Store:
        """Return a store of the objects below ``prefix``, a segment, for this host's own use."""
        return _Below(self, f"{prefix}/")

    def _reserve(self, name: str, size: int) -> None:
        """What fails later stays counted until the host starts again: it may be there."""
        room, more = self._room(), size - self._known().get(name, 0)
        if room is not None and self._size + more > room:
            raise MediumError(
                errno.ENOSPC,
                f"{name}: {size} bytes; the quota leaves {room} for all, and "
                f"{self._size} are taken",
            )
        self._known()[name] = size
        self._size += more

    def _known(self) -> dict[str, int]:
        if self._sizes is None:
            self._sizes = {each.name: each.size for each in self.store.list("")}
            self._size = sum(self._sizes.values())
        return self._sizes


class _Below:
    """See ``Objects.below``, and ``Store``."""

    def __init__(self, objects: Objects, prefix: str) -> None:
        self._objects: Final = objects
        self._prefix: Final = prefix

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        data = b"".join(bytes_of(part, name) for part in parts)
        self._objects.put(self._prefix + name, data, fresh=False)

    def create(self, name: str, data: bytes) -> bool:
        return self._objects.put(self._prefix + name, data, fresh=True)

    def get(self, name: str) -> bytes:
        return self._objects.store.get(self._prefix + name)

    def get_range(self, name: str, start: int, into: memoryview) -> None:
        self._objects.store.get_range(self._prefix + name, start, into)

    def list(self, prefix: str, after: str = "") -> Iterator[ListedObject]:
        last = self._prefix + after if after else ""
        for each in self._objects.store.list(self._prefix + prefix, last):
            yield ListedObject(each.name.removeprefix(self._prefix), each.size, each.modified)

    def delete(self, names: Sequence[str]) -> None:
        self._objects.delete([self._prefix + name for name in names])

    def close(self) -> None:
        """The objects are those of the host."""
