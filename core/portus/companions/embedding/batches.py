"""The life of a batch, from the first update to the thread that makes it durable.

Theory. A batch ends when each of the optimizers has stepped, or at the end of ``batch``. Then its
moment is taken: the rows that changed, and the dense part, are copied. The moment is held until the
next batch begins, and taken again when a scheduler steps, or settings change: a loop does these
after the updates. A thread does the rest, and makes the batch durable while the next one is
computed. Before the next update, when its gradients are there, the optimizer waits for that thread.
So the durable state is never more than one batch behind memory, and never between two batches.

The rows that an update changes are read from its gradients, just before it, since these contain the
lookups of other ranks. Torch's counters reveal any other write to a table, which costs a whole
image of it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch.optim import Optimizer

from portus.companions.embedding.capture import Moments
from portus.companions.embedding.committer import Committer, Marks
from portus.companions.embedding.lookups import EarlyLookups, rows_ahead
from portus.companions.embedding.mapping import MappedTables
from portus.companions.embedding.moment import Moment, RowsThere
from portus.companions.embedding.store import TableStore
from portus.companions.embedding.tables import ProtectedTraining, Table, settings_of
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
        """mapped: the tables, if they are in the pool itself. early: the lookups that are made
        early, if any."""
        self._training: Final = training
        self._store: Final = store
        self._committer: Final = committer
        self._moments: Final = moments
        self._marks: Final = marks
        self._mapped: Final = mapped
        self._early: Final = early
        self.count = 0
        """How many batches were captured."""
        self._may_update = store.newest is None
        """True once the choice is made whether to resume the training in the pool."""
        self._stepped: Final[set[int]] = set()
        """Optimizers that stepped in this batch, by id."""
        self._in_block = False
        """True if the batch ends with a block."""
        self._ended_early = False
        """True if a requested state made this batch's moment before the end of the batch."""
        self._held: Moment | None = None
        """The moment of the last batch, while the loop may still add changes after its updates."""
        self._is_after = False
        """True if a batch has ended, and the next one has not begun."""
        self._stray = ""
        """The class of a scheduler that stepped when no batch had ended."""
        self._settings: str | None = settings_of(training.optimizers)
        """Settings of the optimizers before the loop; None once it has made an update."""
        self._sets_before = False
        """True if the loop changes settings before the updates of a batch, not after them."""

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Run one batch, see ``ProtectedTables.batch``."""
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
        """Announce rows that the batch after the current one will update. A log of new rows has
        nothing to do yet; a log of old rows takes them when the current batch has ended."""
        self.begin()
        self._moments.announced = rows_ahead(self._training.tables, ids)
        if self._early is not None:
            self._early.look_up(ids)

    # --- updates --------------------------------------------------------------------------------

    def before_update(self, optimizer: Optimizer) -> None:
        """Wait until the batch before is durable. Called for an optimizer that has its gradients,
        and writes after this. Raises as ``ProtectedTables.wait``."""
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
                    self._early.bags[place].before_update(table.touched[-1])
        if mapped is not None:
            mapped.log(rows)

    def after_update(self, optimizer: Optimizer) -> None:
        """Note that ``optimizer`` has written. Outside of a block, end the batch if it was the last
        optimizer to write."""
        if self._early is not None:
            self._early.after_update()
        for table in self._training.tables:
            if table.optimizer is optimizer:
                table.note()
        self._stepped.add(id(optimizer))
        if not self._in_block and len(self._stepped) == len(self._training.optimizers):
            self._end(self.count + 1)

    def after_schedule(self, scheduler: object, *, is_made: bool) -> None:
        """Note that an optimizer's scheduler has stepped; ``is_made``: in its constructor."""
        if is_made or self._in_block or self._stepped or not self._training.is_ours:
            self.note_settings()
        elif not self._is_after:
            self._stray = type(scheduler).__name__
        elif self._held is None:
            self._take(self.count)
        elif self._held.dense_batch == self.count:
            self._take_again(afresh=True)

    def note_settings(self) -> None:
        """Note that a scheduler or a load, not the loop, changed settings of the optimizers."""
        if self._settings is not None:
            self._settings = settings_of(self._training.optimizers)

    def _check_order(self) -> None:
        """Raise ``UsageError`` if a scheduler stepped between batches: its batch is unknown."""
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
        """Prepare for a load of a table: its committed rows stay in place, and the batch before is
        durable as it was."""
        self.keep_written()
        mapped = self._mapped
        self._committer.wait()
        if mapped is not None and self._store.newest is not None:
            mapped.exchange(table)
            self._moments.is_whole = True

    def keep_written(self) -> None:
        """Commit the batch that has ended. Tables in place: commit other writes since too, which
        are in the pool already and would count as damage. Raises as ``commit``."""
        self.commit()
        if self._mapped is None or self._stepped or self._in_block or self._store.newest is None:
            return
        if self._may_update and any(each.was_written() for each in self._training.tables):
            self._take(self.count)
            self.commit()

    def _look(self) -> None:
        """Find out, before an update and at the end of a batch, whether other code wrote to a
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
        """Begin the next batch: changes from now on are not part of the one before. Raises as
        ``commit``."""
        self._is_after = False
        self.commit()

    def commit(self) -> None:
        """Hand the batch that has ended to the committer, with all changes since, and do not wait.
        Raises what the pool raised before."""
        if self._held is None or not self._training.is_ours:
            return
        self._committer.wait()
        with contextlib.suppress(UsageError):  # the next update says that a table is another one
            self._training.check_tables()
            self._training.check_optimizers()
            self._look()
            # What a loop sets before the updates of a batch is not part of the one before.
            may_change = not self._sets_before and self._held.dense_batch == self.count
            settings = settings_of(self._training.optimizers)
            if self._moments.is_whole or (may_change and self._moments.settings != settings):
                self._take_again(afresh=False)
        # Before it is handed over: an error from here on must not commit it twice.
        moment, self._held = self._held, None
        with self._whole_next():
            self._moments.let_go()
            for table in self._training.tables:
                table.touched.clear()
            self._committer.put(moment)
        if moment.rows is None:  # it is read from the tables, which other code may change
            self._committer.settle()

    def _end(self, batch: int) -> None:
        """End a batch, except for changes that the loop makes after the updates."""
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
        """Take the held moment again; ``afresh``: call ``extra`` again too."""
        with self._whole_next():
            self._held = self._moments.take_again(self.count, afresh=afresh)
            self._note()

    @contextlib.contextmanager
    def _whole_next(self) -> Iterator[None]:
        """Have the next moment take whole tables if the block raises, Ctrl-C included: the changed
        rows may then be in the tables only."""
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
        """True if a requested state goes to other code, with marks in place of its tables. False
        until the choice is made whether to resume the training in the pool."""
        return not self._moments.is_collecting and self._may_update and self._training.is_ours

    def mark(self) -> tuple[int, str]:
        """Return the mark of the current tables: its batch and token. End the batch, if there was
        an update; block until the mark is durable."""
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
        """Continue at a batch whose marked state is about to be loaded."""
        self.commit()
        self._begin_anew()
        self.count, self._may_update, self._moments.is_whole = batch, True, True

    def go_on_from_newest(self, batch: int) -> None:
        """Continue at a batch whose state, the newest commit, was loaded."""
        self.count = self._store.batch = batch
        self._moments.dense = None  # another one was loaded
        mapped = self._mapped
        self._may_update, self._moments.is_whole = True, mapped is not None and mapped.adopt()
        for table in self._training.tables:
            table.touched.clear()
        self._note()
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Reset what is known of the loop, for the first batch after a load."""
        self._held, self._is_after, self._stray = None, False, ""
        self._stepped.clear()
        self._settings = settings_of(self._training.optimizers)
