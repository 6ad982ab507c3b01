"""``FileDraft``: one save into the file of an image, which is published at the commit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from portus.client.loading.checkpoint_file import is_whole
from portus.directory.publisher import Publisher, UnpublishedFile
from portus.directory.system import Linux, System
from portus.errors import MediumError, printable
from portus.media.process import Descriptor
from portus.pipeline.draft import Labels
from portus.pipeline.plan import Before, Column, Feed
from portus.spec import VersionInfo
from portus.transport.base import Digests, Stop
from portus.writer.image_file import ImageFile


@dataclass(frozen=True, slots=True)
class CommittedFile:
    """A file that was published. ``info.model`` is its path; ``info.id`` is 0."""

    info: VersionInfo


class FileDraft:
    """See ``pipeline.draft.Draft``. Publishes ``draft`` or abandons it, and closes ``file``.

    turn: entered while the file gets its name. Raises what forbids that.
    committed: called once the file is there, before anybody is told. Raises nothing.
    """

    def __init__(
        self,
        draft: UnpublishedFile[Descriptor],
        file: ImageFile,
        size: int,
        turn: Callable[[], AbstractContextManager[None]],
        committed: Callable[[], None] | None = None,
    ) -> None:
        """size: bytes of all storages."""
        self._size: Final = size
        self._draft: Final = draft
        self._file: Final = file
        self._turn: Final = turn
        self._committed: Final = committed

    @property
    def name(self) -> str:
        return self._draft.path

    @property
    def bounced_bytes(self) -> int:
        """None: nothing goes through a socket."""
        return 0

    def copy(self, indices: Column, address: Column, stop: Stop) -> Digests:
        return self._file.copy(indices, address, stop)

    def copy_fed(self, indices: Column, feeds: Sequence[Feed], stop: Stop) -> Digests:
        return np.concatenate(
            [
                self._file.copy_units(index, _units(feed), stop)
                for index, feed in zip(indices.tolist(), feeds, strict=True)
            ]
        )

    def share(self, before: Before, indices: Column, address: Column, stop: Stop) -> bool:
        """False: two files share no bytes."""
        return False

    def stored(self, storage: Column, offset: Column, length: Column) -> NDArray[np.uint8] | None:
        return self._file.stored(storage, offset, length)

    def commit(
        self, labels: Labels, before: Before | None, retire: Collection[int]
    ) -> CommittedFile:
        self._file.finish()
        self._draft.publish(self._turn())
        if self._committed is not None:
            self._committed()
        return CommittedFile(
            VersionInfo(
                model=labels.model,
                id=0,
                commit=0,
                step=labels.step,
                token=labels.token,
                time_ns=time.time_ns(),
                size=self._size,
                inexact=labels.inexact,
                metrics=labels.metrics,
            )
        )

    def release(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._draft.abandon)
            self._file.close()


def new_publisher() -> Publisher[Descriptor]:
    """Return what publishes files, and puts back none that is not whole."""
    return Publisher(Linux(), _is_whole)


def make_directory(path: str) -> None:
    """Make a directory, and those above it; nothing if it is there. Raises ``MediumError``."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise MediumError(
            error.errno, f"{printable(path)}: cannot make the directory: {error.strerror}"
        ) from error


def _is_whole(system: System[Descriptor], file: Descriptor, name: str) -> bool:
    return is_whole(file.number, name)


def _units(feed: Feed) -> Iterator[tuple[int, int]]:
    with feed.units() as units:
        yield from units
