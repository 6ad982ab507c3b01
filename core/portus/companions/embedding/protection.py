"""``protect``: tables that are their own checkpoint, and the object that a training loop holds.

``ProtectedTables`` has the calls that a training makes, and opens and closes the parts that do the
work. Torch calls the ``Hooks``, which report each update to the ``Batches``. When a batch ends,
``Moments`` takes its moment, which the ``Committer`` makes durable. ``batches`` has the theory.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch.optim import Optimizer

from portus.companions.embedding.batches import Batches
from portus.companions.embedding.capture import Moments
from portus.companions.embedding.committer import Committer, Marks
from portus.companions.embedding.hooks import Hooks
from portus.companions.embedding.lookups import (
    Batch,
    EarlyLookups,
    IdsOf,
    check_early,
    look_ahead,
)
from portus.companions.embedding.mapping import MappedTables, persistent
from portus.companions.embedding.store import TableStore
from portus.companions.embedding.tables import ProtectedTraining, Table, tables_of
from portus.engine.settings.fits import Seconds, SomeBytes, refuse_misfits
from portus.errors import PortusError, UsageError
from portus.reach.index.directory import create_pool, has_pool, open_writer
from portus.reach.index.place import Place
from portus.reach.index.pool import PoolWriter
from portus.reach.index.records import VersionEntry
from portus.reach.media.local import LocalFiles
from portus.reach.pools.restore import load

_log: Final = logging.getLogger("portus")

Mode = Literal["strict", "relaxed"]


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The batch at which training resumes.

    batch: how many batches the tables contain. dense_batch: how many the dense part contains; equal
    to ``batch`` in strict mode. extra: the result of the function ``extra`` at the dense part.
    """

    batch: int
    dense_batch: int
    extra: object


def protect(
    model: torch.nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    pool: str | os.PathLike[str],
    mode: Mode = "strict",
    extra: Callable[[], object] | None = None,
    gap: int = 100,
    keep: int | None = None,
    max_bytes: SomeBytes | None = None,
    log_bytes: SomeBytes | None = None,
    ids_of: IdsOf | None = None,
    early_lookup: bool = False,
    in_place: bool = False,
    timeout_s: Seconds = 10.0,
) -> ProtectedTables:
    """Make each batch of a training durable: the table rows that it changed, and the dense part.

    The tables are the ``Embedding`` and ``EmbeddingBag`` modules of ``model`` with ``sparse=True``,
    on the CPU, under SGD without momentum, Adagrad, SparseAdam or ``RowwiseAdagrad``, without
    weight decay. The rest of the model and its optimizers, of any kind, are the dense part, all of
    which is written with each batch. Tensors stay the model's and the optimizers' own.

    optimizer: every optimizer that steps in a batch, each once, in the same order in each run.
    pool: a pool file for this training alone, or a DAX device; ``load`` resumes from it.
    mode: "strict": an update begins only when the whole batch before it is durable. "relaxed": it
    begins when the tables of that batch are durable; the dense part is written in slices, as in
    TrainingCXL, and a resumed run is no longer bit-identical.
    gap: in relaxed mode, the dense part is always less than so many batches older than the tables.
    extra: returns more state for the dense part: dicts, lists, tensors, plain values, all else that
    ``torch.load(weights_only=True)`` accepts, and arrays of numpy.
    keep: how many of the newest marks to keep; None keeps all. Each batch at which a ``state_dict``
    is requested has a mark, which the saved state needs, see ``Elsewhere``. The marks between two
    foldings of the log keep one image of the tables, and its log; so with None the pool grows as
    long as states are requested. For a run that keeps N checkpoints: N + 2, and more if states are
    also requested for something else, or saves may fail several times in a row.
    max_bytes: the largest size of the pool, in bytes.
    log_bytes: the log that receives the batches; default: half of all bytes, at least 64 MiB.
    ids_of: returns the ids that a batch of the loader will look up, see ``ProtectedTables.ahead``.
    early_lookup: look a batch up while the one before it is computed, and add what that changed.
    Not bit-exact, and no resumed run is bit-identical with it. Takes ``ids_of``, whose ids must be
    those of the lookup, with a row for each bag, and tables that are an ``EmbeddingBag`` with
    ``mode="sum"``.
    in_place: keep the tables on persistent memory, in the pool itself, and nowhere else: ``model``
    may have them on "meta", and initialize them before the first batch. After ``close`` they have
    no rows; another view of one is a copy from then on.
    timeout_s: how long to wait for another writer of the pool, in seconds.

    Raises ``UsageError`` for a table that cannot be protected, with the reason, or that already is;
    ``BusyError``, which names the process that has the pool open; ``CorruptionError``,
    ``MediumError``.
    """
    place = Place.parse(pool)
    if place.local_pool is None:
        raise UsageError(f"{place}: expected a pool file or a DAX device for tables")
    sizes = {"max_bytes": max_bytes, "log_bytes": log_bytes, "timeout_s": timeout_s}
    refuse_misfits(protect, {"mode": mode, "in_place": in_place, **sizes})
    for name, number in (("gap", gap), ("keep", keep)):
        if number is not None and (type(number) is not int or number < 1):
            raise UsageError(f"{name}: expected an integer of at least 1, found {number!r}")
    for name, function in (("extra", extra), ("ids_of", ids_of)):
        if function is not None and not callable(function):
            raise UsageError(f"{name}: expected a function, or None, found {function!r}")
    every = gap if mode == "relaxed" else 1
    optimizers = _of_torch(model, optimizer)
    tables = tables_of(model, optimizers, in_place=in_place)  # before a pool is made
    _refuse_protected(tables)
    if early_lookup:
        check_early(model, tables)
        if ids_of is None:
            raise UsageError("early_lookup: expected a function ids_of, found none")
    files = LocalFiles()
    is_new = not has_pool(place.path, files)
    if is_new:
        create_pool(place.path, files)
    opened = open_writer(place.path, files, timeout_s=timeout_s, max_bytes=max_bytes)
    if in_place:
        try:
            persistent(opened.medium)
        except UsageError:
            if is_new and not opened.catalogue().ids():
                files.remove(opened.medium.info.name)
            opened.close()
            raise
    return ProtectedTables(
        model,
        optimizers,
        tables,
        opened,
        extra=extra,
        every=every,
        keep=keep,
        log_bytes=log_bytes,
        ids_of=ids_of,
        early_lookup=early_lookup,
        in_place=in_place,
    )


class ProtectedTables:
    """Protected tables, until ``close``. ``protect`` returns it. Only the training thread may use
    it, and no forked child."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[Optimizer],
        tables: Sequence[Table],
        pool: PoolWriter,
        *,
        extra: Callable[[], object] | None,
        every: int,
        keep: int | None,
        log_bytes: int | None,
        ids_of: IdsOf | None,
        early_lookup: bool,
        in_place: bool,
    ) -> None:
        """pool: closed by this object, also if this raises. every: a limit for the age of the dense
        part; it is fewer batches older than the tables."""
        self._pool: Final = pool
        self._every: Final = every
        self._ids_of: Final = ids_of
        try:
            self._training: Final = ProtectedTraining(model, optimizers, tables, pool)
            self._mapped: Final = MappedTables(pool, log_bytes, tables) if in_place else None
            self._store: Final = self._mapped or TableStore(pool, log_bytes)
            moments = Moments(self._training, self._mapped, extra=extra, every=every)
            self._early: Final = EarlyLookups(model, tables) if early_lookup else None
        except BaseException:
            pool.close()
            raise
        self._committer: Final = Committer(self._store)
        marks = Marks(self._store, self._committer, keep)
        self._batches: Final = Batches(
            self._training,
            self._store,
            self._committer,
            moments,
            marks,
            mapped=self._mapped,
            early=self._early,
        )
        self._hooks: Final = Hooks(self._training, self._batches, marks)
        _OPEN.add(self)

    @property
    def batches(self) -> int:
        """The number of batches that were captured since the start of the training; the newest may
        not be durable yet."""
        return self._batches.count

    def load(self, gap_max: int | None = None) -> ResumePoint | None:
        """Load the newest durable batch into the model and the optimizers, verified. Returns None
        if the pool is new. Blocks while it reads.

        gap_max: the most batches by which the dense part may be older than the tables; None: fewer
        than ``gap`` in relaxed mode, 0 in strict mode. If it is older, this raises ``UsageError``
        and loads nothing.

        Raises ``CorruptionError``, ``MediumError``; ``UsageError`` if the saved state does not fit
        the model or an optimizer.
        """
        self._training.check_usable()
        if gap_max is not None and (type(gap_max) is not int or gap_max < 0):
            raise UsageError(f"gap_max: expected an integer of at least 0, found {gap_max!r}")
        self._batches.commit()
        # Pieces may be from batches that are now discarded.
        self._committer.alone(self._store.give_up)
        newest = self._store.newest
        if newest is None:
            return None
        try:
            resumed = self._resume(newest, self._every - 1 if gap_max is None else gap_max)
            self._batches.go_on_from_newest(resumed.batch)
            return resumed
        except BaseException as error:
            forget_locals(error)
            raise

    def batch(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for one batch. The batch ends with the block, and contains
        everything that the block did, wherever a scheduler steps in it. Without it, a batch ends
        when every optimizer has stepped, and schedulers step between that and the next forward
        pass.

        If the block raises, its updates become part of the next batch. May block until the batch
        before it is durable; raises what an update raises.
        """
        return self._batches.block()

    def ahead(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the same batches. Before each one, ``ids_of`` is called for the batch that follows
        it, so the loader is one batch ahead of the training; a saved position of the loader is too.

        Raises ``UsageError`` for ids that a table does not have, when that batch is due and before
        any lookup.
        """
        self._training.check_usable()
        if self._ids_of is None:
            raise UsageError("ahead: expected a function ids_of, found none; pass it to `protect`")
        ids_of = self._ids_of

        def announce(batch: Batch) -> Batch:
            self._batches.announce(ids_of(batch))
            return batch

        return look_ahead(map(announce, batches))

    def wait(self) -> None:
        """Block until all batches so far are durable. Raises what the pool raised, such as
        ``MediumError``: then only the batches before that are durable, and every later update
        raises the same. ``UsageError`` in a forked child.
        """
        self._training.check_process()
        self._batches.commit()
        self._committer.wait()

    def close(self) -> None:
        """Wait, then stop protecting the tables: they train on as ordinary ones. A second call does
        nothing. Raises as ``wait``."""
        if self._training.is_closed or not self._training.is_ours:
            return
        self._training.is_closed = True
        self._hooks.remove()
        if self._early is not None:
            self._early.close()
        try:
            try:
                self._batches.keep_written()
            finally:
                # Ended whatever failed before: its thread must not outlive the pool.
                self._committer.end()
            self._store.seal()
        finally:
            try:
                if self._mapped is not None:
                    self._mapped.let_go()
            finally:
                self._pool.close()

    def _resume(self, newest: VersionEntry, gap_max: int) -> ResumePoint:
        training, mapped = self._training, self._mapped
        model, optimizers = training.model, training.optimizers
        state: Any = load(self._pool, newest) if mapped is None else mapped.load()
        batch, dense_batch = int(state["batch"]), int(state["dense_batch"])
        if batch - dense_batch > gap_max:
            raise UsageError(
                f"{training.name}: expected a dense part that is at most {gap_max} batches older "
                f"than the tables, found {batch - dense_batch} (batch {dense_batch}, tables at "
                f"batch {batch}); pass a larger gap_max to load it anyway"
            )
        saved = state["optimizers"]
        if len(saved) != len(optimizers):
            raise UsageError(
                f"{training.name}: expected {len(saved)} optimizers, as saved, found "
                f"{len(optimizers)}; nothing was loaded"
            )
        _require_kinds(training, state["optimizer_kinds"])
        _require_same(training.tables, state["model"])
        for table in training.tables:
            numbers = [i for i, each in enumerate(optimizers) if each is table.optimizer]
            if numbers:
                table.require_saved(saved[numbers[0]])
        try:
            if mapped is None:
                model.load_state_dict(state["model"])
            else:
                _load_rest(model, mapped.take(model, state["model"]), state["model"])
            for optimizer, each in zip(optimizers, saved, strict=True):
                optimizer.load_state_dict(each)
        except (RuntimeError, ValueError, KeyError) as error:
            raise UsageError(
                f"{training.name}: the saved state does not fit this model and its optimizers; "
                f"load it with those that saved it, or use another pool: {error}"
            ) from error
        return ResumePoint(batch, dense_batch, state["extra"])

    def __enter__(self) -> ProtectedTables:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def forget_locals(error: BaseException | None) -> None:
    """Clear the local variables in the tracebacks of ``error`` and its causes. Otherwise a
    reference to the error would keep tables of a pool alive, and closing the pool would copy these
    to memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


def _require_kinds(training: ProtectedTraining, saved: Sequence[str]) -> None:
    """Raise ``UsageError`` unless the optimizers are of the saved classes, in the saved order."""
    found = training.optimizer_kinds
    if saved == found:
        return
    advice = "take those, or a new pool"
    if sorted(saved) == sorted(found):
        advice = "pass them in that order"
    raise UsageError(
        f"{training.name}: expected the optimizers {', '.join(saved)}, as in the pool, found "
        f"{', '.join(found)}; nothing was loaded: {advice}"
    )


def _require_same(tables: Sequence[Table], saved: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for a table of another shape or dtype than the saved one."""
    for table in tables:
        found = saved.get(table.key)
        if not isinstance(found, torch.Tensor):
            continue
        if found.shape != table.shape or found.dtype != table.dtype:
            raise UsageError(
                f"{table.name}: expected a table of {table.dtype} {tuple(table.shape)}, found "
                f"one of {found.dtype} {tuple(found.shape)} in the pool; nothing was loaded: make "
                "the table as it was, or protect this one with a new pool, and copy the rows from "
                "`portus.open`"
            )


def _load_rest(model: torch.nn.Module, rest: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Load a state without its tables. Raise ``RuntimeError``, as torch does."""
    found = model.load_state_dict(rest, strict=False)
    missing = set(found.missing_keys) - (saved.keys() - rest.keys())
    if missing or found.unexpected_keys:
        raise RuntimeError(
            f"missing: {', '.join(sorted(missing))}; unexpected: {', '.join(found.unexpected_keys)}"
        )


def _of_torch(model: object, optimizer: object) -> list[Optimizer]:
    """Return the optimizers. Raise ``UsageError`` if one, or the model, is not torch's."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model: expected a torch.nn.Module, found a {type(model).__name__}")
    found: list[Optimizer] = []
    for each in optimizer if isinstance(optimizer, list | tuple) else (optimizer,):
        if not isinstance(each, Optimizer):
            raise UsageError(
                "optimizer: expected an optimizer of torch, or a list of them, found a "
                f"{type(each).__name__}"
            )
        found.append(each)
    return found


def _refuse_protected(tables: Sequence[Table]) -> None:
    """Raise ``UsageError`` for a table that is protected already: each of the two would miss what
    the other does."""
    for other in list(_OPEN):
        training = other._training
        held = {id(each.weight) for each in training.tables}
        for table in tables:
            if id(table.weight) in held and not training.is_closed and training.is_ours:
                raise UsageError(
                    f"{table.name}: it is protected already, in {training.name}; call `close` on "
                    "what `protect` returned for that"
                )


_OPEN: Final[weakref.WeakSet[ProtectedTables]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all protected tables at the end of the process, so that the last batch is durable."""
    for protected in list(_OPEN):
        try:
            protected.close()
        except PortusError as error:  # no caller is left to catch it
            _log.error("portus: tables: the last batch is not durable: %s", error)
