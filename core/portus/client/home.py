"""Where the versions of a ``Checkpointer`` live: a pool file here, or a pool on a storage host.

Both are opened, saved to and let go of by the same calls; what differs is below this seam.
"""

from __future__ import annotations

import errno
import os
import urllib.parse
from typing import Final, Protocol

from portus.client.host import HostPool
from portus.client.keeper import Keeper, keeper_of
from portus.client.reference import links_directory
from portus.errors import MediumError
from portus.index.directory import (
    DEFAULT_DIRECTORY,
    SUFFIX,
    WRITERS,
    create_pool,
    has_pool,
    make_directory,
    open_reader,
    place_named,
    pool_file,
    pool_files,
    remove_pool,
)
from portus.index.pool import PoolReader, PoolWriter
from portus.media.dax import is_device
from portus.media.local import LocalFiles
from portus.pipeline.draft import Draft, PoolDraft
from portus.pipeline.plan import Snapshot
from portus.protocol.address import is_address, parse

Pool = PoolWriter | HostPool
"""A pool that can be saved to."""


class Home(Protocol):
    """See the module."""

    @property
    def path(self) -> str:
        """What a user calls it."""

    @property
    def allowed(self) -> str:
        """Where references may lead, if this is configured."""

    def exists(self) -> bool:
        """True if there is a pool to open already."""

    def create(self) -> None:
        """Make the pool, if there is none."""

    def open(self) -> Pool:
        """The pool, and its reference files. Raises what opening raises."""

    def keeper(self, pool: Pool) -> Keeper:
        """Its reference files."""

    def draft(self, snapshot: Snapshot) -> Draft:
        """Where a save of ``snapshot`` goes; the pool is open."""

    def close(self, *, made: bool) -> None:
        """Let go. made: this one made the pool, which goes away again if nothing was ever saved."""


class FileHome:
    """A pool file of this machine."""

    def __init__(
        self, pool: str | os.PathLike[str] | None, model: str, max_bytes: int | None
    ) -> None:
        self.path: Final = pool_file(pool, model)
        in_directory = pool is None and not is_device(self.path)
        self.allowed: Final = (
            os.path.dirname(self.path) if in_directory else place_named(pool or self.path)
        )
        self._max_bytes: Final = max_bytes
        self._writer: PoolWriter | None = None

    def exists(self) -> bool:
        return has_pool(self.path)

    def create(self) -> None:
        for is_last in (False, False, True):
            if self.exists():
                return
            try:
                make_directory(os.path.dirname(self.path))
                create_pool(self.path, LocalFiles())
            except MediumError as error:
                if is_last or error.errno != errno.ENOENT:
                    raise  # else the directory went with the pool of another, who never saved

    def open(self) -> PoolWriter:
        self._writer = WRITERS.open(self.path, max_bytes=self._max_bytes)
        return self._writer

    def keeper(self, pool: Pool) -> Keeper:
        return keeper_of(self.path, pool)

    def draft(self, snapshot: Snapshot) -> Draft:
        assert self._writer is not None
        return PoolDraft(self._writer, snapshot.length)

    def close(self, *, made: bool) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return

        def take_away() -> None:
            if made and writer.catalogue().root.sequence == 0:
                remove_pool(self.path, LocalFiles())

        WRITERS.close(writer, last=take_away)


class HostHome:
    """A pool on a storage host. Links of its reference files are kept on this machine."""

    def __init__(self, pool: str, model: str, links: str | None) -> None:
        """links: a directory for the links; None: ``.portus`` in the current one."""
        self._model: Final = model
        self.path: Final = str(parse(pool))
        self.allowed: Final = self.path
        name = _quoted(f"{model}@{self.path}") + SUFFIX
        self._links_path: Final = os.path.join(os.path.abspath(links or DEFAULT_DIRECTORY), name)
        self._pool: HostPool | None = None

    def exists(self) -> bool:
        return True  # a host that cannot be reached at the start raises (V8)

    def create(self) -> None:
        """The host makes it."""

    def open(self) -> HostPool:
        self._pool = HostPool(self.path, self._model)
        return self._pool

    def keeper(self, pool: Pool) -> Keeper:
        return keeper_of(self._links_path, pool, address=self.path)

    def draft(self, snapshot: Snapshot) -> Draft:
        assert self._pool is not None
        return self._pool.draft(snapshot)

    def close(self, *, made: bool) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


def _quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="@")[-200:]


def host_links(pool: str, links: str | None) -> list[str]:
    """The paths that links directories are named after: those in ``links``, see ``HostHome``, of
    trainers of this machine that saved to ``pool``, the address of a host."""
    inside = os.path.abspath(links or DEFAULT_DIRECTORY)
    end = os.path.basename(links_directory(_quoted(f"@{parse(pool)}") + SUFFIX))
    names = sorted(os.listdir(inside)) if os.path.isdir(inside) else []
    stems = [os.path.splitext(name)[0] for name in names if name.endswith(end)]
    return [os.path.join(inside, stem) + SUFFIX for stem in stems]


def home_of(
    pool: str | os.PathLike[str] | None, model: str, max_bytes: int | None, links: str | None
) -> Home:
    """What ``pool`` means for ``model``: see ``place_named``."""
    place = place_named(pool)
    if is_address(place):
        return HostHome(place, model, links)
    return FileHome(pool, model, max_bytes)


def pool_places(pool: str | os.PathLike[str] | None) -> list[str]:
    """The pool files that ``pool`` means, or the one host. Raises ``UsageError`` if none."""
    place = place_named(pool)
    return [str(parse(place))] if is_address(place) else pool_files(pool)


def open_place(path: str) -> PoolReader:
    """What ``pool_places`` gave, for reading. Raises what opening raises."""
    return HostPool(path) if is_address(path) else open_reader(path)
