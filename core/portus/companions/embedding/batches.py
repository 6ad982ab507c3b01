"""The story of a batch, from the first update to the thread that makes it durable.

Theory. A batch is over when each of the optimizers has stepped, or at the end of ``batch``. Then
its moment is taken: the rows that changed, and the dense part, are copied. It is held until the
next batch begins, and taken again when a scheduler steps, or settings changed: a loop does these
after the updates. All else of it is for a thread, which makes it durable while the next batch is
computed. Before the next update, after its gradients are there, the optimizer waits for that: so
what is durable is never more than one batch behind what is in memory, and never between two.

What an update changes is read off its gradients, just before it: what other ranks looked up is in
them. Whatever else wrote to a table is seen by torch's counters, and costs a whole image of it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch.optim import Optimizer

from portus.companions.embedding.ahead import rows_ahead
from portus.companions.embedding.capture import Moments
from portus.companions.embedding.committer import Committer
from portus.companions.embedding.early import EarlyLookups
from portus.companions.embedding.mapping import MappedTables
from portus.companions.embedding.marks import Marks
from portus.companions.embedding.moment import Moment, RowsThere
from portus.companions.embedding.schedulers import settings_of
from portus.companions.embedding.store import TableStore
from portus.companions.embedding.tables import Table
from portus.companions.embedding.training import ProtectedTraining
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
        mapped: MappedTables | None,
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
        """True once it is decided whether the training in the pool is resumed."""
        self._stepped: Final[set[int]] = set()
        """Optimizers that stepped in this batch, by id."""
        self._in_block = False
        """The batch ends with a block."""
        self._ended_early = False
        """The moment of this batch was taken before its end, since a state was asked for."""
        self._held: Moment | None = None
        """The moment of the batch that is over, while what the loop does after the updates becomes
        part of it."""
        self._is_after = False
        """A batch is over, and the next one has not begun."""
        self._stray = ""
        """The scheduler that stepped where no batch is over, by its class."""
        self._settings: str | None = settings_of(training.optimizers)
        """Settings of the optimizers before the loop; None once it has made an update."""
        self._sets_before = False
        """The loop changes settings by hand before the updates of a batch, and not after them."""

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Return a context manager for one batch, see ``ProtectedTables.batch``."""
        self._training.check_usable()
        if self._in_block:
            raise UsageError("`batch` was entered inside another `batch`; leave that one first")
        self.begin()
        self._in_block, self._ended_early = True, False
        try:
            yield
        finally:
            self._in_block = False
        self._end(self.count if self._ended_early else self.count + 1)

    def announce(self, ids: Mapping[str, torch.Tensor]) -> None:
        """Rows that will be updated soon, while the batch before is computed. A log of new rows
        has nothing to do before they are there; one of old rows takes them once that is over."""
        self.begin()
        tables = self._training.tables
        self._moments.announced = rows_ahead(tables, ids)
        if self._early is not None:
            place = {table.name: index for index, table in enumerate(tables)}
            self._early.look_up({place[name]: each for name, each in ids.items()})

    # --- updates --------------------------------------------------------------------------------

    def before_update(self, optimizer: Optimizer) -> None:
        """Wait, for an optimizer that has its gradients and writes once this returns, until the
        batch before is durable; raises as ``ProtectedTables.wait``."""
        self._training.check_usable()
        self._training.check_update(optimizer)
        if not self._may_update:
            raise UsageError(
                f"{self._training.name}: the pool already holds a training; call `load` before the "
                "first update, or protect these tables with another pool"
            )
        self._check_order()
        if not self._in_block and id(optimizer) in self._stepped:
            self._end(self.count + 1)  # the others do not step in each batch
        self.begin()
        self._committer.wait()
        # Torch's counters, before the update raises them itself.
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
        """Note that ``optimizer`` has written. Outside a block, end the batch if it was the last
        one to."""
        if self._early is not None:
            self._early.after_update()
        for table in self._training.tables:
            if table.optimizer is optimizer:
                table.note()
        self._stepped.add(id(optimizer))
        if not self._in_block and len(self._stepped) == len(self._training.optimizers):
            self._end(self.count + 1)

    def after_schedule(self, scheduler: object, *, is_made: bool) -> None:
        """A scheduler of one of the optimizers has stepped; ``is_made``: as it was made."""
        if is_made or self._in_block or self._stepped or not self._training.is_ours:
            self.note_settings()
        elif not self._is_after:
            self._stray = type(scheduler).__name__
        elif self._held is None:
            self._take(self.count)
        elif self._held.dense_batch == self.count:
            self._take_again(afresh=True)

    def note_settings(self) -> None:
        """Settings of the optimizers were changed, and not by hand."""
        if self._settings is not None:
            self._settings = settings_of(self._training.optimizers)

    def _check_order(self) -> None:
        """Raise ``UsageError`` if it cannot be told of which batch a scheduler's step is."""
        if self._stray:
            raise UsageError(
                f"{self._training.name}: a {self._stray} stepped before the update of a batch, "
                "and Portus cannot tell whether that step is part of this batch or of the one "
                "before: step schedulers after the optimizers and before the next forward pass; or "
                "put all of a batch, the scheduler's step too, in `with tables.batch():`. After a "
                "load, load the state of the scheduler from `extra`, and do not step it there"
            )
        if self._settings is not None:
            self._sets_before = self._settings != settings_of(self._training.optimizers)
            self._settings = None

    # --- what else writes to a table ------------------------------------------------------------

    def before_others_write(self, table: Table) -> None:
        """A table is about to be loaded: what is committed of it stays where it is, and the batch
        before is durable as it was."""
        self.keep_written()
        mapped = self._mapped
        self._committer.wait()
        if mapped is not None and self._store.newest is not None:
            mapped.exchange(table)
            self._moments.is_whole = True

    def keep_written(self) -> None:
        """Commit the batch that is over. In place, what something else wrote to a table since is in
        the pool already: commit that too, or the table would be damaged. Raises as ``commit``."""
        self.commit()
        if self._mapped is None or self._stepped or self._in_block or self._store.newest is None:
            return
        if self._may_update and any(each.was_written() for each in self._training.tables):
            self._take(self.count)
            self.commit()

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

    def begin(self) -> None:
        """The next batch begins: what comes now is not part of the one before. Raises as
        ``commit``."""
        self._is_after = False
        self.commit()

    def commit(self) -> None:
        """Have the batch that is over made durable, with what was changed since; do not wait for
        that. Raises what the pool raised before."""
        if self._held is None or not self._training.is_ours:
            return
        self._committer.wait()
        with contextlib.suppress(UsageError):  # the next update says that a table is another one
            self._training.check_tables()
            self._training.check_optimizers()
            self._look()
            if self._moments.is_whole or self._is_changed(self._held):
                self._take_again(afresh=False)
        # Before it is handed over: what is raised from here on must not commit it twice.
        moment, self._held = self._held, None
        with self._whole_next():
            self._moments.let_go()
            for table in self._training.tables:
                table.touched.clear()
            self._committer.put(moment)
        if moment.rows is None:  # it is read from the tables, which anybody may write to
            self._committer.settle()

    def _is_changed(self, held: Moment) -> bool:
        """True if somebody changed settings after the updates of the batch that is over."""
        if self._sets_before or held.dense_batch != self.count:
            return False
        return self._moments.has_other_settings()

    def _end(self, batch: int) -> None:
        """The batch is over, but for what the loop does after the updates."""
        self._take(batch)
        self._is_after = True

    def _take(self, batch: int) -> None:
        """Take the moment of a batch, and hold it until ``commit``."""
        self.commit()
        self._committer.wait()  # it reads what the next moment changes
        self._training.check_tables()
        self._look()
        self._marks.forget()
        with self._whole_next():
            self._held = self._moments.take(batch)
            self.count = batch
            self._stepped.clear()
            self._note()  # tables may be in the pool only now

    def _take_again(self, *, afresh: bool) -> None:
        """Take the moment that is held again; ``afresh``: and ask ``extra`` again."""
        with self._whole_next():
            self._held = self._moments.take_again(self.count, afresh=afresh)
            self._note()

    @contextlib.contextmanager
    def _whole_next(self) -> Iterator[None]:
        """Have the next moment take whole tables if anything is raised here, Ctrl-C included:
        changed rows may then be nowhere but in the tables."""
        try:
            yield
        except BaseException:
            self._moments.is_whole = True
            raise

    def _note(self) -> None:
        for table in self._training.tables:
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
        self.commit()
        self._look()
        if self._stepped:
            self._end(self.count + 1)
            self._ended_early = self._in_block
        elif self._moments.is_whole:
            self._take(self.count)
        self.commit()
        return self._marks.of(self.count)

    def go_on_from_mark(self, batch: int) -> None:
        """The state of a mark is about to be loaded."""
        self.commit()
        self._begin_anew()
        self.count, self._may_update, self._moments.is_whole = batch, True, True

    def go_on_from_newest(self, batch: int) -> None:
        """What was committed last was loaded, and is of that batch."""
        self.count = self._store.batch = batch
        self._moments.forget_dense()
        mapped = self._mapped
        self._may_update, self._moments.is_whole = True, mapped is not None and mapped.adopt()
        for table in self._training.tables:
            table.touched.clear()
        self._note()
        self._begin_anew()

    def _begin_anew(self) -> None:
        """The next batch is the first one after a load."""
        self._held, self._is_after, self._stray = None, False, ""
        self._stepped.clear()
        self._settings = settings_of(self._training.optimizers)
