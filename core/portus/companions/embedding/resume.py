"""The resuming of a training: its state is loaded from the pool into the model and its optimizers.

A state that does not fit is refused, if possible before anything of the model is changed.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from portus.companions.embedding.mapping import MappedTables
from portus.companions.embedding.tables import Table
from portus.companions.embedding.training import ProtectedTraining
from portus.errors import UsageError
from portus.reach.index.reader import PoolReader
from portus.reach.index.records import VersionEntry
from portus.reach.pools.restore import load


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The batch at which training resumes.

    batch: how many batches the tables contain. dense_batch: how many the dense part contains; equal
    to ``batch`` in strict mode. extra: the result of the function ``extra`` at the dense part.
    """

    batch: int
    dense_batch: int
    extra: object


def resume(
    pool: PoolReader,
    newest: VersionEntry,
    training: ProtectedTraining,
    mapped: MappedTables | None,
    gap_max: int,
) -> ResumePoint:
    """Load a version of the tables into a training. gap_max: the most batches by which its dense
    part may be older than they are. Raises as ``ProtectedTables.load``."""
    model, optimizers = training.model, training.optimizers
    state: Any = load(pool, newest) if mapped is None else mapped.load()
    batch, dense_batch = int(state["batch"]), int(state["dense_batch"])
    if batch - dense_batch > gap_max:
        raise UsageError(
            f"{training.name}: expected a dense part that is at most {gap_max} batches older than "
            f"the tables, found {batch - dense_batch} (batch {dense_batch}, tables at batch "
            f"{batch}); pass a larger gap_max to load it anyway"
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
            f"{training.name}: the saved state does not fit this model and its optimizers; load "
            f"it with those that saved it, or use another pool: {error}"
        ) from error
    return ResumePoint(batch, dense_batch, state["extra"])


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
