"""Lookups of the batches to come: their rows, found one batch ahead, and their sums, made early.

TrainingCXL reads the rows of the next batch from its sparse features, and copies them while the
batch before is computed. The lookups of other ranks are only in the reduced gradient, so an update
still asks the gradient for rows that were not announced. Only an undo log gains by announcements:
an entry of a redo log has new rows, which do not exist before the update.

A bag that sums is linear: the lookup in a table W + dW is bag(W) + bag(dW). So a batch is looked up
while the one before it is computed. After the update, only the rows that both have in common are
looked up, in dW. TrainingCXL overlaps two devices that way ("relaxed embedding lookup"). The sums
are the same in another order, so the bits may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch

from portus.companions.embedding.tables import Known, Table, check_ids, fingerprint
from portus.errors import UsageError

Batch = TypeVar("Batch")

IdsOf = Callable[[Any], Mapping[str, torch.Tensor]]
"""A function that returns the ids that a batch of the loader looks up, of any shape, by the name of
the table in the model. Tables may be left out."""


def look_ahead(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the same batches, each after the following one was taken. An error of taking a batch is
    raised when that batch is due."""
    upcoming, before = iter(batches), list[Batch]()
    while True:
        try:
            batch = next(upcoming)
        # Kept until its turn: the batch before is trained first, as without looking ahead.
        except BaseException as error:
            yield from before
            if isinstance(error, StopIteration):
                return
            raise
        yield from before
        before = [batch]


def rows_ahead(tables: Sequence[Table], ids: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the rows that ``ids`` names, distinct and in order, by the index of the table in
    ``tables``. Raise ``UsageError`` for a name that no table has, and for ids out of range."""
    place = {table.name: index for index, table in enumerate(tables)}
    found = {}
    for name, each in ids.items():
        if name not in place:
            raise UsageError(
                f"ids_of: expected names of tables, such as {', '.join(sorted(place))[:200]}, "
                f"found {name!r}"
            )
        check_ids(name, tables[place[name]].shape[0], each)
        found[place[name]] = torch.unique(each)
    return found


_KEPT: Final = 2
"""Lookups to keep for each table: of the next batch, and of the one after it."""


@dataclass(slots=True)
class _Lookup:
    """A lookup that was made early. ``ids``: a row for each bag. ``found``: its sums, in the table
    as it was then. ``known``: the state of the table now. ``changes``: rows that updates changed
    since, distinct and in order, and their differences."""

    ids: torch.Tensor
    found: Future[torch.Tensor]
    known: Known
    changes: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def sums(self) -> torch.Tensor:
        sums = self.found.result().clone()
        for rows, change in self.changes:
            if len(rows):
                place = torch.searchsorted(rows, self.ids).clamp(max=len(rows) - 1)
                bag, position = (rows[place] == self.ids).nonzero(as_tuple=True)
                sums.index_add_(0, bag, change[place[bag, position]])
        return sums


class EarlyLookups:
    """The lookups of the tables of one model, until ``close``. For the training thread alone."""

    def __init__(self, model: torch.nn.Module, tables: Sequence[Table]) -> None:
        """Raise ``UsageError`` as ``check_early``."""
        modules = check_early(model, tables)
        self.bags: Final = [_Bag(*each) for each in zip(tables, modules, strict=True)]
        self._pool: Final = ThreadPoolExecutor(1, "portus-early")
        for bag in self.bags:
            bag.module.forward = bag.forward  # type: ignore[method-assign]

    def look_up(self, ids: Mapping[str, torch.Tensor]) -> None:
        """Start to look up the batch after the next one: its ids, by the name of the table."""
        for bag in self.bags:
            bag.look_up(ids.get(bag.table.name), self._pool)

    def after_update(self) -> None:
        """Note the end of all updates that had begun."""
        for bag in self.bags:
            bag.after_update()

    def close(self) -> None:
        """Restore the modules' own lookups."""
        self._pool.shutdown()
        for bag in self.bags:
            del bag.module.forward
            bag.lookups.clear()


class _Bag:
    def __init__(self, table: Table, module: torch.nn.EmbeddingBag) -> None:
        self.table: Final = table
        self.module: Final = module
        self.lookups: Final[list[_Lookup]] = []
        self._before: tuple[torch.Tensor, torch.Tensor] | None = None
        """Rows that an update is changing, and their bytes before it."""

    def look_up(self, ids: torch.Tensor | None, pool: ThreadPoolExecutor) -> None:
        if ids is not None and ids.dim() == 2 and not self.table.weight.is_meta:
            ids, weight = ids.clone(), self.table.weight.detach()
            known = fingerprint(self.table.weight)
            self.lookups.append(_Lookup(ids, pool.submit(_sums, ids, weight), known))
        del self.lookups[:-_KEPT]

    def before_update(self, rows: torch.Tensor) -> None:
        """Note that an update is about to change these rows of the table."""
        weight = self.table.weight
        for each in self.lookups:
            each.found.result()  # it reads what the update changes
        self.lookups[:] = [each for each in self.lookups if each.known == fingerprint(weight)]
        if self.lookups:
            self._before = rows, weight.detach().index_select(0, rows)

    def after_update(self) -> None:
        if self._before is None:
            return
        (rows, old), weight = self._before, self.table.weight
        self._before = None
        change = weight.detach().index_select(0, rows) - old
        for each in self.lookups:
            each.changes.append((rows, change))
            each.known = fingerprint(weight)

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002, as torch calls it
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Look up as the module's own ``forward``, which this replaces. Use an early lookup of
        these ids, if there is one."""
        if offsets is None and per_sample_weights is None:
            known = fingerprint(self.table.weight)
            for each in self.lookups:
                # Only if nothing else wrote to the table since, and for these very ids.
                if each.known == known and torch.equal(each.ids, input):
                    given: Any = _KnownSums.apply
                    found: torch.Tensor = given(self.table.weight, input, each.sums())
                    return found
        kind = type(self.module)
        return kind.forward(self.module, input, offsets, per_sample_weights)


class _KnownSums(torch.autograd.Function):
    """A function whose result is known, with the gradient of a lookup."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, ids: torch.Tensor, sums: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return sums

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        [ids] = ctx.saved_tensors
        rows = gradient.repeat_interleave(ids.shape[1], 0)
        return torch.sparse_coo_tensor(ids.reshape(1, -1), rows, ctx.shape), None, None


def _sums(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.nn.functional.embedding_bag(ids, weight, mode="sum")


def check_early(model: torch.nn.Module, tables: Sequence[Table]) -> list[torch.nn.EmbeddingBag]:
    """Return the module of each table. Raise ``UsageError``, with the reason, for a table that
    cannot be looked up early."""
    found = []
    for table in tables:
        modules = [m for m in model.modules() if getattr(m, "weight", None) is table.weight]
        if len(modules) != 1:
            raise UsageError(
                f"{table.name}: early_lookup takes a table that one module looks up, found "
                f"{len(modules)} modules"
            )
        [module] = modules
        mode = getattr(module, "mode", None)
        if not isinstance(module, torch.nn.EmbeddingBag) or mode != "sum":
            raise UsageError(
                f"{table.name}: early_lookup adds what an update changed to a sum that was made "
                "before it, so it takes an EmbeddingBag with mode='sum', found "
                f"{type(module).__name__}{'' if mode is None else f' with mode={mode!r}'}"
            )
        if module.padding_idx is not None:
            raise UsageError(f"{table.name}: early_lookup takes no padding_idx; omit it")
        found.append(module)
    return found
