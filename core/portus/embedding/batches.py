"""The story of a batch, from the first update to the thread that makes it durable.

Theory. A batch is over when each of the optimizers has stepped, or at the end of ``batch``. If
there are schedulers, which step after that, it is over when the next lookup, update or call begins.
Then its moment is taken: the rows that changed, and the dense part, are copied; all else is for a
thread, which makes it durable while the next batch is computed. Before the next update, after its
gradients are there, the optimizer waits for that: so what is durable is never more than one batch
behind what is in memory, and never between two.

What an update changes is read off its gradients, just before it: what other ranks looked up is in
them. Whatever else wrote to a table is seen by torch's counters, and costs a whole image of it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch.optim import Optimizer

from portus.embedding.ahead import rows_ahead
from portus.embedding.capture import Moments
from portus.embedding.committer import Committer
from portus.embedding.early import EarlyLookups
from portus.embedding.mapped import Mapped
from portus.embedding.marks import Marks
from portus.embedding.placed import RowsThere
from portus.embedding.schedulers import have_schedulers, settings_of
from portus.embedding.store import TableStore
from portus.embedding.tables import Table, check_optimizer
from portus.embedding.training import ProtectedTraining
from portus.errors import UsageError

_log: Final = logging.getLogger("portus")


class Batches:
    """The batches of one training. For the training thread alone."""

    def __init__(
        self,
        training: ProtectedTraining,
        store: TableStore,
        committer: Committer,
        moments: Moments,
        marks: Marks,
        *,
        mapped: Mapped | None,
        early: EarlyLookups | None,
    ) -> None:
        """mapped: where the tables are, if that is in the pool. early: the lookups that are made
        early, if any are."""
        self._training: Final = training
        self._store: Final = store
        self._committer: Final = committer
        self._moments: Final = moments
        self._marks: Final = marks
        self._mapped: Final = mapped
        self._early: Final = early
        self.count = 0
        """How many were captured."""
        self._may_update = store.newest is None
        """It is decided whether the training in the pool is resumed."""
        self._stepped: Final[set[int]] = set()
        """Optimizers that stepped in this batch, by id."""
        self._has_stepped = False
        """Every optimizer stepped, and a scheduler may: the batch is over with what comes next."""
        self._has_schedulers: bool | None = None
        """None before the first update."""
        self._settings: list[dict[str, Any]] | None = None
        """Of the optimizers, as the newest moment has them; None if there was none."""
        self._in_block = False
        """The batch ends with a block."""
        self._ended_early = False
        """The moment of this batch was taken before its end, since a state was asked for."""

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """For one batch, see ``Protected.batch``."""
        self._training.check_usable()
        if self._in_block:
            raise UsageError("`batch` was entered inside another `batch`; leave that one first")
        self.finish()
        self._in_block, self._ended_early = True, False
        try:
            yield
        finally:
            self._in_block = False
        self._take(self.count if self._ended_early else self.count + 1)

    def announce(self, ids: Mapping[str, torch.Tensor]) -> None:
        """Rows that will be updated soon, while the batch before is computed. A log of new rows
        has nothing to do before they are there; one of old rows takes them once that is over."""
        self.finish()
        tables = self._training.tables
        self._moments.announced = rows_ahead(tables, ids)
        if self._early is not None:
            place = {table.name: index for index, table in enumerate(tables)}
            self._early.look_up({place[name]: each for name, each in ids.items()})

    def finish(self) -> None:
        """End the batch in which every optimizer has stepped, if there is one. If the optimizers
        were set otherwise since the last one ended, save that one again, as it is now."""
        if self._has_stepped:
            self._end()
        elif self._settings not in (None, settings_of(self._training.optimizers)):
            self._has_schedulers = True  # of another kind than torch's, or the loop itself
            for table in self._training.tables:
                try:
                    if table.optimizer is not None:
                        check_optimizer(table.name, table.weight, table.optimizer)
                except UsageError:
                    return  # the next update says it
            if not self._stepped and not self._in_block:
                self._take(self.count)

    # --- updates --------------------------------------------------------------------------------

    def before_update(self, optimizer: Optimizer) -> None:
        """One of the optimizers has its gradients: once this returns, it writes. Blocks until the
        batch before is durable; raises as ``Protected.wait``."""
        self._training.check_usable()
        self._training.check_update(optimizer)
        if not self._may_update:
            raise UsageError(
                f"{self._training.name}: the pool already holds a training; call `load` before the "
                "first update, or protect these tables with another pool"
            )
        if self._has_schedulers is None:
            self._has_schedulers = have_schedulers(self._training.optimizers)
        self.finish()
        if not self._in_block and id(optimizer) in self._stepped:
            self._end()  # the others do not step in each batch
        self._committer.wait()
        self._look()
        mapped, rows = self._mapped, list[RowsThere]()
        for place, table in enumerate(self._training.tables):
            if table.optimizer is optimizer and table.touch():
                if mapped is not None:
                    rows += mapped.rows(table, table.touched[-1])
                if self._early is not None:
                    self._early.before_update(place, table.touched[-1])
        if mapped is not None:
            mapped.log(rows)

    def after_update(self, optimizer: Optimizer) -> None:
        """It has written. If it is the last one to, the batch is over, or so with what comes
        next."""
        if self._early is not None:
            self._early.after_update()
        for table in self._training.tables:
            if table.optimizer is optimizer:
                table.note()
        self._stepped.add(id(optimizer))
        if not self._in_block and len(self._stepped) == len(self._training.optimizers):
            if self._has_schedulers:
                self._has_stepped = True
            else:
                self._end()

    # --- what else writes to a table ------------------------------------------------------------

    def before_others_write(self, table: Table) -> None:
        """A table is about to be loaded: what is committed of it stays where it is, and the batch
        before is durable as it was."""
        self.finish()
        mapped = self._mapped
        if mapped is not None and self._store.newest is not None:
            self.keep_written()
        self._committer.wait()
        if mapped is not None and self._store.newest is not None:
            mapped.exchange(table)
            self._moments.is_whole = True

    def keep_written(self) -> None:
        """In place, what something else wrote to a table since the last batch is in the pool
        already: commit it, or the table would be damaged. Raises as ``Protected.wait``."""
        if self._mapped is None or self._stepped or self._in_block or self._store.newest is None:
            return
        if self._may_update and any(each.was_written() for each in self._training.tables):
            self._take(self.count)

    def _look(self) -> None:
        """Find out, before an update and when a batch is over, whether something else wrote to a
        table."""
        if self._moments.is_whole:
            return
        written = [each.name for each in self._training.tables if not each.is_as_noted()]
        if written:
            self._moments.is_whole = True
            _log.warning(
                "portus: %s changed outside of an update; all tables are saved in full",
                ", ".join(written),
            )

    # --- the end of a batch ---------------------------------------------------------------------

    def _end(self) -> None:
        """The batch is over."""
        self._take(self.count + 1)

    def _take(self, batch: int) -> None:
        """Take the moment of a batch, and have it made durable."""
        self._committer.wait()  # it reads what the next moment changes
        self._training.check_tables()
        self._look()
        self._marks.forget()
        try:
            moment = self._moments.take(batch)
            self._settings = settings_of(self._training.optimizers)
            self.count = batch
            self._begin()
            self._committer.put(moment)
        except BaseException:  # Ctrl-C: the rows of this one may be nowhere but in the tables
            self._moments.is_whole = True
            raise
        if moment.rows is None:  # it is read from the tables, which anybody may write to
            self._committer.settle()

    def _begin(self) -> None:
        """Nothing is changed yet in the batch that comes."""
        self._stepped.clear()
        self._has_stepped = False
        for table in self._training.tables:
            table.touched.clear()
            table.note()

    # --- marks, and going on from one -----------------------------------------------------------

    @property
    def may_mark(self) -> bool:
        """True if a state that is asked for is for others, with a mark for its tables. False until
        it is decided whether to resume the training in the pool."""
        return not self._moments.is_collecting and self._may_update and self._training.is_ours

    def mark(self) -> tuple[int, str]:
        """The mark of what the tables hold now: its batch and token. Ends the batch, if there was
        an update; blocks until the mark is durable."""
        self._training.check_usable()
        self._look()
        if self._stepped:
            self._end()
            self._ended_early = self._in_block
        elif self._moments.is_whole:
            self._take(self.count)
        return self._marks.of(self.count)

    def go_on_from_mark(self, batch: int) -> None:
        """The state of a mark is about to be loaded."""
        self.count, self._may_update, self._moments.is_whole = batch, True, True
        self._settings = None
        self._stepped.clear()
        self._has_stepped = False

    def go_on_from_newest(self, batch: int) -> None:
        """What was committed last was loaded, and is of that batch."""
        self.count, self._settings = batch, None
        self._moments.forget_dense()
        mapped = self._mapped
        self._may_update, self._moments.is_whole = True, mapped is not None and mapped.adopt()
        if mapped is not None:
            mapped.goes_on_from(batch)
        self._begin()
