"""A run and its mirror: what a run adds to the copier of a mirror.

Its reference files go along, by their paths, and an operator's pins; they are put back for a fresh
node. A mirror is not taken from another run of the same name that is on this machine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final

from portus.client.files.keeper import Keeper
from portus.client.files.notes import places
from portus.errors import PortusError, UsageError
from portus.index.directory import open_reader
from portus.index.keep import Keep
from portus.index.pool import PoolWriter
from portus.index.reader import PoolReader
from portus.mirror.address import StoreAddress, StoreKind
from portus.mirror.copier import Copier, Joined
from portus.mirror.objects import Added, Referred, State
from portus.mirror.opening import check_writable, open_store
from portus.spec import VersionInfo


class Mirroring(Copier):
    """The mirror of one model, for the run that saves the model. Thread-safe but for ``join``."""

    _instead = "name another mirror, or say mirror='none'"

    def __init__(
        self,
        address: StoreAddress,
        model: str,
        keep: Keep | None,
        *,
        wait_s: float,
    ) -> None:
        """Asks nobody. wait_s: the longest that ``close`` waits. Raises ``UsageError``."""
        self.place: Final = address
        store = open_store(address)
        super().__init__(store, str(address), model, keep, wait_s=wait_s)

    def has_versions(self) -> bool:
        """Return True if the mirror has versions, for a run that has no pool. Raises as that of
        ``Copier``, and as ``check_writable``."""
        check_writable(self.place)
        return super().has_versions()

    def promise(self) -> bytes | None:
        """The identity of the pool that is to be made, for which this is claimed now: before a run
        that has none, so that it learns at once whether its mirror may be written. None for a
        directory, of which that is known. Raises as ``claim_for``."""
        check_writable(self.place)
        if self.place.kind is StoreKind.FOLDER:
            return None
        pool = os.urandom(16)
        self.claim_for(pool)
        return pool

    def join(
        self, writer: PoolWriter, keeper: Keeper, older: Callable[[], Collection[PoolReader]]
    ) -> None:
        """The run saves to this pool from now on: see ``begin``. older: the pools that it is a
        successor of."""
        self.begin(_OfRun(self.address, self._model, writer, keeper, older))
        writer.yields = self.yield_space

    def _begin(self, joined: Joined) -> None:
        check_writable(self.place)
        super()._begin(joined)

    def close(self) -> None:
        joined = self._joined
        super().close()
        if joined is not None:
            joined.writer.yields = _nothing


class _OfRun(Joined):
    """The pool of a run, and its reference files."""

    def __init__(
        self,
        address: str,
        model: str,
        writer: PoolWriter,
        keeper: Keeper,
        older: Callable[[], Collection[PoolReader]],
    ) -> None:
        super().__init__(model, writer, older)
        self._address: Final = address
        self._keeper: Final = keeper

    def references(self) -> Mapping[str, Referred]:
        files, pins = self._keeper.placed(self._model), self._keeper.pinned(self._model)
        return {
            path: Referred(path, bytes.fromhex(each.token), each.part)
            for path, each in (*files.items(), *pins.items())
        }

    def read(self) -> tuple[list[VersionInfo], Mapping[str, Referred]]:
        return self._keeper.read_settled(super().read)

    def put_back(self, said: Referred, info: VersionInfo) -> None:
        self._keeper.put_back(said.path, info, said.part)

    def require_alone(self, state: State, newest: Added) -> None:
        """Raise ``UsageError`` if a pool that went on with the mirror is on this machine: then it
        is another run of the same name, and each would take the mirror from the other."""
        for term in state.terms:
            if term.number < newest.term or self.has_pool(term.pool):
                continue
            for path in filter(partial(_is_pool, term.pool), places(term.pool)):
                raise UsageError(
                    f"{self.name}: {self._address} has versions of model {self._model!r}, "
                    f"saved by {path}, which is on this machine too: two runs of one name. "
                    "Give this run another name or mirror, or mirror='none'; to resume from "
                    f"the mirror, move {path} away"
                )


def _is_pool(uuid: bytes, path: str) -> bool:
    """True if the pool of that identity is at ``path``."""
    try:
        with contextlib.closing(open_reader(path)) as reader:
            return reader.superblock.uuid == uuid
    except PortusError:
        return False


def _nothing() -> bool:
    return False
