"""``ModelObjects``: the objects of one model in a store, with requests in parallel, and digests
beside files and their checks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import xxhash

from portus.engine.format.checksum import UNIT, digest
from portus.errors import CorruptionError
from portus.reach.mirror.objects import DIGEST_SUFFIX, FileObject, digest_line, prefix_of
from portus.reach.mirror.store import ListedObject, MissingError, Part, Store
from portus.reach.versions.parallel import abreast, in_any_order
from portus.reach.versions.take_files import ABREAST

Advance = Callable[[int], object]
"""Called with counts of read bytes."""

_Item = TypeVar("_Item")


class ModelObjects:
    """See the module. Names are below the prefix of the model. All methods raise what the store
    does.

    All requests are made here, so that tests can run the rest in every history of a store.
    """

    def __init__(self, store: Store, model: str, where: str = "mirror") -> None:
        """Make no request. The maker of the store closes it. where: the store, for messages."""
        self.store: Final = store
        self.model: Final = model
        self.where: Final = where
        self._prefix: Final = prefix_of(model)

    def path(self, name: str) -> str:
        """Return the name of an object in the store."""
        return self._prefix + name

    def get(self, name: str) -> bytes | None:
        """Return all of an object; None if it does not exist."""
        with contextlib.suppress(MissingError):
            return self.store.get(self.path(name))
        return None

    def get_all(self, names: Sequence[str]) -> list[bytes | None]:
        """Return several objects, with None for each that does not exist."""
        return list(abreast(self.get, names, ABREAST))

    def create(self, name: str, data: bytes) -> bool:
        """Create an object as ``Store.create`` does."""
        return self.store.create(self.path(name), data)

    def put(self, name: str, data: bytes) -> None:
        """Put an object as ``Store.put`` does."""
        self.store.put(self.path(name), data)

    def list(self, folder: str, after: str = "") -> Iterator[ListedObject]:
        """Yield the objects in a folder that come after ``after``, in the order of their names."""
        for each in self.store.list(self.path(folder), after and self.path(after)):
            yield ListedObject(each.name.removeprefix(self._prefix), each.size, each.modified)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects as ``Store.delete`` does."""
        self.store.delete([self.path(name) for name in names])

    def for_each(self, request: Callable[[_Item], object], items: Sequence[_Item]) -> None:
        """Make a request for each item, in parallel, in any order. If it raises, some requests may
        have taken effect."""
        in_any_order(request, items, ABREAST)

    def get_range(self, name: str, start: int, length: int) -> Part:
        """Return a range as ``Store.get_range``; raise ``CorruptionError`` for a missing object."""
        try:
            return self.store.get_range(self.path(name), start, length)
        except MissingError as error:
            raise self._missing_error(name) from error

    def put_file(
        self,
        name: str,
        parts: Iterable[Part],
        size: int,
        *,
        unless: str = "",
        beside: bool = True,
    ) -> bytes:
        """Put a file, ``size`` bytes in ``parts``, and its digest ``beside`` it; return the digest.
        Raises also the errors of making a part, and ``StaleError`` if there is an object ``unless``
        by then."""
        hasher = xxhash.xxh3_128()

        def pass_on() -> Iterator[Part]:
            for part in parts:
                hasher.update(part)
                yield part

        never = unless and self.path(unless)
        self.store.put_stream(self.path(name), pass_on(), size, unless=never)
        if beside:
            self.put(name + DIGEST_SUFFIX, digest_line(name, hasher.digest()))
        return hasher.digest()

    def copy_file(self, name: str, target: str, size: int, sent: bytes) -> bool:
        """Copy an existing file, with the digest ``sent``, to another name. Return False if the
        store copies none that large. Raises ``CorruptionError`` if the file does not exist."""
        try:
            if not self.store.copy(self.path(name), self.path(target), size):
                return False
        except MissingError as error:
            raise self._missing_error(name) from error
        self.put(target + DIGEST_SUFFIX, digest_line(target, sent))
        return True

    def read(self, each: FileObject) -> Iterator[int]:
        """Read all of a file, and the digest beside it; yield the number of the file's bytes that
        each request read. Raises ``CorruptionError``, naming the object, unless all is as it was
        sent."""
        yield from self._read_ranges(each)
        said = digest_line(each.name, each.digest)
        beside = FileObject(each.name + DIGEST_SUFFIX, len(said), digest(said))
        for _ in self._read_ranges(beside):
            pass  # no bytes of the file

    def _read_ranges(self, each: FileObject) -> Iterator[int]:
        hasher = xxhash.xxh3_128()
        for start in range(0, each.size, UNIT):
            part = self.get_range(each.name, start, min(UNIT, each.size - start))
            hasher.update(part)
            yield len(part)
        # None of the ranges covers bytes behind the end.
        if self._goes_on(each.name, each.size):
            raise self._error(each.name, f"expected {each.size} bytes, found more")
        if hasher.digest() != each.digest:
            found = hasher.digest().hex()
            raise self._error(each.name, f"expected the digest {each.digest.hex()}, found {found}")

    def _goes_on(self, name: str, size: int) -> bool:
        try:
            self.store.get_range(self.path(name), size, 1)
        except MissingError as error:
            raise self._missing_error(name) from error
        except CorruptionError:
            return False
        return True

    def _error(self, name: str, what: str) -> CorruptionError:
        return CorruptionError(f"{self.where}: {self.path(name)}: {what}")

    def _missing_error(self, name: str) -> CorruptionError:
        return CorruptionError(f"{self.where}: {self.path(name)} is missing")
