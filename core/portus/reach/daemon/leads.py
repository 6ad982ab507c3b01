"""The leads of one tenant's models: whose commits count, of two hosts that keep a model.

The second host has them, beside its pool (``<pool>.leads``), or in memory if the pool is there.
"""

from __future__ import annotations

import threading
from typing import Final

import msgspec

from portus.errors import CorruptionError, UsageError
from portus.reach.index.pool import PoolWriter
from portus.reach.mirror.folder import Folder
from portus.reach.mirror.store import MissingError

_SUFFIX: Final = ".leads"
"""The suffix, after the path of a pool, of the directory of its leads."""

_NAME: Final = "leads"


class Lead(msgspec.Struct, frozen=True):
    """A lead of a model, by a pool of this host or of a first one, in a ``term``. ``commit``:
    there, of the newest version that was copied from it. ``who``: its process, for messages."""

    term: int
    pool: bytes
    commit: int
    who: str


NOBODY: Final = Lead(0, bytes(16), 0, "")
"""The lead of a model that this host alone has."""

_leads: Final = msgspec.json.Decoder(dict[str, Lead])


class Leads:
    """See the module. Changes are durable when they return. Thread-safe."""

    def __init__(self, writer: PoolWriter, path: str | None) -> None:
        """path: of the pool; None: in memory."""
        self._writer: Final = writer
        self._path: Final = path
        self._folder: Final = None if path is None else Folder(path + _SUFFIX)
        self._guard: Final = threading.Lock()
        self._of: Final = self._read()

    def of(self, model: str) -> Lead:
        """Return who leads a model; ``NOBODY`` if no other host has asked to lead it."""
        return self._of.get(model, NOBODY)

    def check(self) -> None:
        """Raise ``UsageError`` for a pool that fills a device."""
        if self._path is not None and self._writer.medium.info.kind.is_device:
            raise UsageError(
                f"{self._path}: a pool on a device has no room beside it for who leads a model; "
                "serve a directory, a pool file, or memory:SIZE"
            )

    def take(self, model: str, pool: bytes, commit: int, who: str) -> Lead:
        """Begin the next term of a model, and return its lead."""
        self.check()
        with self._guard:
            return self._put(model, Lead(self.of(model).term + 1, pool, commit, who))

    def reach(self, model: str, commit: int) -> None:
        """Note the commit, in the leader's pool, of a version that was copied."""
        with self._guard:
            lead = self.of(model)
            if commit > lead.commit:
                self._put(model, msgspec.structs.replace(lead, commit=commit))

    def _put(self, model: str, lead: Lead) -> Lead:
        if self._folder is not None:
            self._folder.put(_NAME, msgspec.json.encode({**self._of, model: lead}))
        self._of[model] = lead
        return lead

    def _read(self) -> dict[str, Lead]:
        try:
            return {} if self._folder is None else _leads.decode(self._folder.get(_NAME))
        except MissingError:
            return {}
        except msgspec.MsgspecError as error:
            raise CorruptionError(
                f"{self._path}{_SUFFIX}/{_NAME}: it is damaged: {error}. Without it nobody knows "
                "which of two hosts has the newest versions: look at both before you remove it"
            ) from error
