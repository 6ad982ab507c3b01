"""The rows that the next batch of a loader will look up, found one batch ahead.

TrainingCXL reads them from the sparse features of a batch, and copies these rows while the batch
before is computed. The lookups of other ranks are only in the reduced gradient, so an update still
asks the gradient for rows that were not announced. Only an undo log gains by announcements: an
entry of a redo log has new rows, which do not exist before the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from portus.companions.embedding.tables import Table, check_ids
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
