"""``protect``: tables that are their own checkpoint. What a training loop holds.

Theory. A batch is over when each of the optimizers has stepped, or at the end of ``batch``. Then
its moment is taken: the rows that changed, and the dense part, are copied; all else of it is for a
thread, which makes it durable while the next batch is computed. Before the next update, after its
gradients are there, the optimizer waits for that: so what is durable is never more than one batch
behind what is in memory, and never between two.

What an update changes is read off its gradients, just before it: what other ranks looked up is in
them. Whatever else wrote to a table is seen by torch's counters, and costs a whole image of it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from portus.client.files.pins import pins_of
from portus.client.loading.restore import load
from portus.client.state.state import FlatState, Flattener
from portus.embedding.ahead import Batch, IdsOf, look_ahead, rows_ahead
from portus.embedding.early import EarlyLookups, check_early
from portus.embedding.elsewhere import Elsewhere, marked, replaced, within
from portus.embedding.mapped import Mapped
from portus.embedding.moment import Moment, Rows
from portus.embedding.placed import NO_ROWS, PlacedMoment, PlacedStore, RowsThere
from portus.embedding.store import TableStore
from portus.embedding.tables import Table, changed_rows, check_ids, tables_of
from portus.errors import PortusError, UsageError
from portus.index.directory import create_pool, has_pool, open_writer
from portus.index.fits import Seconds, SomeBytes, refuse_misfits
from portus.index.place import Place, PlaceKind
from portus.index.pool import PoolWriter
from portus.index.records import VersionEntry, encode_layout
from portus.media.local import LocalFiles
from portus.pipeline.waiting import Changed
from portus.spec import TensorSpec
from portus.transport.base import Stop
from portus.transport.beside import Beside

_log: Final = logging.getLogger("portus")

Mode = Literal["strict", "relaxed"]

_SLICES_SHARE: Final = 4
"""Of the batches of a gap, one of so many has a slice of the dense part."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where training resumes.

    batch: how many batches the tables contain. dense_batch: how many the dense part contains; equal
    to ``batch`` in strict mode. extra: what the function ``extra`` returned with the dense part.
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
) -> Protected:
    """Make each batch of a training durable: the table rows that it changed, and the dense part.

    The tables are the ``Embedding`` and ``EmbeddingBag`` modules of ``model`` with ``sparse=True``,
    on the CPU, under SGD without momentum, Adagrad, SparseAdam or ``RowwiseAdagrad``, without
    weight decay. The rest of the model and its optimizers, of any kind, are the dense part, all of
    which is written with each batch. Tensors stay the model's and the optimizers' own.

    optimizer: every optimizer that steps in a batch, each once, in the same order in each run.
    pool: a pool file for this training alone, or a DAX device; ``Protected.load`` resumes from it.
    mode: "strict": an update begins only when the whole batch before it is durable. "relaxed": it
    begins when the tables of that batch are durable; the dense part is written in slices, as in
    TrainingCXL, and a resumed run is no longer bit-identical.
    gap: in relaxed mode, the dense part is always less than so many batches older than the tables.
    extra: returns more state for the dense part: nested dicts and lists, tensors, plain values.
    keep: how many of the newest marks to keep; None keeps all. Each batch at which a ``state_dict``
    is requested has a mark, which the saved state needs, see ``Elsewhere``.
    max_bytes: the largest size of the pool, in bytes.
    log_bytes: the log that receives the batches; default: half of all bytes, at least 64 MiB.
    ids_of: returns the ids that a batch of the loader will look up, see ``Protected.ahead``.
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
    place = Place.named(pool)
    if place.kind not in (PlaceKind.FILE, PlaceKind.DEVICE):
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
    if not has_pool(place.path, files):
        create_pool(place.path, files)
    opened = open_writer(place.path, files, timeout_s=timeout_s, max_bytes=max_bytes)
    return Protected(
        model,
        optimizers,
        opened,
        extra=extra,
        every=every,
        keep=keep,
        log_bytes=log_bytes,
        ids_of=ids_of,
        early_lookup=early_lookup,
        in_place=in_place,
    )


class Protected:
    """Protected tables, until ``close``. ``protect`` returns it. Only the training thread may use
    it, and no forked child."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[Optimizer],
        pool: PoolWriter,
        *,
        extra: Callable[[], object] | None,
        every: int,
        keep: int | None,
        log_bytes: int | None,
        ids_of: IdsOf | None = None,
        early_lookup: bool = False,
        in_place: bool = False,
    ) -> None:
        """pool: is closed by it, also if this raises. every: the dense part is less than so many
        batches older than the tables."""
        self._every: Final = every
        self._slices: Final = 0 if every == 1 else max(1, every // _SLICES_SHARE)
        """In how many the dense part is written; 0: in one piece, by the entry of its batch."""
        self._dense: _Dense | None = None
        """As it was taken last, if it is written in slices."""
        self._pool: Final = pool
        self._keep: Final = keep
        self._ids_of: Final = ids_of
        self._model: Final = model
        self._optimizers: Final = list(optimizers)
        self._extra: Final = extra
        self._process: Final = os.getpid()
        self._flattener: Final = Flattener()
        self._specs: tuple[TensorSpec, ...] | None = None
        self._layout = b""
        self._batch = 0
        self._modules: Final[list[tuple[torch.nn.Module, Table]]] = []
        """Each module with a table, which it may share with another."""
        self._stepped: set[int] = set()
        """Optimizers that stepped in this batch, by id."""
        self._in_batch = False
        self._whole = True
        """The next moment is taken whole."""
        self._counter: Final = torch.tensor(0, device="cpu")
        self._ended_early = False
        """The moment of this batch was taken before its end, since a state was asked for."""
        self._collecting = False
        """The states that are asked for are for a moment, tables and all."""
        self._marked: tuple[int, str] | None = None
        """The newest mark: of which batch, and its token."""
        self._read: tuple[str, object] | None = None
        """The state of the mark that was loaded last, until the next batch."""
        self._announced: Mapping[int, torch.Tensor] = {}
        """Rows that the next batch will update, as far as it is known."""
        self._closed = False
        self._hooks: list[Any] = []
        try:
            self._tables: Final = tables_of(model, optimizers, in_place=in_place)
            self._store: Final = (PlacedStore if in_place else TableStore)(pool, log_bytes)
            self._may_update = self._store.newest is None
            self._mapped: Final = _mapped(self._store, self._tables)
            if self._mapped is not None and self._may_update:
                self._mapped.adopt()
            self._early: Final = EarlyLookups(model, self._tables) if early_lookup else None
        except BaseException:
            pool.close()
            raise
        self._worker: Final = _Worker(self._store)
        self._hook()
        _OPEN.add(self)

    @property
    def batches(self) -> int:
        """How many batches were captured, from the start of the training; the newest may not be
        durable yet."""
        return self._batch

    def load(self, gap_max: int | None = None) -> Resumed | None:
        """Load the newest durable batch into the model and the optimizers, verified. Returns None
        if the pool is new. Blocks while it reads.

        gap_max: the most batches by which the dense part may be older than the tables; None: fewer
        than ``gap`` in relaxed mode, 0 in strict mode. If it is older, this raises ``UsageError``
        and loads nothing.

        Raises ``CorruptionError``, ``MediumError``; ``UsageError`` if the saved state does not fit
        the model or an optimizer.
        """
        self._check_usable()
        if gap_max is not None and (type(gap_max) is not int or gap_max < 0):
            raise UsageError(f"gap_max: expected an integer of at least 0, found {gap_max!r}")
        with self._worker.alone():
            self._store.give_up()  # it may have what is not gone on with
        newest = self._store.newest
        if newest is None:
            return None
        try:
            return self._load(newest, gap_max)
        except BaseException as error:
            _forget_locals(error)
            raise

    def _load(self, newest: VersionEntry, gap_max: int | None) -> Resumed:
        mapped = self._mapped
        state: Any = load(self._pool, newest) if mapped is None else mapped.load()
        batch, dense_batch = int(state["batch"]), int(state["dense_batch"])
        allowed = self._every - 1 if gap_max is None else gap_max
        if batch - dense_batch > allowed:
            raise UsageError(
                f"{self._name}: expected a dense part that is at most {allowed} batches older than "
                f"the tables, found {batch - dense_batch} (batch {dense_batch}, tables at batch "
                f"{batch}); pass a larger gap_max to load it anyway"
            )
        saved = state["optimizers"]
        if len(saved) != len(self._optimizers):
            raise UsageError(
                f"{self._name}: expected {len(saved)} optimizers, as saved, found "
                f"{len(self._optimizers)}; nothing was loaded"
            )
        _require_same(self._tables, self._model, state["model"])
        for table in self._tables:
            numbers = [i for i, each in enumerate(self._optimizers) if each is table.optimizer]
            if numbers:
                table.require_saved(saved[numbers[0]])
        try:
            if mapped is None:
                self._model.load_state_dict(state["model"])
            else:
                _load_rest(self._model, mapped.take(self._model, state["model"]), state["model"])
            for optimizer, each in zip(self._optimizers, saved, strict=True):
                _load_optimizer(optimizer, each)
        except (RuntimeError, ValueError, KeyError) as error:
            raise UsageError(
                f"{self._name}: the saved state does not fit this model and its optimizers; load "
                f"it with those that saved it, or use another pool: {error}"
            ) from error
        self._batch, self._dense = batch, None
        self._may_update, self._whole = True, mapped is not None and mapped.adopt()
        if mapped is not None:
            mapped.goes_on_from(batch)
        self._mark_unchanged()
        return Resumed(batch, dense_batch, state["extra"])

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """A context manager for one batch. The batch ends with the block, and contains everything
        that the block did, such as a scheduler's step. Without it, a batch ends when every
        optimizer has stepped.

        If the block raises, its updates become part of the next batch. May block until the batch
        before it is durable; raises what an update raises.
        """
        self._check_usable()
        if self._in_batch:
            raise UsageError("`batch` was entered inside another `batch`; leave that one first")
        self._in_batch, self._ended_early = True, False
        try:
            yield
        finally:
            self._in_batch = False
        self._take(self._batch if self._ended_early else self._batch + 1)

    def ahead(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the same batches. Before each one, ``ids_of`` is called for the batch that follows
        it, so the loader is one batch ahead of the training; a saved position of the loader is too.

        Raises ``UsageError`` for ids that a table does not have, when that batch is due and before
        any lookup.
        """
        self._check_usable()
        ids_of = self._ids_of
        if ids_of is None:
            raise UsageError("ahead: expected a function ids_of, found none; pass it to `protect`")
        return look_ahead(batches, lambda batch: self._announce(ids_of(batch)))

    def _announce(self, ids: Mapping[str, torch.Tensor]) -> None:
        """Rows that will be updated soon, while the batch before is computed. A log of new rows
        has nothing to do before they are there; one of old rows takes them once that is over."""
        self._announced = rows_ahead(self._tables, ids)
        if self._early is not None:
            place = {table.name: index for index, table in enumerate(self._tables)}
            self._early.look_up({place[name]: each for name, each in ids.items()})

    def wait(self) -> None:
        """Block until all batches so far are durable. Raises what the pool raised, such as
        ``MediumError``: then only the batches before that are durable, and every later update
        raises the same. ``UsageError`` in a forked child.
        """
        self._check_process()
        self._worker.wait()

    def close(self) -> None:
        """Wait, then stop protecting the tables: they train on as ordinary ones. A second call does
        nothing. Raises as ``wait``."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._early is not None:
            self._early.close()
        try:
            try:
                self._keep_written()
            finally:
                self._worker.end()
            self._store.seal()
        finally:
            try:
                if self._mapped is not None:
                    self._mapped.let_go()
            finally:
                self._pool.close()

    def __enter__(self) -> Protected:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what torch calls -----------------------------------------------------------------------

    def _hook(self) -> None:
        known = weakref.ref(self)

        def before(
            optimizer: Optimizer, arguments: tuple[object, ...], named: dict[str, object]
        ) -> tuple[tuple[object, ...], dict[str, object]] | None:
            owner = known()
            return None if owner is None else owner._before_step(optimizer, arguments, named)

        def after(optimizer: Optimizer, _: tuple[object, ...], __: dict[str, object]) -> None:
            owner = known()
            if owner is not None:
                owner._after_step(optimizer)

        def looked_up(module: torch.nn.Module, _: object) -> None:
            owner = known()
            table = None if owner is None else owner._table_of(module)
            if table is not None and module.max_norm is not None:
                raise UsageError(
                    f"{table.name}: max_norm={module.max_norm} changes rows in the forward pass, "
                    "before any update; set it to None"
                )

        def shown(module: torch.nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
            owner = known()
            if owner is not None:
                owner._leave_out(module, state, prefix)

        def taken(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
            owner = known()
            if owner is not None:
                table = owner._table_of(module)
                state.update(owner._filled(state, resumes=table is not None))
                if table is not None and prefix + "weight" in state:
                    owner._before_others_write(table)

        def shown_by(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
            owner = known()
            return None if owner is None else owner._leave_out_rows(optimizer, state)

        def taken_by(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
            owner = known()
            return None if owner is None else owner._filled(state)

        self._hooks.append(register_optimizer_step_pre_hook(before))
        self._hooks.append(register_optimizer_step_post_hook(after))
        weights = {id(table.weight): table for table in self._tables}
        for module in self._model.modules():
            table = weights.get(id(getattr(module, "weight", None)))
            if table is not None:
                self._modules.append((module, table))
                self._hooks += [
                    module.register_forward_pre_hook(_ids_hook(table.name, table.shape[0])),
                    module.register_forward_pre_hook(looked_up),
                    module.register_state_dict_post_hook(shown),
                    module.register_load_state_dict_pre_hook(taken),
                ]
        for optimizer in self._optimizers:
            self._hooks += [
                optimizer.register_state_dict_post_hook(shown_by),
                optimizer.register_load_state_dict_pre_hook(taken_by),
            ]

    def _before_step(
        self, optimizer: Optimizer, arguments: tuple[object, ...], named: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        if not self._has(optimizer):
            self._refuse_stranger(optimizer)
            return None
        closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)
        if not callable(closure):
            self._before_update(optimizer)
            return None

        def evaluate() -> object:
            result = closure()
            self._before_update(optimizer)
            return result

        if "closure" in named:
            return arguments, {**named, "closure": evaluate}
        return (arguments[0], evaluate, *arguments[2:]), named

    def _before_update(self, optimizer: Optimizer) -> None:
        self._check_usable()
        self._check_tables(optimizer)
        if not self._may_update:
            raise UsageError(
                f"{self._name}: the pool already holds a training; call `load` before the first "
                "update, or protect these tables with another pool"
            )
        if not self._in_batch and id(optimizer) in self._stepped:
            self._end()  # the others do not step in each batch
        self._worker.wait()
        self._look()
        mapped, rows = self._mapped, list[RowsThere]()
        for place, table in enumerate(self._tables):
            if table.optimizer is optimizer and table.touch():
                if mapped is not None:
                    rows += mapped.rows(table, table.touched[-1])
                if self._early is not None:
                    self._early.before_update(place, table.touched[-1])
        if mapped is not None:
            mapped.log(rows)

    def _before_others_write(self, table: Table) -> None:
        """A table is about to be loaded: what is committed of it stays where it is, and the batch
        before is durable as it was."""
        mapped = self._mapped
        if mapped is not None and self._store.newest is not None:
            self._keep_written()
        self._worker.wait()
        if mapped is not None and self._store.newest is not None:
            mapped.exchange(table)
            self._whole = True

    def _keep_written(self) -> None:
        """In place, what something else wrote to a table since the last batch is in the pool
        already: commit it, or the table would be damaged. Raises as ``wait``."""
        if self._mapped is None or self._stepped or self._in_batch or self._store.newest is None:
            return
        if self._may_update and any(each.was_written() for each in self._tables):
            self._take(self._batch)

    def _look(self) -> None:
        """Find out, before an update and when a batch is over, whether something else wrote to a
        table."""
        if self._whole:
            return
        written = [each.name for each in self._tables if not each.is_as_noted()]
        if written:
            self._whole = True
            _log.warning(
                "portus: %s changed outside of an update; all tables are saved in full",
                ", ".join(written),
            )

    def _after_step(self, optimizer: Optimizer) -> None:
        if self._has(optimizer):
            if self._early is not None:
                self._early.after_update()
            for table in self._tables:
                if table.optimizer is optimizer:
                    table.note()
            self._stepped.add(id(optimizer))
            if not self._in_batch and len(self._stepped) == len(self._optimizers):
                self._end()

    def _refuse_stranger(self, optimizer: Optimizer) -> None:
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for table in self._tables:
            if id(table.weight) in held:
                raise UsageError(
                    f"{table.name}: a {type(optimizer).__name__} is about to update it that was "
                    "not passed to `protect`; call `close`, and `protect` again with that optimizer"
                )

    def _check_tables(self, optimizer: Optimizer | None = None) -> None:
        """Raise ``UsageError`` if the model has not the tables that were protected; or if
        ``optimizer``, a protected one, is about to update one that is another's."""
        for module, table in self._modules:
            if module._parameters.get("weight") is not table.weight:
                raise UsageError(
                    f"{table.name}: its weight is another parameter than the one that was "
                    "protected, by an assignment or load_state_dict(assign=True): copy into it "
                    "instead; or call `close`, and `protect` again with optimizers of the new one"
                )
            table.require_same()
        if optimizer is None:
            return
        others = {id(each.weight): each for each in self._tables if each.optimizer is not optimizer}
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter.grad is not None and id(parameter) in others:
                raise UsageError(
                    f"{others[id(parameter)].name}: a {type(optimizer).__name__} is about to "
                    "update it that did not have it when it was protected; call `close`, and "
                    "`protect` again"
                )

    def _has(self, optimizer: Optimizer) -> bool:
        return any(optimizer is each for each in self._optimizers)

    def _table_of(self, module: torch.nn.Module) -> Table | None:
        """None for a module that is not protected: a copy of one has its hooks too."""
        return next((table for each, table in self._modules if each is module), None)

    # --- states that others save and load -------------------------------------------------------

    def _leave_out(self, module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
        table = self._table_of(module)
        if table is not None and self._shows_others():
            state[prefix + "weight"] = self._elsewhere("model", f"{table.name}.weight".lstrip("."))

    def _leave_out_rows(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        if not self._shows_others():
            return None
        number = next(i for i, each in enumerate(self._optimizers) if each is optimizer)
        rows = {
            tensor.data_ptr()
            for table in self._tables
            for tensor in table.tensors()[1:]
            if table.optimizer is optimizer
        }
        kept = {
            index: {
                key: self._elsewhere("optimizers", number, "state", index, key)
                if isinstance(value, torch.Tensor) and value.data_ptr() in rows
                else value
                for key, value in each.items()
            }
            for index, each in state["state"].items()
        }
        return {**state, "state": kept}

    def _shows_others(self) -> bool:
        """True if a requested state leaves the tables out. False until it is decided whether to
        resume the training in the pool."""
        return not self._collecting and self._may_update and os.getpid() == self._process

    def _elsewhere(self, *path: str | int) -> Elsewhere:
        batch, token = self._mark()
        return Elsewhere(self._name, token, batch, path)

    def _mark(self) -> tuple[int, str]:
        """The mark of what the tables hold now; blocks until it is durable."""
        self._check_usable()
        self._look()
        if self._stepped:
            self._end()
            self._ended_early = self._in_batch
        elif self._whole:
            self._take(self._batch)
        if self._marked is None or self._marked[0] != self._batch:
            token = os.urandom(16)
            with self._worker.alone():
                self._store.mark(self._batch, token, self._beyond())
            self._marked = self._batch, token.hex()
        return self._marked

    def _beyond(self) -> list[int]:
        """Marks that are not kept any more once there is another one, by their ids."""
        if self._keep is None:
            return []
        gone = self._store.marks()[: -self._keep + 1 or None]
        pins = pins_of(Place.named(self._name), self._pool)
        pinned = {each.reference.token for each in pins}
        return [each.info.id for each in gone if each.info.token.hex() not in pinned]

    def _filled(self, state: Any, *, resumes: bool = True) -> Any:
        """A state with what is elsewhere filled in; ``resumes``: training continues from there."""
        places: list[Elsewhere] = []

        def of(place: Elsewhere) -> object:
            places.append(place)
            if self._read is None or self._read[0] != place.token:
                self._read = place.token, marked(self._pool, place)
            return within(self._read[1], place.path)

        filled = replaced(state, of)
        if places and resumes:
            self._batch, self._may_update, self._whole = places[0].batch, True, True
            self._stepped.clear()
        return filled

    # --- the moment of a batch ------------------------------------------------------------------

    def _end(self) -> None:
        """The batch is over."""
        self._take(self._batch + 1)

    def _take(self, batch: int) -> None:
        """Take the moment of a batch, and have it made durable."""
        self._worker.wait()  # it reads what the next moment changes
        self._check_tables()
        self._look()
        self._read = self._marked = None
        try:
            moment = self._moment(batch)
            self._batch = batch
            self._mark_unchanged()
            self._worker.put(moment)
        except BaseException:  # Ctrl-C: the rows of this one may be nowhere but in the tables
            self._whole = True
            raise
        if moment.rows is None:  # it is read from the tables, which anybody may write to
            self._worker.settle()

    def _mark_unchanged(self) -> None:
        self._stepped.clear()
        for table in self._tables:
            table.touched.clear()
            table.note()

    def _moment(self, batch: int) -> Moment:
        mapped, dense = self._mapped, self._dense
        if dense is not None and self._leaves(dense, batch):
            return dense.with_rows(batch, self._tables, self._rows_ahead())
        if mapped is not None:
            self._whole = mapped.adopt() or self._whole
            mapped.measure()
        flat = self._flattener.flatten(self._state(batch))
        address = np.array([each.data_ptr() for each in flat.storages], np.int64)
        length = np.array([each.nbytes() for each in flat.storages], np.int64)
        index = {each.data_ptr(): place for place, each in enumerate(flat.storages)}
        places, digests = ({}, {}) if mapped is None else mapped.placed(index)
        rows = _changed(self._tables, index, places)
        copied = _copied(flat, address, length, rows)
        counter = index[self._counter.data_ptr()]
        others = {*range(len(length))} - rows.keys() - {counter} - {*digests.values()}
        left: set[int] = set()
        if self._slices and not self._whole and dense is not None:
            # After a load the durable one may be as old as it may be: this one is not sliced.
            left = others
        moment = Moment(
            batch=batch,
            layout=self._layout_of(flat),
            tree=flat.tree,
            address=address,
            length=length,
            rows=None if self._whole else rows,
            left=left,
            dense_batch=batch,
            sliced=self._slices if left else 0,
            alive=(flat, copied) if mapped is None else copied,  # else tables are the pool's own
        )
        self._whole = False
        if mapped is not None:
            moment = PlacedMoment.of(moment, places, digests, self._rows_ahead())
        if self._slices:
            self._dense = _Dense(moment, index, counter, others)
        return moment

    def _rows_ahead(self) -> list[RowsThere]:
        """Rows in the pool that the next batch was announced to update; said once."""
        if self._mapped is None:
            return []
        announced, self._announced = self._announced, {}
        return [
            each
            for place, number in announced.items()
            for each in self._mapped.rows(self._tables[place], number)
        ]

    def _leaves(self, dense: _Dense, batch: int) -> bool:
        """True if a batch needs no other dense part than that one."""
        if self._whole or batch - dense.moment.batch >= self._every - self._slices:
            return False
        tensors = (tensor for table in self._tables for tensor in table.tensors())
        return all(tensor.data_ptr() in dense.index for tensor in tensors)

    def _state(self, batch: int) -> dict[str, object]:
        self._collecting = True
        self._counter.fill_(batch)
        try:
            return {
                "batch": self._counter,
                "dense_batch": torch.tensor(batch, device="cpu"),
                "model": self._model.state_dict(),
                "optimizers": [each.state_dict() for each in self._optimizers],
                "extra": None if self._extra is None else self._extra(),
                **({} if self._mapped is None else {"digests": self._mapped.digests}),
            }
        finally:
            self._collecting = False

    def _layout_of(self, flat: FlatState) -> bytes:
        if flat.tensors is not self._specs:
            self._specs, self._layout = flat.tensors, encode_layout(flat.tensors)
        return self._layout

    @property
    def _name(self) -> str:
        return self._pool.medium.info.name

    def _check_usable(self) -> None:
        self._check_process()
        if self._closed:
            raise UsageError(f"{self._name}: used after it was closed")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise UsageError(
                f"{self._name}: protected in process {self._process}, used in process "
                f"{os.getpid()}: a forked child cannot use it"
            )


@dataclass(frozen=True, slots=True)
class _Dense:
    """A dense part that was copied: it stays as it was at its moment. ``index``: the place of each
    storage then, by its address; ``counter``: that of the number of the batch; ``others``: those
    of the dense part."""

    moment: Moment
    index: Mapping[int, int]
    counter: int
    others: Collection[int]

    def with_rows(self, batch: int, tables: Sequence[Table], ahead: Sequence[RowsThere]) -> Moment:
        """The moment of a later batch, with the rows that changed in it, and this dense part."""
        moment = self.moment
        if isinstance(moment, PlacedMoment):
            moment = replace(moment, ahead=ahead)
            rows = _changed(tables, self.index, moment.placed)
        else:
            rows = _changed(tables, self.index, ())
        counted, address = np.array([batch], np.int64), self.moment.address.copy()
        address[self.counter] = counted.ctypes.data
        return replace(
            moment,
            batch=batch,
            address=address,
            rows=rows,
            left=self.others,
            sliced=0,
            alive=(self.moment.alive, counted),
        )


class _Worker:
    """A thread that commits moments, one at a time, in order, and meanwhile folds the log in, and
    writes slices."""

    def __init__(self, store: TableStore) -> None:
        self._store: Final = store
        self._changed: Final = Changed()
        self._moment: Moment | None = None
        self._error: PortusError | None = None
        self._ended = False
        self._is_beside = False
        """The thread does something beside the batches: it folds in, or writes a slice."""
        self._is_held = False
        """It is to do none."""
        self._stop: Final = Stop(awaited=False)
        self._thread: Final = Beside(self._run, "portus-embedding")
        self._thread.start()

    def put(self, moment: Moment) -> None:
        """Start committing it. No other commit may be in flight."""
        with self._changed:
            assert self._moment is None
            self._moment = moment
            self._stop.awaited = True
            self._changed.notify_all()

    def settle(self) -> None:
        """Block until no commit is in flight. What it raised, the next ``wait`` raises."""
        with self._changed:
            self._changed.notify_all()  # Ctrl-C may have cut a ``put`` short
            self._changed.wait_for(lambda: self._moment is None)

    def wait(self) -> None:
        """Block until no commit is in flight. Raises what a commit raised, every time."""
        with self._changed:
            self.settle()
            if self._error is not None:
                raise self._error

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait, and have the store for this thread. Raises as ``wait``."""
        self.wait()
        with self._changed:
            self._is_held = self._stop.awaited = True
            try:
                self._changed.wait_for(lambda: not self._is_beside)
                if self._error is not None:
                    raise self._error
            except BaseException:
                self._is_held = self._stop.awaited = False
                raise
        try:
            yield
        finally:
            with self._changed:
                self._is_held = self._stop.awaited = False
                self._changed.notify_all()

    def end(self) -> None:
        """Wait, and end the thread. Raises as ``wait``."""
        try:
            self.wait()
        finally:
            with self._changed:
                self._ended = self._stop.awaited = True
                self._changed.notify_all()
            self._thread.join()

    def _run(self) -> None:
        while self._error is None:
            with self._changed:
                self._changed.wait_for(self._is_due)
                moment = self._moment
                if moment is None and self._ended:
                    return
                self._is_beside = moment is None or self._store.is_behind
            error = self._raised(self._go_on if self._is_beside else self._commit)
            with self._changed:
                if not self._is_beside or error is not None:
                    self._moment = None
                    self._stop.awaited = False
                self._is_beside = False
                self._error = error
                self._changed.notify_all()

    def _is_due(self) -> bool:
        if self._moment is not None or self._ended:
            return True
        return self._store.has_more and not self._is_held

    def _commit(self) -> None:
        assert self._moment is not None
        self._store.commit(self._moment)

    def _go_on(self) -> None:
        self._store.go_on(self._stop)

    def _raised(self, work: Callable[[], None]) -> PortusError | None:
        try:
            work()
        except PortusError as error:
            return error
        except BaseException as raised:  # a fault of ours: whoever waits must not wait for ever
            _log.exception("portus: a batch was not made durable; this is a bug in portus")
            return UsageError(f"a batch was not made durable: {raised!r}")
        return None


def _mapped(store: TableStore, tables: Sequence[Table]) -> Mapped | None:
    return Mapped(store, tables) if isinstance(store, PlacedStore) else None


def _require_same(
    tables: Sequence[Table], model: torch.nn.Module, saved: Mapping[str, Any]
) -> None:
    """Raise ``UsageError`` for a table of another shape or dtype than the saved one."""
    weights = {id(table.weight): table for table in tables}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        table, found = weights.get(id(parameter)), saved.get(name)
        if table is None or not isinstance(found, torch.Tensor):
            continue
        if found.shape != table.shape or found.dtype != table.dtype:
            raise UsageError(
                f"{table.name}: expected a table of {table.dtype} {tuple(table.shape)}, found "
                f"one of {found.dtype} {tuple(found.shape)} in the pool; nothing was loaded: make "
                "the table as it was, or protect this one with a new pool, and copy the rows from "
                "`portus.open`"
            )


def _changed(
    tables: Sequence[Table], index: Mapping[int, int], places: Collection[int]
) -> dict[int, Rows]:
    """The rows that changed since the last moment, copied, by the places of their storages; none of
    what is in the pool already, ``places``."""
    found: dict[int, Rows] = {}
    for table in tables:
        number = table.rows()
        for tensor in table.tensors():
            place = index[tensor.data_ptr()]
            found[place] = NO_ROWS if place in places else changed_rows(tensor, number)
    return found


def _of_torch(model: object, optimizer: object) -> list[Optimizer]:
    """The optimizers. Raises ``UsageError`` for what is none, and for what is no model."""
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
    """Raise ``UsageError`` for a table that somebody protects already: one of the two would not
    know what the other does."""
    for other in list(_OPEN):
        held = {id(each.weight) for each in other._tables}
        for table in tables:
            if id(table.weight) in held and not other._closed and other._process == os.getpid():
                raise UsageError(
                    f"{table.name}: it is protected already, in {other._name}; call `close` on "
                    "what `protect` returned for that"
                )


def _forget_locals(error: BaseException | None) -> None:
    """Of what raised: tables of a pool would be held by these as long as somebody has the error,
    and copied to memory when the pool is closed."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


def _load_optimizer(optimizer: Optimizer, saved: Any) -> None:
    """Raises ``ValueError`` if what was saved is of another kind of optimizer, also where torch
    does not say so."""
    name = type(optimizer).__name__
    settings = {
        key for group in optimizer.param_groups for key in group
    } & optimizer.defaults.keys()
    try:
        optimizer.load_state_dict(saved)
    except KeyError as error:
        raise ValueError(f"the pool has none of {name}'s {error}") from error
    for group in optimizer.param_groups:
        missing = sorted(settings - group.keys())
        if missing:
            raise ValueError(f"the pool has none of {name}'s {missing}")


def _load_rest(model: torch.nn.Module, rest: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Load a state that has no tables any more. Raises ``RuntimeError``, as torch does."""
    found = model.load_state_dict(rest, strict=False)
    missing = set(found.missing_keys) - (saved.keys() - rest.keys())
    if missing or found.unexpected_keys:
        raise RuntimeError(
            f"missing: {', '.join(sorted(missing))}; unexpected: {', '.join(found.unexpected_keys)}"
        )


def _copied(
    flat: FlatState, address: Any, length: Any, tables: Mapping[int, Rows]
) -> list[torch.Tensor]:
    """Copies of the storages that are no tables, whose addresses take the place of theirs."""
    copies = []
    for index, storage in enumerate(flat.storages):
        if index in tables or not length[index]:
            continue
        if storage.device.type == "cpu":
            copy = torch.empty(int(length[index]), dtype=torch.uint8, device="cpu")
            ctypes.memmove(copy.data_ptr(), int(address[index]), int(length[index]))
        else:
            copy = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage.cpu())
        address[index] = copy.data_ptr()
        copies.append(copy)
    return copies


def _ids_hook(name: str, rows: int) -> Callable[[torch.nn.Module, tuple[object, ...]], None]:
    def check(module: torch.nn.Module, arguments: tuple[object, ...]) -> None:
        if arguments:
            check_ids(name, rows, arguments[0])

    return check


_OPEN: Final[weakref.WeakSet[Protected]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A program that ends without closing still has its last batch durable."""
    for protected in list(_OPEN):
        try:
            protected.close()
        except PortusError as error:  # nobody is left to catch it
            _log.error("portus: tables: the last batch is not durable: %s", error)
