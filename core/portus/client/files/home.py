"""Where the versions of a ``Checkpointer`` live: a pool file here, or a pool on a storage host.

Both are opened, saved to and let go of by the same calls; what differs is below this seam.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import urllib.parse
from collections.abc import Callable
from typing import Final, Protocol

from portus.client.files.held import forget_deleted, is_deserted
from portus.client.files.host import HostDraft, HostPool
from portus.client.files.keeper import Keeper, keeper_of
from portus.errors import MediumError, PortusError, UsageError
from portus.format.layout import DATA_START
from portus.index.catalogue import Catalogue
from portus.index.directory import (
    WRITERS,
    create_pool,
    generation_of,
    generations,
    has_pool,
    is_at,
    journal_directory,
    links_directory,
    make_directory,
    newest_generation,
    note_failure,
    on_disk,
    open_reader,
    open_superseded,
    remove_journals,
    remove_pool,
)
from portus.index.place import DEFAULT_DIRECTORY, SUFFIX, Place, PlaceKind, local_path, quoted
from portus.index.pool import PoolWriter
from portus.index.reader import PoolReader
from portus.index.roots import successor_uuid
from portus.media.local import LocalFiles
from portus.media.names import fitting
from portus.pipeline.draft import PoolDraft
from portus.pipeline.plan import Snapshot

_log: Final = logging.getLogger("portus")

Pool = PoolWriter | HostPool
"""A pool that can be saved to."""


class Home(Protocol):
    """See the module."""

    @property
    def path(self) -> str:
        """What a user calls it."""

    @property
    def allowed(self) -> Place:
        """Where references may lead, if this is configured."""

    def journal(self) -> str:
        """The directory of its journals; the pool is open. Raises ``PortusError``."""

    def exists(self) -> bool:
        """True if there is a pool to open already."""

    def create(self, uuid: bytes | None = None) -> None:
        """Make the pool, if there is none. uuid: its identity, where that was said before."""

    def open(self) -> Pool:
        """The pool, and its reference files. Raises what opening raises."""

    def older(self) -> dict[PoolReader, str]:
        """Pools that it is a successor of, and where they are; the oldest first."""

    def succeed(self) -> bool:
        """Continue in a successor if the pool accepts no more writes, and return True if that was
        done. ``open`` then returns the successor. What was open becomes one of ``older``. Raises
        ``MediumError``."""

    def drop(self, pool: PoolReader) -> None:
        """Remove one of ``older``: nothing leads there any more."""

    def keeper(self, pool: Pool) -> Keeper:
        """Return the keeper of the pool's reference files."""

    def draft(self, snapshot: Snapshot) -> PoolDraft | HostDraft:
        """Where a save of ``snapshot`` goes; the pool is open."""

    def note_failure(self, text: str) -> None:
        """Put on record, where ``portus ls`` finds it, which save failed. Raises nothing: it is a
        message, and no more."""

    def close(self, *, made: bool) -> None:
        """Let go. made: this one made the pool, which goes away again if nothing was ever saved."""


class FileHome:
    """A pool file of this machine; or, once that accepts no more writes, its successor."""

    def __init__(self, place: Place, model: str, max_bytes: int | None) -> None:
        self.allowed: Final = place
        self._first: Final = place.pool_of(model).path
        self._generation, self.path = newest_generation(self._first)
        self._max_bytes: Final = max_bytes
        self._writer: PoolWriter | None = None
        self._older: dict[PoolReader, str] = {}

    def journal(self) -> str:
        return journal_directory(self._first)

    def exists(self) -> bool:
        self._go_on()
        return has_pool(self.path)

    def create(self, uuid: bytes | None = None) -> None:
        for is_last in (False, False, True):
            if self.exists():
                return
            try:
                make_directory(os.path.dirname(self.path))
                create_pool(self.path, LocalFiles(), uuid)
            except MediumError as error:
                if is_last or error.errno != errno.ENOENT:
                    raise  # else the directory went with the pool of another, who never saved

    def open(self) -> PoolWriter:
        while True:  # ends: who had it went on in a successor meanwhile, and may have removed it
            try:
                writer = WRITERS.open(self.path, max_bytes=self._room())
            except (MediumError, UsageError):
                if not self._go_on():
                    raise
                continue
            if not self._go_on():
                break
            WRITERS.close(writer)
        self._writer = writer
        self._open_older()
        return writer

    def _go_on(self) -> bool:
        """Go on to the newest generation; False if it is this one."""
        newest = newest_generation(self._first)
        if newest[0] <= self._generation:
            return False
        self._generation, self.path = newest
        return True

    def _open_older(self) -> None:
        known = set(self._older.values())
        for number, path in generations(self._first).items():
            if number < self._generation and path not in known:
                reader = open_superseded(path)
                if reader is not None:
                    self._take_older(reader, path, self._generation - number)

    def _take_older(self, reader: PoolReader, path: str, generations_ago: int) -> None:
        assert self._writer is not None
        uuid = self._writer.superblock.uuid
        if successor_uuid(reader.superblock.uuid, generations_ago) == uuid:
            self._older[reader] = path
            return
        reader.close()
        _log.warning(
            "%s is not the pool that continues %s: another program put it there. Portus "
            "leaves it alone",
            path,
            self.path,
        )

    def _room(self) -> int | None:
        """The bytes that this generation may have, if there is a bound for all together."""
        if self._max_bytes is None:
            return None
        others = [each for each in generations(self._first).values() if each != self.path]
        return max(DATA_START, self._max_bytes - sum(map(on_disk, others)))

    def older(self) -> dict[PoolReader, str]:
        return dict(self._older)

    def succeed(self) -> bool:
        writer, before = self._writer, self.path
        if writer is None or not writer.medium.poisoned or self.allowed.kind is PlaceKind.DEVICE:
            return False
        if newest_generation(self._first)[0] <= self._generation:  # else another one has made it
            if any(isinstance(each, PoolWriter) for each in self._older):
                return False  # this is the successor: the machine has to be looked at
            make_directory(os.path.dirname(before))
            successor = generation_of(self._first, self._generation + 1)
            uuid = successor_uuid(writer.superblock.uuid)
            create_pool(successor, LocalFiles(), uuid, writer.catalogue().root)
        self._go_on()
        self._older[writer] = before
        self._writer = None
        _log.error(
            "portus: %s accepts no more writes. Saves continue in %s. Earlier versions stay "
            "where they are, and load from there as long as they can be read: look at the disk",
            before,
            self.path,
        )
        return True

    def drop(self, pool: PoolReader) -> None:
        path = self._older.pop(pool)
        if isinstance(pool, PoolWriter):
            writer = pool
            if writer.changed_by_others:  # it may be the pool of another by now
                WRITERS.close(writer)
                return
        else:
            pool.close()
            try:
                writer = WRITERS.open(path, timeout_s=0, mapped=False)
            except PortusError as error:
                _log.warning(
                    "%s is no longer needed, but cannot be removed; remove it yourself: %s",
                    path,
                    error,
                )
                return

        def take_away() -> None:
            if is_at(writer, path):
                forget_deleted(path)
                remove_pool(path, LocalFiles())

        WRITERS.close(writer, last=take_away)

    def keeper(self, pool: Pool) -> Keeper:
        return keeper_of(self.path, pool)

    def draft(self, snapshot: Snapshot) -> PoolDraft | HostDraft:
        assert self._writer is not None
        return PoolDraft(self._writer, snapshot.length)

    def note_failure(self, text: str) -> None:
        with contextlib.suppress(PortusError):
            note_failure(self._writer, text, self.path)

    def close(self, *, made: bool) -> None:
        writer, self._writer = self._writer, None
        succeeded = False
        for pool, path in self.older().items():
            succeeded = succeeded or isinstance(pool, PoolWriter)
            with contextlib.suppress(PortusError):
                if is_deserted(path, pool.catalogue()):
                    self.drop(pool)
                    continue
            self._older.pop(pool, None)
            if isinstance(pool, PoolWriter):
                WRITERS.close(pool)
            else:
                pool.close()
        if writer is None:
            return

        def tidy() -> None:
            unused = False
            try:
                unused = self._is_unused(writer.catalogue(), made or succeeded)
                if unused and is_at(writer, self.path) and not writer.changed_by_others:
                    if writer.catalogue().root.is_first:  # nothing was ever saved
                        remove_journals(self._first)
                    remove_pool(self.path, LocalFiles())
                else:
                    writer.give_back()
            except PortusError as error:
                what = (
                    "the empty pool could not be removed"
                    if unused
                    else "its free space could not be returned"
                )
                _log.warning("%s: %s: %s", self.path, what, error)

        WRITERS.close(writer, last=tidy)

    def _is_unused(self, catalogue: Catalogue, made: bool) -> bool:
        """True if nothing was ever saved to a pool that was ``made`` here; or if all of it is gone,
        and no file of a save leads there."""
        if catalogue.root.is_first:
            return made
        return not catalogue.ids() and not LocalFiles().entries(links_directory(self.path))


class HostHome:
    """A pool on a storage host. Links of its reference files are kept on this machine."""

    def __init__(self, place: Place, model: str, links: str | None, durable: int = 1) -> None:
        """links: a directory for the links; None: ``.portus`` in the current one."""
        self._model: Final = model
        self._durable: Final = durable
        self.path: Final = place.path
        self.allowed: Final = place
        of_host = _of_host(self.path)
        name = fitting(quoted(model), _NAME_MAX - len(of_host)) + of_host + SUFFIX
        self._links_path: Final = os.path.join(_links_at(links), name)
        self._pool: HostPool | None = None

    def journal(self) -> str:
        return journal_directory(self._links_path)

    def exists(self) -> bool:
        return True  # a host that cannot be reached at the start raises (V8)

    def create(self, uuid: bytes | None = None) -> None:
        """The host makes it."""

    def open(self) -> HostPool:
        self._pool = HostPool(self.path, self._model, durable=self._durable)
        return self._pool

    def keeper(self, pool: Pool) -> Keeper:
        return keeper_of(self._links_path, pool, address=self.path)

    def draft(self, snapshot: Snapshot) -> PoolDraft | HostDraft:
        assert self._pool is not None
        return self._pool.draft(snapshot)

    def older(self) -> dict[PoolReader, str]:
        return {}

    def succeed(self) -> bool:
        return False  # the host decides where its pools are

    def drop(self, pool: PoolReader) -> None:
        raise AssertionError("it has no older pools")

    def note_failure(self, text: str) -> None:
        if self._pool is not None:
            self._pool.note_failure(text)

    def close(self, *, made: bool) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


_NAME_MAX: Final = 200


def _of_host(address: str) -> str:
    """How the names end of what is on this machine of the models on a host."""
    return "@" + fitting(urllib.parse.quote(address, safe="@"), _NAME_MAX * 3 // 4)


def _links_at(links: str | None) -> str:
    return local_path(links or DEFAULT_DIRECTORY, "links")


def host_links(host: Place, links: str | None) -> list[str]:
    """The paths that links directories are named after: those in ``links``, see ``HostHome``, of
    trainers of this machine that saved to the storage host."""
    found = _beside_host(host, links, links_directory)
    return [os.path.splitext(path)[0] + SUFFIX for path in found]


def host_journals(host: Place, links: str | None) -> list[str]:
    """The directories in ``links``, see ``HostHome``, of journals of trainers of this machine that
    saved to the storage host."""
    return _beside_host(host, links, journal_directory)


def _beside_host(host: Place, links: str | None, of_pool: Callable[[str], str]) -> list[str]:
    """What is in ``links`` of all models on the host. of_pool: what it would be of a pool file."""
    inside = _links_at(links)
    end = os.path.basename(of_pool(_of_host(str(host)) + SUFFIX))
    names = sorted(os.listdir(inside)) if os.path.isdir(inside) else []
    return [os.path.join(inside, name) for name in names if name.endswith(end)]


def home_of(
    place: Place, model: str, max_bytes: int | None, links: str | None, durable: int = 1
) -> Home:
    """Where the versions of ``model`` live at that place. Raises ``UsageError`` if that is several
    hosts, or no host and ``durable`` says that two are to have what counts."""
    if len(place.hosts) > 1:
        raise UsageError(
            f"{place}: model {model!r} is saved to one pool; expected one storage host, found "
            f"{len(place.hosts)}. The shards of several ranks are spread over them: portus.dcp"
        )
    if place.is_host:
        return HostHome(place, model, links, durable)
    if durable > 1:
        raise UsageError(
            f"durable={durable}: model {model!r} is saved to {place}; expected a storage host that "
            "has a replica, and its address, portus://a+b"
        )
    return FileHome(place, model, max_bytes)


def open_place(pool: Place) -> PoolReader:
    """One pool, for reading. Raises what opening raises."""
    return HostPool(pool.path) if pool.is_host else open_reader(pool.path)
