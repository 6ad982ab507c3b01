"""``FileDraft``: the files of one save, in a directory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from portus.engine.copying.segments import Column, Digests, Stop
from portus.engine.directory.publisher import Publisher
from portus.engine.directory.system import Linux
from portus.engine.format.checksum import DIGEST_SIZE
from portus.engine.image.image import Image
from portus.engine.media.file_calls import OUT_OF_SPACE
from portus.engine.pipeline.draft import Labels
from portus.engine.pipeline.plan import Feed, Previous
from portus.engine.pipeline.request import SaveRequest
from portus.engine.spec import VersionInfo
from portus.engine.writer.image_file import ImageFile
from portus.engine.writer.ring import StagingRing
from portus.engine.writer.ways import Ways
from portus.errors import MediumError

_NO_DIGESTS: Final = np.zeros((0, DIGEST_SIZE), np.uint8)


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
        while True:  # ends: there is nothing left to give back
            try:
                self._draft = writer.publisher.begin(
                    *paths,
                    base=base_of(request.base, paths[0]),
                    removed_elsewhere=request.removed_elsewhere,
                )
                break
            except MediumError as error:
                self._make_room(error)
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
                self._open(self._files[number])
                yield self._files[number], int(self._first[number]), part

    def _open(self, file: ImageFile) -> None:
        while True:  # ends: there is nothing left to give back
            try:
                file.open()
                return
            except MediumError as error:
                self._make_room(error)

    def _make_room(self, error: MediumError) -> None:
        """Free space if that is what lacks; else raise ``error``."""
        if error.errno not in OUT_OF_SPACE or not self._publisher.make_room(self._request):
            raise error

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
            self._open(file)
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
