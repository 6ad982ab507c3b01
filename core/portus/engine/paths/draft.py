"""``FileDraft``: one save into the files of images, which are published together at the commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from portus.engine.copying.segments import Digests, Stop
from portus.engine.directory.publisher import Publisher
from portus.engine.directory.system import Linux, System
from portus.engine.format.checksum import DIGEST_SIZE
from portus.engine.loading.recognized import is_whole
from portus.engine.media.process import Descriptor
from portus.engine.pipeline.draft import Labels
from portus.engine.pipeline.plan import Column, Feed, Previous
from portus.engine.spec import VersionInfo
from portus.engine.writer.image_file import ImageFile


@dataclass(frozen=True, slots=True)
class CommittedFile:
    """A file that was published. ``info.model`` is its path; ``info.id`` is 0."""

    info: VersionInfo


class Unpublished(Protocol):
    """Files that are durable, and become visible together; see ``Publication``."""

    @property
    def path(self) -> str: ...

    def publish(self, turn: AbstractContextManager[None]) -> None: ...

    def abandon(self) -> None: ...


class FileDraft:
    """See ``engine.pipeline.draft.Draft``. Publishes ``draft`` or abandons it, and closes
    ``files``.

    files: those of the draft, in its order; the storages of the save are theirs, one file after
    another. ready: called before the files get their names. turn: entered while they do. Both raise
    what forbids that. committed: called once they are there, before anybody is told. Raises
    nothing.
    """

    def __init__(
        self,
        draft: Unpublished,
        files: Sequence[ImageFile],
        turn: Callable[[], AbstractContextManager[None]],
        ready: Callable[[], None] | None = None,
        committed: Callable[[], None] | None = None,
    ) -> None:
        self._draft: Final = draft
        self._files: Final = files
        self._turn: Final = turn
        self._ready: Final = ready
        self._committed: Final = committed
        counts = np.array([len(each.image.length) for each in files], np.int64)
        self._first: Final = np.cumsum(counts) - counts

    @property
    def name(self) -> str:
        return self._draft.path

    @property
    def bounced_bytes(self) -> int:
        """None: nothing goes through a socket."""
        return 0

    @property
    def kept_bytes(self) -> int:
        return sum(each.kept_bytes for each in self._files)

    def copy(self, indices: Column, address: Column, stop: Stop) -> Digests:
        return _joined(
            file.copy(indices[part] - first, address[part], stop)
            for file, first, part in self._by_file(indices)
        )

    def copy_fed(self, indices: Column, feeds: Sequence[Feed], stop: Stop) -> Digests:
        return _joined(
            file.copy_units(int(indices[at]) - first, _units(feeds[at]), stop)
            for file, first, part in self._by_file(indices)
            for at in part.tolist()
        )

    def share(self, before: Previous, indices: Column, address: Column, stop: Stop) -> bool:
        """False: two files share no bytes."""
        return False

    def stored(self, storage: Column, offset: Column, length: Column) -> NDArray[np.uint8] | None:
        found = [
            file.stored(storage[part] - first, offset[part], length[part])
            for file, first, part in self._by_file(storage)
        ]
        seen = [each for each in found if each is not None]
        return np.concatenate(seen) if seen and len(seen) == len(found) else None

    def _by_file(self, storages: Column) -> Iterator[tuple[ImageFile, int, Column]]:
        """Each file, its first storage, and the places in ``storages`` of some that are in it; end
        to end these are all places."""
        owner = np.searchsorted(self._first, storages, "right") - 1
        cuts = np.flatnonzero(np.diff(owner)) + 1
        for part in np.split(np.arange(len(storages)), cuts):
            if len(part):
                number = int(owner[part[0]])
                yield self._files[number], int(self._first[number]), part

    def commit(
        self, labels: Labels, before: Previous | None, retire: Collection[int]
    ) -> CommittedFile:
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
            file.finish()
        if self._ready is not None:
            self._ready()

    def publish(self) -> None:
        """Give the files their names. Raises ``PortusError``."""
        self._draft.publish(self._turn())
        if self._committed is not None:
            self._committed()

    def release(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._draft.abandon)
            for file in self._files:
                stack.callback(file.close)


def new_publisher() -> Publisher[Descriptor]:
    """Return what publishes files, and puts back none that is not whole."""
    return Publisher(Linux(), is_worth_restoring)


def is_worth_restoring(system: System[Descriptor], file: Descriptor, path: str) -> bool:
    """Return whether an open file, to be put at ``path``, is whole, and no pointer that is known to
    lead to nothing. Reads all of it."""
    return is_whole(file.number, path)


def _joined(digests: Iterable[Digests]) -> Digests:
    found = list(digests)
    return np.concatenate(found) if found else np.zeros((0, DIGEST_SIZE), np.uint8)


def _units(feed: Feed) -> Iterator[tuple[int, int]]:
    with feed.units() as units:
        yield from units
