"""Tables of a model, and the optimizer state of their rows, as tensors over the pool itself.

The tensors are the memory of the device: an update writes there, and a table needs no other memory.
They last as long as the pool is open; after that the model has tables without rows.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from portus.companions.embedding.moment import RowsThere, TensorLocation
from portus.companions.embedding.pool_tables import PlacedStore
from portus.companions.embedding.tables import Table
from portus.engine.copying.segments import memory
from portus.engine.format.checksum import DIGEST_SIZE
from portus.engine.format.dtypes import ITEM_SIZES
from portus.engine.media.base import Medium
from portus.engine.spec import Extent
from portus.errors import UsageError
from portus.reach.index.pool import PoolWriter
from portus.reach.media.dax import DaxDevice, DaxFile
from portus.reach.pools.restore import load_over

_log: Final = logging.getLogger("portus")


class MappedTables(PlacedStore):
    """The tables of one model in one pool. One thread at a time."""

    def __init__(self, pool: PoolWriter, log_bytes: int | None, tables: Sequence[Table]) -> None:
        """Open the pool, and move tables into it if it is new. Raise ``UsageError`` if it is not on
        persistent memory, and as ``PlacedStore``."""
        self._medium: Final = persistent(pool.medium)
        self._tables: Final = tables
        self._by_address: Final[dict[int, TensorLocation]] = {}
        """Places of tensors, by their addresses."""
        self._views: Final[list[tuple[weakref.ref[memoryview], Extent]]] = []
        """Memory of each tensor that was made; the tensor keeps it alive."""
        self.digests: list[torch.Tensor] = []
        """Additional tensors of the state: the digests of the units of each placed tensor."""
        super().__init__(pool, log_bytes)
        if self.newest is None:
            self.adopt()

    def adopt(self) -> bool:
        """Move each tensor of a table into the pool; return whether one was not there.

        A tensor is copied; one without bytes ("meta") is zero, or what its optimizer begins with.
        Raises ``MediumError``.
        """
        missing = [
            (table, key, self._copy(table, key, tensor))
            for table in self._tables
            for key, tensor in table.tensors_by_key().items()
            if tensor.data_ptr() not in self._by_address or tensor.is_meta
        ]
        for each in missing:  # only now that there was room for all of them
            self._put(*each)
        return bool(missing)

    def exchange(self, table: Table) -> None:
        """Move a table to another place in the pool, since other code is about to overwrite it, and
        its committed rows must stay. Raises ``MediumError``."""
        self._put(table, None, self._copy(table, None, table.weight.detach()))

    def load(self) -> Any:
        """Return the committed state, verified, with its tables in place. Raises as loading
        ``newest``."""
        newest = self.newest
        assert newest is not None
        self._by_address.clear()
        dtypes = {each.storage: each.dtype for each in self.tensors()}
        there: dict[int, torch.UntypedStorage] = {}
        for index, place in self.places.items():
            tensor = self._tensor(
                place,
                (place.extent.length // ITEM_SIZES[dtypes[index]],),
                getattr(torch, dtypes[index]),
            )
            there[index] = tensor.untyped_storage()
        return load_over(self.pool, newest, there)

    def take(self, model: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Point the tables of ``model`` to those of a loaded state, of the same shape and dtype;
        return the rest of the state."""
        weights = {id(table.weight): table for table in self._tables}
        rest = dict(saved)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            table = weights.get(id(parameter))
            if table is None or name not in rest:
                continue
            self._put(table, None, rest.pop(name))
        return rest

    def locate(self, index: Mapping[int, int]) -> tuple[dict[int, TensorLocation], dict[int, int]]:
        """Return the places of the storages that are in the pool, and the storages of their
        digests. Both are keyed by storage; ``index`` gives the storage at each address."""
        places: dict[int, TensorLocation] = {}
        digests: dict[int, int] = {}
        for tensor, digest in zip(self._table_tensors(), self.digests, strict=True):
            storage = index[tensor.data_ptr()]
            places[storage] = self._by_address[tensor.data_ptr()]
            digests[storage] = index[digest.data_ptr()]
        return places, digests

    def measure(self) -> None:
        """Make tensors for the digests of all placed tensors."""
        places = [self._by_address[tensor.data_ptr()] for tensor in self._table_tensors()]
        sizes = [place.units * DIGEST_SIZE for place in places]
        if [len(each) for each in self.digests] != sizes:
            self.digests = [torch.zeros(size, dtype=torch.uint8, device="cpu") for size in sizes]

    def rows(self, table: Table, number: torch.Tensor) -> list[RowsThere]:
        """Return rows of a table, and of their optimizer state, as far as they are in the pool."""
        numbers = np.unique(number.numpy())
        return [
            (self._by_address[tensor.data_ptr()], numbers)
            for tensor in table.tensors()
            if tensor.data_ptr() in self._by_address
        ]

    def let_go(self) -> None:
        """Take the rows from the model and its optimizers: the pool and its medium are about to be
        closed.

        Any other view of a table becomes a copy. Raises ``MediumError`` if there is no memory for
        that.
        """
        for table in self._tables:
            for key, shape, dtype in [
                (key, each.shape, each.dtype)
                for key, each in table.tensors_by_key().items()
                if each.data_ptr() in self._by_address
            ]:  # names of tensors would be views
                self._put(table, key, torch.empty((0, *shape[1:]), dtype=dtype, device="cpu"))
        self._by_address.clear()
        kept = {extent.offset: extent for view, extent in self._views if view() is not None}
        self._views.clear()
        if kept:
            _log.warning(
                "portus: %s: closed while there were views of tables in it: what they show is a "
                "copy in memory from now on, of %d bytes, that is not protected",
                self._medium.info.name,
                sum(each.length for each in kept.values()),
            )
            # At the same addresses: otherwise a read of a view would end the process
            # (decision 0178).
            self._medium.close_but(list(kept.values()))

    def _table_tensors(self) -> list[torch.Tensor]:
        return [tensor for table in self._tables for tensor in table.tensors()]

    def _copy(self, table: Table, key: str | None, tensor: torch.Tensor) -> torch.Tensor:
        place = self.place(tensor.nbytes, tensor.nbytes // tensor.shape[0])
        made = self._tensor(place, tensor.shape, tensor.dtype)
        if tensor.is_meta:
            made.fill_(_first(table) if key is not None else 0)
        else:
            made.copy_(tensor)
        return made

    def _tensor(
        self, place: TensorLocation, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        address = self._medium.address(place.extent)
        self._by_address[address] = place
        view = memory(address, place.extent.length)
        self._views.append((weakref.ref(view), place.extent))
        return torch.frombuffer(view, dtype=dtype).reshape(shape)

    def _put(self, table: Table, key: str | None, tensor: torch.Tensor) -> None:
        if key is not None:
            assert table.optimizer is not None
            table.optimizer.state[table.weight][key] = tensor
        elif table.weight.is_meta:
            fresh = torch.nn.Parameter(tensor, requires_grad=table.weight.requires_grad)
            # A parameter on meta cannot get data of another device; optimizers hold the object
            # itself.
            torch.utils.swap_tensors(table.weight, fresh)
        else:
            table.weight.data = tensor


def persistent(medium: Medium) -> DaxDevice | DaxFile:
    """Return the same medium. Raise ``UsageError`` if it is not persistent memory."""
    if isinstance(medium, DaxDevice | DaxFile):
        return medium
    raise UsageError(
        f"{medium.info.name}: expected a DAX device, or a file on a file system with DAX, for "
        f"tables that are changed in place, found {medium.info.kind.name}; omit in_place, "
        "or take another pool"
    )


def _first(table: Table) -> float:
    """Return the initial value of an optimizer's state of a row."""
    assert table.optimizer is not None
    groups = table.optimizer.param_groups
    [group] = [g for g in groups if any(each is table.weight for each in g["params"])]
    return float(group.get("initial_accumulator_value", 0))
