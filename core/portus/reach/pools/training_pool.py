"""``TrainingPool``: a training's checkpoint files that are in a pool, not in a file system."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from portus.engine.directory.publisher import Publisher
from portus.engine.image.image import Image, bytes_image
from portus.engine.job.settings import Settings
from portus.engine.media import calls
from portus.engine.paths.request import Destination, NewFile
from portus.engine.pipeline.draft import CommittedVersion, Draft, Labels
from portus.engine.pipeline.plan import Flags, Snapshot
from portus.engine.pipeline.request import SaveRequest
from portus.engine.pipeline.run import Save
from portus.engine.writer.image_file import FileDraft
from portus.errors import (
    AbandonedError,
    BusyError,
    CorruptionError,
    PortusError,
    UsageError,
    printable,
)
from portus.reach.files.home import Home, Pool, open_home
from portus.reach.files.reference import read_reference
from portus.reach.format.reference import Reference, encode
from portus.reach.index.file_table import FileTable, PackedFile, decode_table
from portus.reach.index.place import Place
from portus.reach.index.records import VersionRecord
from portus.reach.pools.image_draft import CommittedImages, ImageDraft, lengths_of
from portus.reach.pools.resolve import allow
from portus.reach.versions.host import HostDraft, HostPool
from portus.reach.versions.pool_draft import PoolDraft

_log: Final = logging.getLogger("portus")

_NAMES_MAX: Final = 64
"""Trainings that save to a storage host under one name at once."""

_HELD: Final[set[tuple[Place, str]]] = set()
"""The places and names of this process's saves: a host refuses them to others, after a wait."""


class TrainingPool(Destination):
    """The versions of one training in a pool, on a device or on a storage host, as a
    ``Destination``. At a checkpoint's path is a *pointer*, a small file that loads follow. A
    version stays until its last pointer is removed, or replaced, through this class. A file without
    a path is a version that has no pointer.

    place: of the pool: a device, a host, or several hosts, of which each rank of a job saves to
    one. name: called when the pool opens, returns the name of the training there. is_named: a user
    gave the name; otherwise, if another process saves to a host under it, the next one is taken,
    ``name~2``. settings: of the saves.

    The first save opens the pool, which then stays open. Threads may share this. Raises
    ``UsageError`` if two copies must be durable, and the place is no host.
    """

    def __init__(
        self,
        place: Place,
        name: Callable[[], str],
        settings: Settings,
        *,
        is_named: bool,
        rank: int = 0,
    ) -> None:
        if settings.durable > 1 and not place.is_shared:
            raise UsageError(
                f"durable={settings.durable}: expected a storage host that has a replica, and its "
                f"address, portus://a+b, found {place}"
            )
        self.place: Final = place.of_rank(rank)
        self._places: Final = [str(each) for each in place.hosts] or [str(place)]
        self._asked_name: Final = name
        self._name = ""
        self._settings: Final = settings
        self._may_be_next: Final = place.is_shared and not is_named
        self._number = 1
        self._guard: Final = threading.RLock()
        self._home: Home | None = None
        self._before: CommittedImages | None = None
        self._steady: Flags | None = None
        # The pointers of a process may refer to the pool that it saves to (V6).
        allow(place)

    @property
    def model(self) -> str:
        """The name of the training in the pool, which is open."""
        return self._name if self._number == 1 else f"{self._name}~{self._number}"

    @calls.mark
    def open(self) -> Pool:
        """Return the pool, opened or made first if it is not open. Raises ``UsageError``,
        ``BusyError``, ``MediumError``, ``CorruptionError``, ``TransportError``."""
        with self._guard:
            if self._home is None:
                self._name, self._number = self._asked_name(), 1
                home = self._open()
                try:
                    self._before = self._newest(home.pool)
                except BaseException:
                    home.close()
                    raise
                self._home = home
                _HELD.add((self.place, self.model))
            return self._home.pool

    def steady(self, late: Flags, *, unchanged: bool) -> Flags:
        """Return which storages to hash before anything is copied: those that were unchanged last
        time; at first, those that are not trained. late: those that are copied late. unchanged: no
        optimizer stepped since the last save, so those too."""
        known = self._steady
        # A storage that is not trained, such as a frozen base, is probably in the version before.
        hint = ~late if known is None or len(known) != len(late) else known
        return hint | late if unchanged else hint

    @property
    def kind(self) -> str:
        """The kind of medium that the pool is on. The pool is open."""
        return self._open_home.pool.medium.info.kind.name

    def before(self, files: int) -> VersionRecord | None:
        found = self.newest_of(files)
        return None if found is None else found.storages

    def newest_of(self, files: int) -> CommittedImages | None:
        """Return the newest version, if it has as many files."""
        found = self._before
        return found if found is not None and found.files == files else None

    def at_paths(
        self, new: Sequence[NewFile], images: Sequence[Image], snapshot: Snapshot
    ) -> Sequence[Image]:
        """Return pointers: each to the file of its name in the version of ``snapshot``."""
        pointers = [
            Reference(
                token=snapshot.token.hex(),
                pool=self._open_home.pool.uuid.hex(),
                pool_path=str(self.place),
                model=self.model,
                step=snapshot.step,
                written_path=each.real,
                files=len(new),
            )
            for each in new
            if each.real
        ]
        return [bytes_image(encode(each)) for each in pointers]

    def draft(
        self,
        new: Sequence[NewFile],
        images: Sequence[Image],
        snapshot: Snapshot,
        files: FileDraft | None,
        request: SaveRequest,
    ) -> ImageDraft:
        count = len(images)
        none = np.zeros(count, np.int64)
        whole = replace(
            snapshot,
            model=self.model,
            address=np.concatenate([snapshot.address, none]),
            length=lengths_of(images),
            # The bytes around the storages contain their digests, so they are made at the commit.
            late=np.concatenate([snapshot.late, np.ones(count, np.bool_)]),
            steady=np.concatenate([snapshot.steady, np.zeros(count, np.bool_)]),
            owners=(*snapshot.owners, *[None] * count) if snapshot.owners else (),
        )
        paths = [each.real for each in new if each.real]
        names = [os.path.basename(each.real or each.said) for each in new]
        packed = [PackedFile.of(name, image) for name, image in zip(names, images, strict=True)]
        table = FileTable(packed, os.path.dirname(paths[0]) if paths else "")
        return PointerDraft(
            self, self._open_home.draft(whole), table, images, files, paths, request
        )

    def note_commit(self, draft: Draft, version: CommittedVersion, steady: Flags) -> None:
        assert isinstance(draft, ImageDraft), "drafts are made here"
        self._before, self._steady = draft.committed, steady

    def remove(self, path: str, publisher: Publisher) -> None:
        """Remove a pointer, and the version if it was the last one that refers to it."""
        pointer = self.pointer_at(path)
        # The name first, then the version (V5): killed in between, the version only takes space.
        publisher.remove(path)
        if pointer is None:
            return
        try:
            self.let_go(pointer)
        except PortusError as error:
            _log.warning(
                "portus: %s is removed, but its version stays in %s: %s",
                printable(path),
                self.place,
                error,
            )

    def pointer_at(self, path: str) -> Reference | None:
        """Return the pointer at ``path``, if it was written for that path, and refers to one of the
        places. Raises ``MediumError``."""
        try:
            found = read_reference(path)
        except CorruptionError:
            return None
        # A copied or moved pointer releases nothing: the one at its own path may still be there
        # (decision 0215).
        if found is None or found.written_path != path or found.pool_path not in self._places:
            return None
        return found

    def let_go(self, pointer: Reference) -> None:
        """Remove the version of a pointer that was removed or replaced, if no other pointer refers
        to it. Opens the pool. Raises as ``open``."""
        where = os.path.dirname(pointer.written_path)
        names: Sequence[str] = ()
        if pointer.files > 1:
            with contextlib.suppress(FileNotFoundError):
                names = os.listdir(where)
        for name in names:
            other = self.pointer_at(os.path.join(where, name))
            # Several files are one version; it goes with the last of their pointers.
            if other is not None and other.token == pointer.token:
                return
        tokens = [bytes.fromhex(pointer.token)]
        if pointer.pool_path == str(self.place):
            self.open().let_go(tokens)
        else:
            with contextlib.closing(HostPool(pointer.pool_path)) as other_host:
                other_host.let_go(tokens)

    def journal(self) -> str | None:
        """Return the directory of the journals of this pool; None if it is not open."""
        with contextlib.suppress(PortusError):
            return None if self._home is None else self._home.journal()
        return None

    def note_failure(self, save: Save) -> None:
        """Record, where ``portus ls`` finds it, that a save failed. Raises nothing."""
        if self._home is not None:
            when = time.strftime("%Y-%m-%d %H:%M:%S %z")
            self._home.note_failure(f"{self.model}@{save.step} at {when}: {save.error}")

    def close(self) -> None:
        """Close the pool. A later save opens it again."""
        with self._guard:
            home, self._home = self._home, None
            self._before = self._steady = None
            if home is not None:
                _HELD.discard((self.place, self.model))
                home.close()

    @property
    def _open_home(self) -> Home:
        assert self._home is not None, "it is open"
        return self._home

    def _open(self) -> Home:
        settings = self._settings
        first = self.model
        while self._may_be_next and (self.place, self.model) in _HELD:
            self._number += 1
        if self.model != first:
            _log.warning(
                "portus: %s: this process saves %r already, and now %r beside it: keep one writer "
                "for the whole training, or close it first",
                self.place, first, self.model,
            )  # fmt: skip
        while True:  # ends: names are counted
            try:
                return open_home(self.place, self.model, settings.max_bytes, settings.durable)
            except BusyError:
                # The user did not choose this name, so a conflict is no reason to fail.
                if not self._may_be_next or self._number >= _NAMES_MAX:
                    raise
                self._number += 1

    def _newest(self, pool: Pool) -> CommittedImages | None:
        """Return the newest version, to share with; None if none can be read. Raises ``UsageError``
        for one that changes in place."""
        found = pool.catalogue().models.get(self.model)
        if not found:
            return None
        try:
            record = pool.record(found[-1])
        except PortusError:
            return None
        # A commit would retire it, with all entries of its log.
        if record.log is not None:
            raise UsageError(
                f"{self.place}: {self.model!r} changes in place, and a checkpoint of that name "
                "would replace it: expected checkpoints, found a shelf (portus.Shelf) or embedding "
                "tables (portus.embedding.protect); give the run another name, or a pool of its own"
            )
        try:
            known = decode_table(record.contents)
        except PortusError:
            return None
        if known is None:
            return None
        return CommittedImages(record, len(known.files), None)


class PointerDraft(ImageDraft):
    """A draft with pointers, which get their names once the version is committed. Until then their
    paths keep the previous files. If this process dies in between, they keep them for good, and the
    version stays in the pool without a pointer."""

    def __init__(
        self,
        pool: TrainingPool,
        draft: PoolDraft | HostDraft,
        table: FileTable,
        images: Sequence[Image],
        files: FileDraft | None,
        paths: Sequence[str],
        request: SaveRequest,
    ) -> None:
        """files: the draft of the pointers at ``paths``; None for a version without pointers."""
        super().__init__(draft, pool.model, table, images)
        self._pool: Final = pool
        self._files: Final = files
        self._paths: Final = paths
        self._request: Final = request

    def before(self) -> CommittedImages | None:
        return self._pool.newest_of(len(self._images))

    def make_room(self) -> bool:
        return self._request.make_room()

    def commit(self, labels: Labels) -> VersionRecord:
        if self._files is None:
            return super().commit(labels)
        # Read now: after ``publish`` the new pointers are at their paths.
        replaced = [old for path in self._paths if (old := self._pool.pointer_at(path))]
        # Durable before the version is committed: after that only names are left to change.
        self._files.finish()
        version = super().commit(labels)
        try:
            self._files.publish()
        except AbandonedError:
            # A signal handler wrote newer files at the paths, so no pointer refers to this version.
            self._pool.open().let_go([labels.token])
            raise
        # Only now: until the new pointer has its name, the old one needs its version.
        for old in {old.token: old for old in replaced}.values():
            self._pool.let_go(old)
        return version

    def release(self) -> None:
        super().release()
        if self._files is not None:
            self._files.release()
