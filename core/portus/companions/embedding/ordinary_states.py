"""States for ordinary checkpoints: they have no tables, but a mark in place of each.

So a checkpoint beside the tables is as small as the dense part, and a training that loads it
continues with the tables of that very batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.optim import Optimizer

from portus.companions.embedding.batches import Batches
from portus.companions.embedding.marks import Marks
from portus.companions.embedding.tables import Table
from portus.companions.embedding.training import ProtectedTraining
from portus.engine.state.elsewhere import Elsewhere
from portus.reach.pools.elsewhere import replace_elsewhere

_ABOUT: Final = "portus.embedding"
"""The key for the pool and the batch in the metadata of a module's state (``_metadata``)."""


class OtherStates:
    """The states of one training in ``state_dict`` and ``load_state_dict``. For the training thread
    alone."""

    def __init__(self, training: ProtectedTraining, batches: Batches, marks: Marks) -> None:
        self._training: Final = training
        self._batches: Final = batches
        self._marks: Final = marks

    def leave_out(
        self, table: Table, state: dict[str, Any], prefix: str, about: dict[str, Any]
    ) -> None:
        """Put a mark in place of the table in a module's state, if ``may_mark`` allows. about:
        receives the origin of the table, for a file that has the table filled in."""
        if self._batches.may_mark:
            place = self._elsewhere("model", table.key)
            state[prefix + "weight"] = place
            about[_ABOUT] = {"pool": self._training.identity, "batch": place.batch}

    def go_on_from(self, about: Mapping[str, Any]) -> None:
        """Continue at the batch that the metadata of a loaded table name, if they are of this
        training."""
        known = about.get(_ABOUT)
        if isinstance(known, Mapping) and known.get("pool") == self._training.identity:
            batch = known.get("batch")
            if type(batch) is int and batch >= 0:
                self._batches.go_on_from_mark(batch)

    def leave_out_rows(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Return an optimizer's state with marks in place of its row tensors, or None if the state
        has none."""
        if not self._batches.may_mark:
            return None
        optimizers = self._training.optimizers
        number = next(i for i, each in enumerate(optimizers) if each is optimizer)
        rows = {
            tensor.data_ptr()
            for table in self._training.tables
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

    def fill(self, state: Any, *, resumes: bool = True) -> Any:
        """Return a state with its marks filled in; ``resumes``: training continues from there."""
        places: list[Elsewhere] = []

        def of(place: Elsewhere, path: str) -> object:
            places.append(place)
            return self._marks.read(place)

        filled = replace_elsewhere(state, of)
        if places and resumes:
            self._batches.go_on_from_mark(places[0].batch)
        return filled

    def _elsewhere(self, *path: str | int) -> Elsewhere:
        batch, token = self._batches.mark()
        return Elsewhere(self._training.name, token, batch, path)
