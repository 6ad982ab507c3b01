"""``PoolDestination``: storages go to a pool, and pointers to them to the paths of files."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from portus.engine.copying.segments import Digests, Stop
from portus.engine.image.image import Image, bytes_image
from portus.engine.paths.request import NewFile
from portus.engine.pipeline.draft import CommittedVersion, Draft, Labels
from portus.engine.pipeline.plan import Column, Feed, Flags, Previous, Snapshot
from portus.engine.pipeline.run import Save
from portus.engine.writer.image_file import FileDraft
from portus.errors import AbandonedError, PortusError, printable
from portus.reach.format.reference import encode
from portus.reach.pools.image_draft import CommittedImages, ImageDraft
from portus.reach.pools.training_pool import TrainingPool
from portus.reach.versions.packed import FileTable, PackedFile
from portus.reach.versions.parts import Before

_log: Final = logging.getLogger("portus")


class PoolDestination:
    """See ``engine.paths.destination.Destination``. A file without a path is a version that has
    no pointer."""

    def __init__(self, pool: TrainingPool) -> None:
        self._pool: Final = pool

    @property
    def kind(self) -> str:
        return self._pool.kind

    def open(self) -> None:
        self._pool.open()

    def steady(self, late: Flags, *, unchanged: bool) -> Flags:
        return self._pool.steady(late, unchanged=unchanged)

    def before(self, files: int) -> Before | None:
        found = self._pool.before(files)
        return None if found is None else found.storages

    def at_paths(
        self, new: Sequence[NewFile], images: Sequence[Image], snapshot: Snapshot
    ) -> Sequence[Image]:
        """Return pointers."""
        pool = self._pool
        return [bytes_image(encode(pool.pointer(each.real, snapshot))) for each in new if each.real]

    def draft(
        self,
        new: Sequence[NewFile],
        images: Sequence[Image],
        snapshot: Snapshot,
        files: FileDraft | None,
        make_room: Callable[[], bool],
    ) -> Draft:
        pool = self._pool
        if files is None:
            table = FileTable([PackedFile.of(new[0].said, images[0])])
            return pool.draft(snapshot, table, images, make_room)
        try:
            packed = [
                PackedFile.of(os.path.basename(each.real), image)
                for each, image in zip(new, images, strict=True)
            ]
            table = FileTable(packed, os.path.dirname(new[0].real))
            version = pool.draft(snapshot, table, images, make_room)
        except BaseException:
            files.release()
            raise
        return PooledDraft(pool, version, files, [each.real for each in new])

    def committed(self, draft: Draft, version: CommittedVersion, steady: Flags) -> None:
        assert isinstance(draft, ImageDraft | PooledDraft), "drafts are made here"
        self._pool.committed(draft.committed, steady)

    def remove(self, path: str, remove: Callable[[str], object]) -> None:
        """Remove a pointer, and then the version that it alone leads to."""
        pointer = self._pool.pointer_at(path)
        remove(path)
        if pointer is None:
            return
        try:
            self._pool.let_go(pointer)
        except PortusError as error:
            _log.warning(
                "portus: %s is removed, and what it led to stays in %s: %s",
                printable(path),
                self._pool.place,
                error,
            )

    def failed(self, save: Save) -> None:
        self._pool.note_failure(save)

    def close(self) -> None:
        self._pool.close()


class PooledDraft:
    """See ``engine.pipeline.draft.Draft``: a version in a pool, whose pointers get their names once
    it is committed. Until then there is at their paths what was there before; so it is for ever if
    this process dies in between, and the version stays in the pool without a pointer.

    pointers: the draft of these files. paths: where they go.
    """

    def __init__(
        self,
        pool: TrainingPool,
        draft: ImageDraft,
        pointers: FileDraft,
        paths: Sequence[str],
    ) -> None:
        self._pool: Final = pool
        self._version: Final = draft
        self._pointers: Final = pointers
        self._paths: Final = paths

    @property
    def name(self) -> str:
        return self._version.name

    @property
    def bounced_bytes(self) -> int:
        return self._version.bounced_bytes

    @property
    def committed(self) -> CommittedImages | None:
        """The version, once it is committed."""
        return self._version.committed

    @property
    def kept_bytes(self) -> int:
        return self._version.kept_bytes

    def copy(self, indices: Column, address: Column, stop: Stop) -> Digests:
        return self._version.copy(indices, address, stop)

    def copy_fed(self, indices: Column, feeds: Sequence[Feed], stop: Stop) -> Digests:
        return self._version.copy_fed(indices, feeds, stop)

    def share(self, before: Previous, indices: Column, address: Column, stop: Stop) -> bool:
        return self._version.share(before, indices, address, stop)

    def stored(self, storage: Column, offset: Column, length: Column) -> NDArray[np.uint8] | None:
        return self._version.stored(storage, offset, length)

    def commit(self, labels: Labels, before: Previous | None, retire: Collection[int]) -> Before:
        replaced = [self._pool.pointer_at(each) for each in self._paths]
        self._pointers.finish()
        version = self._version.commit(labels, before, retire)
        try:
            self._pointers.publish()
        except AbandonedError:
            self._pool.retire(labels.token)
            raise
        for old in replaced:
            if old is not None:
                self._pool.let_go(old)
        return version

    def release(self) -> None:
        self._version.release()
        self._pointers.release()
