"""The mirror of a storage host: ``portus serve POOL --mirror URL``.

The host copies what is committed to the pool of a tenant below ``URL/TENANT``, each model by a
copier of its own (``reach.mirror.copier``). The mirror holds what the pool holds, since clients
decide what stays, and the newest of what the pool dropped, as many as the operator says.

A new pool gets all that its mirror has when it is opened, before any client is let in: a version
that the pool lacks would be removed from the mirror too. If the history of a model continued
elsewhere, the host reports that model and saves the others.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import replace
from typing import Final

from portus.errors import MediumError, TransportError, UsageError
from portus.reach.daemon.copies import Copies
from portus.reach.daemon.events import tell
from portus.reach.index.pool import PoolWriter
from portus.reach.mirror.address import StoreAddress
from portus.reach.mirror.copier import Copier
from portus.reach.mirror.mirror import firsts, models
from portus.reach.mirror.opening import key_from_environment, open_store
from portus.reach.mirror.store import Store, UnwritableError
from portus.reach.protocol.address import is_tenant

_ABREAST: Final = 4
"""Models that are copied at the same time."""


class TenantMirrors:
    """The mirrors of all pools of a host. Thread-safe."""

    def __init__(self, address: StoreAddress, keep: int = 0) -> None:
        """Ask no store yet. keep: the versions of each model that stay after the pool dropped
        them."""
        self.address: Final = address
        self._keep: Final = keep
        self._turns: Final = threading.BoundedSemaphore(_ABREAST)

    def tenants(self) -> list[str]:
        """Return the tenants that have objects in the store. Raise what the store raises."""
        with contextlib.closing(open_store(self.address)) as store:
            names = [each.name.partition("/") for each in firsts(store)]
        return [name for name, slash, _ in names if slash and is_tenant(name)]

    def attach(self, tenant: str, writer: PoolWriter) -> TenantMirror:
        """Fill a pool that was just opened, and mirror it from now on. Blocks while versions are
        fetched. Raises ``UsageError`` for wrong credentials and the like, and if there are models
        and the mirror cannot be written; ``TransportError`` if the store cannot be asked and the
        pool is empty."""
        place = self.address
        above = f"{place.prefix.rstrip('/')}/" if place.prefix else ""
        below = replace(place, prefix=above + tenant)
        mirror = TenantMirror(below, tenant, writer, self._turns, self._keep)
        try:
            mirror.join()
        except BaseException:
            mirror.close(0)
            raise
        return mirror


class TenantMirror(Copies[Copier]):
    """The mirror of one tenant's pool. Thread-safe."""

    def __init__(
        self,
        address: StoreAddress,
        tenant: str,
        writer: PoolWriter,
        turns: threading.Semaphore,
        keep: int,
    ) -> None:
        """turns: a copier takes one while it copies a model. keep: as of ``TenantMirrors``."""
        super().__init__(tenant, writer)
        self.name: Final = str(address)
        self._turns: Final = turns
        self._keep: Final = keep
        self._store: Final[Store] = open_store(address)
        self._key: Final = key_from_environment()
        self._refused: Final[dict[str, str]] = {}

    def join(self) -> None:
        """Fill the pool and start the copiers, see ``TenantMirrors.attach``."""
        own = set(self._writer.catalogue().models)
        try:
            there = models(self._store, key=self._key)
        except (TransportError, MediumError) as error:
            if not own:
                # An empty pool would restart models that the mirror may have; a pool with models
                # can be mirrored later.
                raise
            text = f"{self._tenant}: {self.name} cannot be reached; retrying: "
            tell(logging.WARNING, "log", f"{text}{error}")
            for model in own:
                self.claim(model)
            return
        for model in sorted({*own, *there}):
            copier = self._make_copier(model, there.get(model, 0))
            try:
                copier.begin()
            except UnwritableError:
                raise  # true of all models
            except UsageError as error:
                self._refused[model] = str(error)
                tell(logging.ERROR, "log", f"{self._tenant}: {error}")
            else:
                self._copiers[model] = copier

    def claim(self, model: str) -> None:
        """Mirror a model that a client is about to save: now if it has versions, else from its
        first commit on. Raise ``UsageError`` if the model continued elsewhere."""
        why = self._refused.get(model)
        if why is not None:
            raise UsageError(why)
        has_versions = model in self._writer.catalogue().models
        with self._guard:
            if model not in self._copiers:
                self._copiers[model] = self._make_copier(model)
                # Else the first commit does: a client may claim any number of names.
                if has_versions:
                    self._copiers[model].wake()

    @property
    def failure(self) -> str:
        """The reason why the mirror is behind; empty if nothing is wrong."""
        return next(iter(self._refused.values()), super().failure)

    def close(self, wait_s: float) -> None:
        """Wait for missing versions, ``wait_s`` seconds at most, and end."""
        copiers = self._finish(wait_s)
        for copier in copiers:
            copier.end()
        self._store.close()
        for copier in copiers:
            copier.wait_for_end()
        self._writer.yields.remove(self._yield_space)

    def _make_copier(self, model: str, newest: int | None = None) -> Copier:
        return Copier(self._store, self.name, model, self._writer, self._turns, newest, self._keep)
