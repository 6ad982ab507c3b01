"""Objects as they were sent: files with their digest beside them, and the check of both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import xxhash

from portus.engine.format.checksum import UNIT, digest
from portus.errors import CorruptionError
from portus.reach.mirror.objects import DIGEST_SUFFIX, digest_line
from portus.reach.mirror.store import FileStore, MissingError, Store

Advanced = Callable[[int], object]
"""Told of bytes that were read."""


def put_file(store: FileStore, name: str, parts: Iterable[bytes], size: int) -> bytes:
    """Put a file, ``size`` bytes in ``parts``, and its digest beside it; the digest. Raises what
    the store raises, and what asking for a part does."""
    hasher = xxhash.xxh3_128()

    def hashed() -> Iterator[bytes]:
        for part in parts:
            hasher.update(part)
            yield part

    store.put_stream(name, hashed(), size)
    store.put(name + DIGEST_SUFFIX, [digest_line(name, hasher.digest())])
    return hasher.digest()


def check_file(store: Store, name: str, size: int, sent: bytes, advanced: Advanced) -> None:
    """Check a file, and what is beside it, as ``check_object`` does."""
    check_object(store, name, size, sent, advanced)
    said = digest_line(name, sent)
    check_object(store, name + DIGEST_SUFFIX, len(said), digest(said), lambda _: None)


def check_object(store: Store, name: str, size: int, sent: bytes, advanced: Advanced) -> None:
    """Read all of an object. Raises ``CorruptionError``, naming it, unless it is the ``size`` bytes
    with the digest ``sent``, and what the store raises."""
    hasher, room = xxhash.xxh3_128(), memoryview(bytearray(min(size, UNIT)))
    try:
        for start in range(0, size, UNIT):
            part = room[: size - start]
            store.get_range(name, start, part)
            hasher.update(part)
            advanced(len(part))
        is_longer = _goes_on(store, name, size)
    except MissingError as error:
        raise CorruptionError(f"{name} is missing") from error
    if is_longer:
        raise CorruptionError(f"{name}: expected {size} bytes, found more")
    if hasher.digest() != sent:
        raise CorruptionError(
            f"{name}: expected the digest {sent.hex()}, found {hasher.hexdigest()}"
        )


def check_piece(store: Store, name: str, size: int, sent: bytes, advanced: Advanced) -> None:
    """Check a piece, as ``check_object`` does, by one request."""
    try:
        data = store.get(name)
    except MissingError as error:
        raise CorruptionError(f"{name} is missing") from error
    advanced(len(data))
    if len(data) != size:
        raise CorruptionError(f"{name}: expected {size} bytes, found {len(data)}")
    if (found := digest(data)) != sent:
        raise CorruptionError(f"{name}: expected the digest {sent.hex()}, found {found.hex()}")


@contextlib.contextmanager
def named(where: str) -> Iterator[None]:
    """A ``CorruptionError`` says in which store it is."""
    try:
        yield
    except CorruptionError as error:
        raise CorruptionError(f"{where}: {error}") from error


def _goes_on(store: Store, name: str, size: int) -> bool:
    try:
        store.get_range(name, size, memoryview(bytearray(1)))
    except CorruptionError:
        return False
    return True
