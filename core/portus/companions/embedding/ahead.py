"""Looking one batch ahead in a loader: which rows the batch that comes next will look up.

TrainingCXL reads them off the sparse features of a batch, and copies these rows while the batch
before is computed. What other ranks look up is only in the reduced gradient, so an update still
asks that for rows which nobody announced. Only an undo log gains by announcements: an entry of a
redo log has new rows, which do not exist before the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from portus.companions.embedding.tables import Table, check_ids
from portus.errors import UsageError

Batch = TypeVar("Batch")

IdsOf = Callable[[Any], Mapping[str, torch.Tensor]]
"""Of a batch as the loader gives it: the ids that it looks up, of any shape, by the name of the
table in the model. Tables may be left out."""


def look_ahead(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the same batches, each after the one that follows it was taken. What taking a batch
    raises comes when it is its turn."""
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
    """The rows of each table, by its place among ``tables``, that ``ids`` name: each once, in
    order. Raises ``UsageError`` for a name that no table has, and for ids out of range."""
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
