"""Objects as they were sent: files with their digest beside them, and the check of both."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator

import xxhash

from portus.engine.format.checksum import UNIT, digest
from portus.engine.media.file_calls import write_all
from portus.errors import CorruptionError, MediumError, StaleError, printable
from portus.reach.mirror.objects import DIGEST_SUFFIX, digest_line
from portus.reach.mirror.store import FileStore, MissingError, Store

Advanced = Callable[[int], object]
"""Told of bytes that were read."""


def put_file(store: FileStore, name: str, parts: Iterable[bytes], size: int) -> bytes:
    """Put a file, ``size`` bytes in ``parts``, and its digest beside it; the digest. Raises what
    the store raises, and what asking for a part does."""
    hasher = xxhash.xxh3_128()

    def hash_parts() -> Iterator[bytes]:
        for part in parts:
            hasher.update(part)
            yield part

    store.put_stream(name, hash_parts(), size)
    store.put(name + DIGEST_SUFFIX, digest_line(name, hasher.digest()))
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
        # No range that was read covers bytes behind the end.
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


def digest_of(number: int, size: int, path: str, start: int = 0) -> bytes:
    """Return the xxh3_128 of ``size`` bytes of an open file, from ``start`` on. Raises as
    ``read_at``."""
    hasher = xxhash.xxh3_128()
    for at in range(start, start + size, UNIT):
        hasher.update(read_at(number, at, min(UNIT, start + size - at), path))
    return hasher.digest()


def read_at(number: int, start: int, length: int, path: str) -> bytes:
    """Return bytes of an open file. path: for messages. Raises ``StaleError`` if it is shorter, and
    ``MediumError``."""
    try:
        data = os.pread(number, length, start)
    except OSError as error:
        raise MediumError(
            error.errno, f"{printable(path)}: cannot be read: {error.strerror}"
        ) from error
    if len(data) < length:
        raise StaleError(f"{printable(path)}: it became shorter while it was read")
    return data


def write_at(number: int, data: memoryview, start: int, path: str) -> None:
    """Write to an open file. path: for messages. Raises ``MediumError``."""
    try:
        write_all(number, data, start)
    except OSError as error:
        raise MediumError(
            error.errno, f"{printable(path)}: cannot be written: {error.strerror}"
        ) from error


@contextlib.contextmanager
def naming_store(where: str) -> Iterator[None]:
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
