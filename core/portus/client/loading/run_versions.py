"""The committed versions of a run that may be saving meanwhile: listed, and loaded (V11)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from portus.client.fence.fence import before_write
from portus.client.files.opened import RunPool
from portus.client.files.surplus import versions_of
from portus.client.loading import restore, view
from portus.client.loading.over import Rename
from portus.client.loading.patterns import Patterns
from portus.client.loading.resolve import POOLS
from portus.client.loading.restored import Restored
from portus.errors import StaleError, UsageError
from portus.index.place import Place
from portus.index.reader import PoolReader
from portus.index.records import VersionEntry
from portus.media import calls
from portus.mirror.address import StoreAddress
from portus.pipeline.queue import Queue
from portus.spec import VersionInfo

Result = TypeVar("Result")


class RunVersions:
    """The versions of one run: in its pool, those that this is a successor of, and its mirror.
    Threads may share it. Methods raise ``UsageError`` once the pool is closed.

    Loads of reference files in this process find the pool by it, see ``OpenPool``.
    """

    def __init__(self, pool: RunPool, queue: Queue, *, verify: bool) -> None:
        """queue: that of the saves. verify: False compares no checksums."""
        self._pool: Final = pool
        self._queue: Final = queue
        self._verify: Final = verify
        self._owner: object = None

    def opened(self, owner: object) -> None:
        """Have loads in this process find the pool that is open now; until ``closed``, which
        ``owner`` calls, and so is held."""
        self._owner = owner
        POOLS.closed(self)
        POOLS.opened(self)

    def closed(self) -> None:
        """The pool is to be found no more."""
        POOLS.closed(self)
        self._owner = None

    @property
    def uuid(self) -> bytes:
        """The pool's identity, 16 bytes; empty where there is no pool yet."""
        return self._pool.writer.superblock.uuid if self._pool.writer else b""

    @contextlib.contextmanager
    def _pools_nested(self) -> Iterator[list[PoolReader]]:
        """All pool files of this run, opened anew, so that no lock held elsewhere is needed."""
        self._pool.check_usable()
        home = self._pool.home
        paths = [] if self._pool.writer is None else [*home.older().values(), home.path]
        with contextlib.ExitStack() as stack:
            opened = (view.PoolFile(Place.named(path)) for path in paths)
            files = [stack.enter_context(contextlib.closing(file)) for file in opened]
            yield [file.reader for file in files]

    def _load_nested(self, step: int | None, names: Patterns) -> object:
        with self._pools_nested() as pools:
            return view.load_from(pools, self._pool.model, step, names, verify=self._verify)

    @calls.entry_or(_load_nested)
    def load(self, step: int | None, names: Patterns) -> object:
        """See ``Checkpointer.load``."""
        self._await_saves_to_read()
        with self._pool.looked_at() as pools:
            return view.again(
                lambda: view.load_from(
                    pools, self._pool.model, step, names,
                    verify=self._verify, mirrors=self._mirrors(),
                )
            )  # fmt: skip

    def restore_into(
        self, state: object, step: int | None, *, strict: bool, names: Patterns, rename: Rename
    ) -> Restored:
        """See ``Checkpointer.restore_into``."""
        before_write()  # other Checkpointers of this process may be saving these tensors
        self._await_saves_to_read()
        with self._pool.looked_at() as pools:
            return view.again(
                lambda: view.restore_from(
                    pools, state, self._pool.model, step, strict=strict, names=names, rename=rename,
                    verify=self._verify, mirrors=self._mirrors(),
                )
            )  # fmt: skip

    def load_version(self, token: bytes, part: str | None = None) -> object:
        """See ``Checkpointer.load_version``."""
        return self.use_version(
            token, lambda pool, entry: restore.load_part(pool, entry, part, verify=self._verify)
        )

    @calls.marked
    def use_version(
        self, token: bytes, use: Callable[[PoolReader, VersionEntry], Result]
    ) -> Result:
        """The result of ``use`` for a version. If the version is not there, this waits for the
        saves in flight and looks again. Raises ``StaleError``."""
        self._pool.check_usable()
        with contextlib.suppress(StaleError):
            return self._use_version(token, use)
        self._await_saves_to_read()
        return self._use_version(token, use)

    def _use_version(
        self, token: bytes, use: Callable[[PoolReader, VersionEntry], Result]
    ) -> Result:
        with self._pool.looked_at() as pools:
            for pool in reversed(pools):
                with contextlib.suppress(StaleError):
                    return use(pool, view.of_token(pool.catalogue(), token))
        path = self._pool.home.path
        raise StaleError(f"version {token.hex()} is not in {path} (any more)")

    def _infos_nested(self) -> list[VersionInfo]:
        with self._pools_nested() as pools:
            return self._infos_in(pools)

    @calls.entry_or(_infos_nested)
    def infos(self) -> list[VersionInfo]:
        """What is committed now, oldest commit first. Raises what opening raises, if another
        process made the pool meanwhile."""
        self._pool.check_usable()
        self._pool.open_if_made()
        with self._pool.looked_at() as pools:
            return self._infos_in(pools)

    def _infos_in(self, pools: Sequence[PoolReader]) -> list[VersionInfo]:
        return versions_of(self._pool.model, [pool.catalogue() for pool in pools])

    @calls.marked
    def await_saves(self, path: str | None, token: bytes) -> bool:
        """Wait for the saves in flight, before this process loads from the pool (V11). True if
        there were any. A failed save raises nothing here."""
        if self._queue.idle() or self._queue.on_worker():
            return False
        self._queue.catch_up()
        return True

    def _await_saves_to_read(self) -> None:
        self._pool.check_usable()
        self._pool.open_if_made()
        if self._pool.writer is None:
            raise UsageError(f"{self._pool.home.path}: there is no pool yet; nothing was saved")
        if not self._queue.on_worker():
            self._queue.catch_up()

    def _mirrors(self) -> list[StoreAddress]:
        return [] if self._pool.mirroring is None else [self._pool.mirroring.place]
