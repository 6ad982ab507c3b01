"""A version as it leaves Portus: with the tables that it has in another pool (``Elsewhere``)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from portus.client.loading import elsewhere, restore
from portus.client.loading.contents import Storages
from portus.client.loading.restore import Outline
from portus.client.state.elsewhere import Elsewhere, places_in, replaced
from portus.errors import (
    BusyError,
    CorruptionError,
    MediumError,
    PortusError,
    StaleError,
    UsageError,
)
from portus.format.layout import RecordKind
from portus.index.log import logged
from portus.index.reader import PoolReader
from portus.index.records import VersionEntry, decode_layout
from portus.spec import TensorSpec

PoolPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class OutlinedStorage:
    """A storage of a version that is outlined, by its index there."""

    storages: Storages
    outline: Outline
    index: int

    @property
    def length(self) -> int:
        """Bytes."""
        return self.storages.length(self.index)

    @property
    def name(self) -> str:
        """What errors call it."""
        return self.outline.name(self.index)


@dataclass(frozen=True, slots=True)
class WholeOutline:
    """A state whose tensors have memory that holds nothing. ``storages``: where their bytes are, by
    the address (``_cdata``) of the storage of a tensor."""

    state: object
    storages: Mapping[int, OutlinedStorage]


@contextlib.contextmanager
def outlined(
    pool: PoolReader,
    entry: VersionEntry,
    part: str | None = None,
    keep: Callable[[str], bool] | None = None,
    *,
    tables_pool: PoolPath | None = None,
) -> Iterator[WholeOutline]:
    """Yield a version as ``restore.outlined`` does, with the tables that are in another pool filled
    in. Their version is pinned inside, too.

    tables_pool: where that pool is now; None: where it was when the state was saved. Raises as
    ``restore.outlined``; and ``UsageError``, ``MediumError`` or ``CorruptionError`` that name the
    key path and the pool if a table is not there.
    """
    with contextlib.ExitStack() as stack:
        outline = stack.enter_context(restore.outlined(pool, entry, part, keep))
        marks = _Marks(stack, tables_pool)
        state = replaced(outline.state, marks.tensor, part or "")
        yield WholeOutline(state, _storages(pool, outline) | marks.storages())


def filled(state: object, path: str, tables_pool: PoolPath | None = None) -> object:
    """A state that was loaded, with its tables. path: where it is, for errors. Raises as
    ``outlined``."""

    def of(place: Elsewhere, where: str) -> torch.Tensor:
        with said_of(place, where), elsewhere.opened(place, tables_pool) as reader:
            return elsewhere.loaded(reader, place)

    return replaced(state, of, path)


@dataclass(frozen=True, slots=True)
class LocatedTable:
    """A table, in a version of its own pool that is pinned, and how it lies there."""

    pool: PoolReader
    entry: VersionEntry
    spec: TensorSpec


def located(
    pool: PoolReader,
    entry: VersionEntry,
    keep: Callable[[str], bool],
    stack: contextlib.ExitStack,
    tables_pool: PoolPath | None = None,
) -> dict[str, LocatedTable]:
    """Return the tables that a version has in another pool, by the key paths that ``keep`` accepts.
    stack: releases them. Raises as ``outlined``."""
    with pool.pinned(entry.info.id) as current:
        record = pool.record(current)
        changed = logged(pool.medium, record)
        tree = changed.tree or bytes(pool.payload(record.tree, RecordKind.TREE))
    marks = _Marks(stack, tables_pool)
    wanted = {path: place for path, place in places_in(tree).items() if keep(path)}
    return {path: marks.located(place, path) for path, place in wanted.items()}


class _Marks:
    """The versions that the tables of a state are in, each opened and pinned once."""

    def __init__(self, stack: contextlib.ExitStack, tables_pool: PoolPath | None) -> None:
        """stack: lets go of them."""
        self._stack: Final = stack
        self._tables_pool: Final = tables_pool
        self._pools: Final[dict[str, PoolReader]] = {}
        self._pinned: Final[dict[tuple[str, str], tuple[PoolReader, VersionEntry]]] = {}
        self._outlines: Final[dict[tuple[str, str], Outline]] = {}

    def tensor(self, place: Elsewhere, path: str) -> torch.Tensor:
        """What is there, outlined. path: that of the state. Raises as ``outlined``."""
        with said_of(place, path):
            key = place.pool, place.token
            if key not in self._outlines:
                outline = restore.outlined(*self._version(place))
                self._outlines[key] = self._stack.enter_context(outline)
            return elsewhere.within(self._outlines[key].state, place)

    def located(self, place: Elsewhere, path: str) -> LocatedTable:
        """Where it is. path: that of the state. Raises as ``outlined``."""
        with said_of(place, path):
            pool, entry = self._version(place)
            layout = decode_layout(pool.payload(pool.record(entry).layout, RecordKind.LAYOUT))
            name = elsewhere.name_of(place)
            for spec in layout:
                if spec.name == name and spec.storage >= 0:
                    return LocatedTable(pool, entry, spec)
            raise CorruptionError(f"no tensor is called {name} there")

    def storages(self) -> dict[int, OutlinedStorage]:
        """Return the storages of all that was outlined, by address."""
        return {
            address: storage
            for key, outline in self._outlines.items()
            for address, storage in _storages(self._pinned[key][0], outline).items()
        }

    def _version(self, place: Elsewhere) -> tuple[PoolReader, VersionEntry]:
        key = place.pool, place.token
        if key not in self._pinned:
            pool = self._pools.get(place.pool)
            if pool is None:
                pool = self._stack.enter_context(elsewhere.opened(place, self._tables_pool))
                self._pools[place.pool] = pool
            version = elsewhere.version_of(pool, place).info.id
            self._pinned[key] = pool, self._stack.enter_context(pool.pinned(version))
        return self._pinned[key]


@contextlib.contextmanager
def said_of(place: Elsewhere, path: str) -> Iterator[None]:
    """What goes wrong inside names the key path of the table, and says what to do."""
    what = f"{path}: a protected table, of batch {place.batch}, in the pool {place.pool}"
    advice = (
        "if the pool is somewhere else now, pass tables_pool= (--tables-pool on the command line); "
        "if the tables are gone, load the rest with names="
    )
    try:
        yield
    except BusyError:
        raise
    except MediumError as error:
        raise MediumError(error.errno, f"{what}: {_text(error)}; {advice}") from error
    except CorruptionError as error:
        raise CorruptionError(f"{what}: {error}") from error
    except (StaleError, UsageError) as error:
        raise UsageError(f"{what}: {error}; {advice}") from error


def _text(error: PortusError) -> str:
    return str(getattr(error, "strerror", None) or error)


def _storages(pool: PoolReader, outline: Outline) -> dict[int, OutlinedStorage]:
    read = Storages(pool, outline.record, outline.logged)
    return {
        address: OutlinedStorage(read, outline, index) for address, index in outline.indices.items()
    }
