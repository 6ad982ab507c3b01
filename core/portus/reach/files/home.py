"""The home of a training's versions: a pool here, or one on a storage host.

The same calls save to both, and close them; they differ below this seam.
"""

from __future__ import annotations

import contextlib
import logging
import os
import urllib.parse
from typing import Final

from portus.engine.pipeline.plan import Snapshot
from portus.errors import PortusError
from portus.reach.index.directory import (
    WRITERS,
    create_pool,
    has_pool,
    is_at,
    journal_directory,
    make_directory,
    note_failure,
    open_reader,
    remove_journals,
    remove_pool,
)
from portus.reach.index.place import DEFAULT_DIRECTORY, SUFFIX, Place, load_class, local_path, quote
from portus.reach.index.pool import PoolWriter
from portus.reach.index.reader import PoolReader
from portus.reach.media.local import LocalFiles
from portus.reach.media.names import fitting
from portus.reach.versions.host import HostDraft, HostPool
from portus.reach.versions.pool_draft import PoolDraft

_log: Final = logging.getLogger("portus")

Pool = PoolWriter | HostPool
"""A pool for saves."""


class FileHome:
    """A pool file of this machine, or a device, open for the saves of one training. ``pool``: the
    writer."""

    def __init__(
        self, place: Place, model: str, max_bytes: int | None = None, durable: int = 1
    ) -> None:
        """Open the pool; create it if it does not exist. Raises what opening raises.

        model: the name of the training. max_bytes: the most bytes of a file. durable: the number of
        machines that a committed version has to be on."""
        self._path: Final = place.path
        self._is_made: Final = not has_pool(self._path)
        if self._is_made:
            make_directory(os.path.dirname(self._path))
            create_pool(self._path, LocalFiles())
        self.pool: Final = WRITERS.open(self._path, max_bytes=max_bytes)

    @staticmethod
    def read(place: Place) -> PoolReader:
        """Return the pool at a place, for reading. Raises what opening raises."""
        return open_reader(place.path)

    def journal(self) -> str:
        """Return the directory of its journals. Raises ``PortusError``."""
        return journal_directory(self._path)

    def draft(self, snapshot: Snapshot) -> PoolDraft:
        """Return the draft for a save of ``snapshot``."""
        return PoolDraft(self.pool, snapshot.length)

    def note_failure(self, text: str) -> None:
        """Record which save failed; ``portus ls`` shows it. Raises nothing."""
        with contextlib.suppress(PortusError):
            note_failure(self.pool, text, self._path)

    def close(self) -> None:
        """Close the pool. Remove it again if it was created here and has no commit."""
        writer = self.pool

        def tidy() -> None:
            unused = False
            try:
                # A run that saved nothing leaves nothing, but removes only an unused pool that it
                # made itself.
                unused = self._is_made and writer.catalogue().root.is_first
                if unused and is_at(writer, self._path) and not writer.changed_by_others:
                    remove_journals(self._path)
                    remove_pool(self._path, LocalFiles())
                else:
                    writer.give_back()
            except PortusError as error:
                what = (
                    "the empty pool could not be removed"
                    if unused
                    else "its free space could not be returned"
                )
                _log.warning("%s: %s: %s", self._path, what, error)

        WRITERS.close(writer, last=tidy)


class HostHome:
    """A pool on a storage host; otherwise like ``FileHome``. The files of its runs on this machine
    are in ``.portus`` in the current directory."""

    def __init__(
        self, place: Place, model: str, max_bytes: int | None = None, durable: int = 1
    ) -> None:
        """Connect to the host. Raises if it cannot be reached at the start (V8)."""
        of_host = _of_host(place.path)
        name = fitting(quote(model), _NAME_MAX - len(of_host)) + of_host + SUFFIX
        self._local: Final = os.path.join(os.path.abspath(DEFAULT_DIRECTORY), name)
        self.pool: Final = HostPool(place.path, model, durable=durable)

    @staticmethod
    def read(place: Place) -> PoolReader:
        return HostPool(place.path)

    def journal(self) -> str:
        return journal_directory(self._local)

    def draft(self, snapshot: Snapshot) -> HostDraft:
        return self.pool.draft(snapshot)

    def note_failure(self, text: str) -> None:
        self.pool.note_failure(text)

    def close(self) -> None:
        self.pool.close()


Home = FileHome | HostHome

_NAME_MAX: Final = 200


def _of_host(address: str) -> str:
    """Return the end of the names of files on this machine for a host's models."""
    return "@" + fitting(urllib.parse.quote(address, safe="@"), _NAME_MAX * 3 // 4)


def host_journals(host: Place, directory: str | None) -> list[str]:
    """Return the journal directories in ``directory``, or in ``.portus``, of trainers of this
    machine that saved to the storage host."""
    inside = local_path(directory or DEFAULT_DIRECTORY, "links")
    end = os.path.basename(journal_directory(_of_host(str(host)) + SUFFIX))
    names = sorted(os.listdir(inside)) if os.path.isdir(inside) else []
    return [os.path.join(inside, name) for name in names if name.endswith(end)]


def open_home(place: Place, model: str, max_bytes: int | None, durable: int) -> Home:
    """Open the pool at a place for the saves of a training; see ``FileHome``."""
    home: Home = load_class(place.classes.home)(place, model, max_bytes, durable)
    return home


def open_place(pool: Place) -> PoolReader:
    """Open one pool for reading. Raises what opening raises."""
    home: type[Home] = load_class(pool.classes.home)
    return home.read(pool)
