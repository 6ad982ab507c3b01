"""``ImageFile``: the file of an image while it is written. ``FileDraft``: the files of one save.

Each byte of a storage is loaded once, and copied, hashed and summed in one pass. There are two ways
to the medium (``cached``, ``staged``); ``ways`` says which one is faster for such a file.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from portus.engine.copying.local import best_engine
from portus.engine.copying.segments import (
    Column,
    Crcs,
    Digests,
    Sources,
    Stop,
    cut,
    ranges,
    unit_spans,
)
from portus.engine.directory.publisher import Publisher
from portus.engine.directory.system import Linux
from portus.engine.format.checksum import DIGEST_SIZE, unit_counts
from portus.engine.image.image import Image, Literal
from portus.engine.media import linux
from portus.engine.media.file_calls import OUT_OF_SPACE, advice, file_system_of
from portus.engine.pipeline.draft import Labels
from portus.engine.pipeline.plan import Feed, Previous
from portus.engine.pipeline.request import SaveRequest
from portus.engine.spec import VersionInfo
from portus.engine.writer.cached_way import CachedWay, MappedWay
from portus.engine.writer.ring import StagingRing
from portus.engine.writer.staged_way import StagedWay, set_direct
from portus.engine.writer.ways import Kind, Way, Ways
from portus.errors import MediumError

Result = TypeVar("Result")

_NO_DIGESTS: Final = np.zeros((0, DIGEST_SIZE), np.uint8)
_NO_BLOCKS_AHEAD: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
_CANNOT_MAP: Final = _NO_BLOCKS_AHEAD | {errno.ENOMEM, errno.ENODEV}
"""Why a spare is written by calls: no blocks ahead (ext2), no addresses (``ulimit -v``)."""


class ImageFile:
    """Writes an image to one file. One thread at a time; ``close`` by any.

    Nothing is allocated before the first call. All raise ``MediumError`` with the path and advice.
    A later call reports a write that failed, ``finish`` at the latest.
    """

    def __init__(
        self,
        fd: int,
        path: str,
        image: Image,
        *,
        is_spare: bool,
        ring: StagingRing,
        ways: Ways,
    ) -> None:
        """fd: of an open file, readable and writable, the caller's. path: for messages. is_spare:
        the file has old bytes, and blocks. ways: chooses the way, and receives the time it took."""
        self._fd: Final = fd
        self._path: Final = path
        self.image: Final = image
        self._is_spare: Final = is_spare
        self._ring: Final = ring
        self._ways: Final = ways
        self._spent_s = 0.0
        self.kept_bytes = 0
        """Bytes of storages that the spare had already, and that were not written again."""
        with self._translate_errors():
            self._kind: Final = Kind(os.fstat(fd).st_dev, is_spare)
        self._way: CachedWay | StagedWay | None = None
        units = unit_counts(image.length)
        self._first: Final = np.cumsum(units) - units
        self._units: Final = units
        self._digests: Final = np.zeros((int(units.sum()), DIGEST_SIZE), np.uint8)
        self._crcs: Final = np.zeros(int(units.sum()), np.uint32)

    def open(self) -> None:
        """Allocate the blocks now, so that a full disk is noticed before anything is copied. May be
        called again once there is room. After it has succeeded this does nothing."""
        with self._translate_errors():
            self._open_way()

    def copy(self, indices: Column, address: Column, stop: Stop) -> Digests:
        """Copy storages from their addresses, and return the digests of the stored bytes. Returns
        when the sources are not needed any more. Raises ``StoppedError``."""
        with self._translate_errors():
            length, offset = self.image.length[indices], self.image.offset[indices]
            digests, crcs = self._copy(np.ascontiguousarray(address), length, offset, stop)
            self._note(indices, digests, crcs)
            return digests

    def copy_units(self, index: int, units: Iterable[tuple[int, int]], stop: Stop) -> Digests:
        """Copy a storage that comes as the addresses and lengths of its units, each valid until the
        next is taken."""
        with self._translate_errors():
            offset, parts = int(self.image.offset[index]), []
            for address, length in units:
                source, size, place = np.array([[address], [length], [offset]], np.int64)
                parts.append(self._copy(source, size, place, stop))
                offset += length
            digests, crcs = (np.concatenate(column) for column in zip(*parts, strict=True))
            self._note(np.array([index]), digests, crcs)
            return digests

    def read_back(
        self, storage: Column, offset: Column, length: Column
    ) -> NDArray[np.uint8] | None:
        """Return short pieces of the stored bytes, end to end; None if they cannot be read back."""
        with self._translate_errors():
            return self._open_way().bytes_at(self.image.offset[storage] + offset, length)

    def finish(self) -> None:
        """Write the rest of the image; return when all of it is on the medium."""
        # Only now: they contain the digests and CRCs of what was stored.
        literals = self.image.literals(self._digests, join_crcs(self._crcs, self.image.length))
        with self._translate_errors():
            way = self._open_way()
            for literal in (*literals, *self._zeros(literals)):
                way.put(literal)
            way.finish()
        # Timed until it is durable: the time until the fence opens would not count what a direct
        # write saves of the processor (decision 0202).
        self._ways.took(self._kind, way.kind, self.image.size, self._spent_s, self.kept_bytes)

    def close(self) -> None:
        """Release its buffers of the ring, and its addresses; the file stays open. Returns when no
        write is in flight. A second call does nothing."""
        way, self._way = self._way, None
        if way is not None:
            way.close()

    def _copy(
        self, address: Column, length: Column, offset: Column, stop: Stop
    ) -> tuple[Digests, Crcs]:
        """Copy storages to their offsets, and return the digests and the CRCs of their units."""
        way, (begin, size) = self._open_way(), unit_spans(offset, length)
        places, lengths = way.cut(begin[size > 0], size[size > 0])
        segments, digests = cut(
            Sources(address=address, length=length, extent_offset=places, extent_length=lengths)
        )
        crcs = np.zeros(len(digests), np.uint32)
        way.move(best_engine(), segments, digests, crcs, stop)
        self.kept_bytes = way.kept_bytes
        return digests, crcs

    def _note(self, indices: Column, digests: Digests, crcs: Crcs) -> None:
        row = ranges(self._first[indices], self._units[indices])
        self._digests[row] = digests
        self._crcs[row] = crcs

    def _open_way(self) -> CachedWay | StagedWay:
        if self._way is None:
            self._way = self._choose_way()
        return self._way

    def _choose_way(self) -> CachedWay | StagedWay:
        """Return the way for this file."""
        traits, is_in_place = file_system_of(self._fd, self._path)
        if not self._is_spare:  # a spare has its blocks
            self._allocate()
        if (
            not traits.volatile
            and self._ways.choose(self._kind, self.image.size) is Way.DIRECT
            and set_direct(self._fd, on=True)
        ):
            return StagedWay(self._fd, self.image, self._ring)
        # Two threads that write to one file wait for each other; stores to its pages do not. Where
        # blocks are copied on write, a store may find no block, and end in SIGBUS.
        if self._is_spare and is_in_place and not traits.volatile:
            try:
                return MappedWay(self._fd, self._path, self.image, self._ring)
            except OSError as error:
                if error.errno not in _CANNOT_MAP:
                    raise
        return CachedWay(
            self._fd, self.image, self._ring, volatile=traits.volatile, is_spare=self._is_spare
        )

    def _allocate(self) -> None:
        try:
            linux.allocate(self._fd, 0, self.image.size)
        except OSError as error:
            if error.errno not in _NO_BLOCKS_AHEAD:
                raise

    def _zeros(self, literals: Iterable[Literal]) -> Iterator[Literal]:
        """Yield zeros for all gaps, where a spare has old bytes."""
        if not self._is_spare:
            return
        image = self.image
        spans = [(each.offset, each.end) for each in literals]
        spans += zip(image.offset.tolist(), (image.offset + image.length).tolist(), strict=True)
        reached = 0
        for start, stop in sorted(spans):
            # The digest of all else covers these bytes, and a spare has old ones there.
            if start > reached:
                yield Literal(reached, bytes(start - reached))
            reached = max(reached, stop)
        if reached < image.size:
            yield Literal(reached, bytes(image.size - reached))

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except OSError as error:
            if isinstance(error, MediumError):
                raise
            raise MediumError(
                error.errno,
                f"{self._path}: cannot be written: {error.strerror or error}; {advice(error)}",
            ) from error
        finally:
            self._spent_s += time.perf_counter() - start


def join_crcs(crcs: Crcs, length: Column) -> Crcs:
    """Return the CRC32 of each storage of ``length`` bytes, from those of its units."""
    _, sizes = unit_spans(np.zeros_like(length), length)
    units = zip(crcs.tolist(), sizes.tolist(), strict=True)
    joined = np.zeros(len(length), np.uint32)
    for row, count in enumerate(unit_counts(length).tolist()):
        for crc, size in itertools.islice(units, count):
            joined[row] = isal_zlib.crc32_combine(int(joined[row]), crc, size)
    return joined


@dataclass(frozen=True, slots=True)
class CommittedFile:
    """A file that was published. ``info.model`` is its path; ``info.id`` is 0."""

    info: VersionInfo


class FileWriter:
    """The objects with which files are written. Threads may share it.

    staging: bytes of the buffers at most.
    """

    def __init__(self, staging: int) -> None:
        self.publisher: Final = Publisher(Linux())
        self.ring: Final = StagingRing(staging)
        self.ways: Final = Ways()

    def close(self) -> None:
        """Remove hidden files, and end the threads. No draft is left."""
        self.publisher.close()
        self.ring.close()


class FileDraft:
    """A ``Draft`` of files in a directory. The storages of the save are those of the ``images``,
    one file after another.

    paths: of the files, absolute, without links, and in one directory. turn: entered while the
    files get their names; raises an error that forbids it. request: of the save.
    """

    bounced_bytes: Final = 0
    """Always 0: no bytes go through a socket."""

    def __init__(
        self,
        writer: FileWriter,
        paths: Sequence[str],
        images: Sequence[Image],
        turn: AbstractContextManager[None],
        request: SaveRequest,
    ) -> None:
        """Begin the files. Raises ``MediumError``."""
        self._publisher: Final = writer.publisher
        self._turn: Final = turn
        self._request: Final = request
        self._draft: Final = self._with_room(
            lambda: writer.publisher.begin(
                *paths,
                base=base_of(request.base, paths[0]),
                removed_elsewhere=request.removed_elsewhere,
            )
        )
        try:
            self._files: Final = [
                ImageFile(
                    each.file.number,
                    self._draft.path_of(each.name),
                    image,
                    is_spare=each.is_spare,
                    ring=writer.ring,
                    ways=writer.ways,
                )
                for each, image in zip(self._draft.files, images, strict=True)
            ]
        except BaseException:
            self._draft.abandon()
            raise
        counts = np.array([len(each.length) for each in images], np.int64)
        self._first: Final = np.cumsum(counts) - counts

    @property
    def name(self) -> str:
        return self._draft.path

    @property
    def kept_bytes(self) -> int:
        return sum(each.kept_bytes for each in self._files)

    def copy(self, indices: Column, address: Column, stop: Stop) -> Digests:
        found = [
            file.copy(indices[part] - first, address[part], stop)
            for file, first, part in self._by_file(indices)
        ]
        return np.concatenate([_NO_DIGESTS, *found])

    def copy_fed(self, indices: Column, feeds: Sequence[Feed], stop: Stop) -> Digests:
        found = [_NO_DIGESTS]
        for file, first, part in self._by_file(indices):
            for at in part.tolist():
                with feeds[at].units() as units:
                    found.append(file.copy_units(int(indices[at]) - first, units, stop))
        return np.concatenate(found)

    def share(self, before: Previous, indices: Column, address: Column, stop: Stop) -> bool:
        """Return False: two files share no bytes."""
        return False

    def read_back(
        self, storage: Column, offset: Column, length: Column
    ) -> NDArray[np.uint8] | None:
        found = [
            file.read_back(storage[part] - first, offset[part], length[part])
            for file, first, part in self._by_file(storage)
        ]
        seen = [each for each in found if each is not None]
        return np.concatenate(seen) if seen and len(seen) == len(found) else None

    def _by_file(self, storages: Column) -> Iterator[tuple[ImageFile, int, Column]]:
        """Yield each file, its first storage, and the places in ``storages`` of some that are in
        it; end to end these are all places."""
        owner = np.searchsorted(self._first, storages, "right") - 1
        cuts = np.flatnonzero(np.diff(owner)) + 1
        for part in np.split(np.arange(len(storages)), cuts):
            if len(part):
                number = int(owner[part[0]])
                self._with_room(self._files[number].open)
                yield self._files[number], int(self._first[number]), part

    def _with_room(self, act: Callable[[], Result]) -> Result:
        """Return the result of ``act``, which is called again as long as there is space to free."""
        while True:  # ends: there is nothing left to give back
            try:
                return act()
            except MediumError as error:
                if error.errno not in OUT_OF_SPACE:
                    raise
                if not self._publisher.make_room(self._request):
                    # Once more: another thread may have removed a file meanwhile.
                    return act()

    def commit(self, labels: Labels) -> CommittedFile:
        self.finish()
        self.publish()
        return CommittedFile(
            VersionInfo(
                model=labels.model,
                id=0,
                commit=0,
                step=labels.step,
                token=labels.token,
                time_ns=time.time_ns(),
                size=sum(int(each.image.length.sum()) for each in self._files),
                inexact=labels.inexact,
                metrics=labels.metrics,
            )
        )

    def finish(self) -> None:
        """Return when the files are durable, and may get their names. Raises ``PortusError``."""
        for file in self._files:
            self._with_room(file.open)
            file.finish()
        self._request.ready()

    def publish(self) -> None:
        """Give the files their names. Raises ``PortusError``."""
        # After ``finish``: a name that is durable before its bytes may show any bytes.
        self._draft.publish(self._turn)

    def release(self) -> None:
        with contextlib.ExitStack() as stack:
            # Called last: by then no write to the files is in flight.
            stack.callback(self._draft.abandon)
            for file in self._files:
                stack.callback(file.close)


def base_of(said: str | None, path: str) -> str | None:
    """Return the base of a request if it is above ``path``, on its file system; else None."""
    if said is None:
        return None
    base, where = os.path.realpath(said), os.path.dirname(path)
    try:
        is_same = os.stat(base).st_dev == os.stat(where).st_dev
        return base if is_same and os.path.commonpath([base, where]) == base else None
    except (OSError, ValueError):
        return None
