"""``ImageDraft``: a version of a pool that contains the files of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from portus.engine.copying.segments import (
    Crcs,
    Digests,
    Sources,
    Stop,
    cut,
    memory,
    ranges,
)
from portus.engine.format.checksum import DIGEST_SIZE, unit_counts
from portus.engine.image.image import Image
from portus.engine.media.file_calls import OUT_OF_SPACE
from portus.engine.pipeline.draft import Labels
from portus.engine.pipeline.plan import Column, Feed, Previous
from portus.engine.writer.image_file import join_crcs
from portus.errors import MediumError
from portus.reach.index.file_table import FileTable, encode_table
from portus.reach.index.records import VersionRecord
from portus.reach.versions.host import HostDraft
from portus.reach.versions.parts import share
from portus.reach.versions.pool_draft import PoolDraft

_ADVICE: Final = (
    "`portus ls` lists what is there, and `portus gc --missing DIR` the versions that no pointer "
    "in a directory refers to any more"
)


@dataclass(frozen=True, slots=True)
class CommittedImages:
    """The newest version of files that a process committed, to share with. ``crcs``: of each unit
    of the storages of files; None if they are not known."""

    version: VersionRecord
    files: int
    crcs: Crcs | None

    @property
    def storages(self) -> VersionRecord:
        """The version as if it had only the storages of its files."""
        count = len(self.version.storages) - self.files
        return replace(self.version, storages=self.version.storages[:count])


class ImageDraft:
    """A ``Draft`` of files in a pool. The storages of the save are those of the files, one file
    after another. The bytes around them are copied at the commit, since they contain the digests. A
    version of this class has no pointers."""

    def __init__(
        self, draft: PoolDraft | HostDraft, model: str, table: FileTable, images: Sequence[Image]
    ) -> None:
        """draft: of a version of ``model`` whose lengths are ``lengths_of`` of the images. table:
        of their files."""
        self._draft: Final = draft
        self._model: Final = model
        self._images: Final = images
        self._table: Final = table
        lengths = np.concatenate([np.zeros(0, np.int64), *(each.length for each in images)])
        self._length: Final = lengths
        self._units: Final = unit_counts(lengths)
        self._first: Final = np.cumsum(self._units) - self._units
        count = int(self._units.sum())
        self._digests: Final[Digests] = np.zeros((count, DIGEST_SIZE), np.uint8)
        self._crcs: Final[Crcs] = np.zeros(count, np.uint32)
        self.committed: CommittedImages | None = None
        """The version, once it is committed."""

    def before(self) -> CommittedImages | None:
        """Return the newest version, with which this one may share."""
        return None

    def make_room(self) -> bool:
        """Release space in a full pool; return False if there is no more to release."""
        return False

    @property
    def name(self) -> str:
        return self._draft.name

    @property
    def bounced_bytes(self) -> int:
        return self._draft.bounced_bytes

    @property
    def kept_bytes(self) -> int:
        return self._draft.kept_bytes

    def copy(self, indices: Column, address: Column, stop: Stop) -> Digests:
        return self._copy(indices, lambda crcs: self._draft.copy(indices, address, stop, crcs))

    def copy_fed(self, indices: Column, feeds: Sequence[Feed], stop: Stop) -> Digests:
        return self._copy(indices, lambda crcs: self._draft.copy_fed(indices, feeds, stop, crcs))

    def _copy(self, indices: Column, copy: Callable[[Crcs], Digests]) -> Digests:
        rows = self._rows(indices)
        crcs = np.zeros(len(rows), np.uint32)
        digests = self._with_room(lambda: copy(crcs))
        self._digests[rows], self._crcs[rows] = digests, crcs
        return digests

    def share(self, before: Previous, indices: Column, address: Column, stop: Stop) -> bool:
        assert isinstance(before, VersionRecord), "a pool shares with its own versions"
        known = self.before()
        if known is None or known.version.info.token != before.info.token:
            return False  # another save was committed since the storages were compared
        if not self._draft.share(known.version, indices, address, stop):
            return False
        rows, record = self._rows(indices), known.version
        self._digests[rows] = share(record, indices).digests
        # This process has not summed them, and the pool stores digests, not CRCs.
        if known.crcs is None:
            self._crcs[rows] = sum_sources(Sources.in_memory(address, self._length[indices]))
        else:  # other storages may have changed their lengths, and so these their rows
            first = record.first_unit[indices]
            self._crcs[rows] = known.crcs[ranges(first, self._units[indices])]
        return True

    def read_back(
        self, storage: Column, offset: Column, length: Column
    ) -> NDArray[np.uint8] | None:
        return self._draft.read_back(storage, offset, length)

    def commit(self, labels: Labels) -> VersionRecord:
        # At the commit: these bytes contain the digests and CRCs of all others.
        around = [np.frombuffer(each, np.uint8) for each in self._around()]
        indices = np.arange(len(around)) + len(self._length)
        address = np.array([each.ctypes.data if len(each) else 0 for each in around], np.int64)
        self._with_room(lambda: self._draft.copy(indices, address, Stop()))
        labels = replace(labels, model=self._model, contents=encode_table(self._table))
        version = self._draft.commit(labels)
        self.committed = CommittedImages(version, len(self._table.files), self._crcs)
        return version

    def release(self) -> None:
        self._draft.release()

    def _rows(self, indices: Column) -> Column:
        return ranges(self._first[indices], self._units[indices])

    def _around(self) -> Iterator[bytearray]:
        """Yield the bytes around the storages of each file."""
        first = 0
        for file, image in zip(self._table.files, self._images, strict=True):
            own = np.arange(first, first + len(image.length))
            first += len(image.length)
            rows = self._rows(own)
            crcs = join_crcs(self._crcs[rows], self._length[own])
            yield file.bytes_around(image.literals(self._digests[rows], crcs))

    def _with_room(self, act: Callable[[], Digests]) -> Digests:
        while True:  # ends: there is nothing left to give back
            try:
                return act()
            except MediumError as error:
                if error.errno not in OUT_OF_SPACE:
                    raise
                if not self.make_room():
                    raise MediumError(error.errno, f"{error.strerror}; {_ADVICE}") from error


def sum_sources(sources: Sources) -> Crcs:
    """Return the CRC32 of each unit of ``sources``; their extents are ignored. Blocks."""
    segments, digests = cut(sources.require(addresses=True, extents=False))
    crcs = np.zeros(len(digests), np.uint32)
    columns = (segments.row, segments.address, segments.length)
    for row, address, length in zip(*(each.tolist() for each in columns), strict=True):
        crcs[row] = isal_zlib.crc32(memory(address, length), int(crcs[row]))
    return crcs


def lengths_of(images: Sequence[Image]) -> Column:
    """Return the length of each storage of a version of the files of ``images``."""
    around = [image.size - int(image.length.sum()) for image in images]
    return np.concatenate([*(image.length for image in images), np.array(around, np.int64)])
