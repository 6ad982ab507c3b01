"""The protected training: one model, in one pool, in one process; and the checks that it stays the
same.

An update that would change a table unnoticed is refused before it does: by an unknown optimizer, of
a replaced weight, or in a forked child.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import torch
from torch.optim import Optimizer

from portus.companions.embedding.tables import Table, check_ids, check_optimizer
from portus.errors import UsageError
from portus.reach.index.pool import PoolWriter


class ProtectedTraining:
    """A model, its optimizers and its tables, from when they are protected until ``is_closed``."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[Optimizer],
        tables: Sequence[Table],
        pool: PoolWriter,
    ) -> None:
        self.model: Final = model
        self.optimizers: Final = list(optimizers)
        self.tables: Final = tables
        self._pool: Final = pool
        self._process: Final = os.getpid()
        self.is_closed = False
        weights = {id(table.weight): table for table in tables}
        self.modules: Final[list[tuple[torch.nn.Module, Table]]] = [
            (module, weights[id(weight)])
            for module in model.modules()
            if id(weight := getattr(module, "weight", None)) in weights
        ]
        """Each module with a table, which it may share with another."""

    @property
    def name(self) -> str:
        """The name of the pool."""
        return self._pool.medium.info.name

    @property
    def identity(self) -> str:
        """The UUID of the pool, in hex."""
        return self._pool.superblock.uuid.hex()

    @property
    def optimizer_kinds(self) -> list[str]:
        """The class names of the optimizers: a state of one class may load into another."""
        return [type(each).__name__ for each in self.optimizers]

    @property
    def is_ours(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self._process

    def has(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer was passed to ``protect``."""
        return any(optimizer is each for each in self.optimizers)

    def table_of(self, module: torch.nn.Module) -> Table | None:
        """Return the table of a module, or None if it is not protected: copies of modules have
        hooks too."""
        return next((table for each, table in self.modules if each is module), None)

    def check_usable(self) -> None:
        """Raise ``UsageError`` if the training is closed, or in a forked child."""
        self.check_process()
        if self.is_closed:
            raise UsageError(f"{self.name}: used after it was closed")

    def check_process(self) -> None:
        """Raise ``UsageError`` in a forked child."""
        if not self.is_ours:
            raise UsageError(
                f"{self.name}: protected in process {self._process}, used in process "
                f"{os.getpid()}: a forked child cannot use it"
            )

    def check_lookup(self, module: torch.nn.Module, arguments: Sequence[object]) -> None:
        """Raise ``UsageError`` before a lookup of ids that the table does not have, or one that
        would change rows."""
        table = self.table_of(module)
        if table is None:
            return
        check_ids(table.name, table.shape[0], arguments[0] if arguments else None)
        if module.max_norm is not None:
            raise UsageError(
                f"{table.name}: max_norm={module.max_norm} changes rows in the forward pass, "
                "before any update; set it to None"
            )

    def check_stranger(self, optimizer: Optimizer) -> None:
        """Raise ``UsageError`` if an unknown optimizer is about to update a table."""
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for table in self.tables:
            if id(table.weight) in held:
                raise UsageError(
                    f"{table.name}: a {type(optimizer).__name__} is about to update it that was "
                    "not passed to `protect`; call `close`, and `protect` again with that optimizer"
                )

    def check_tables(self) -> None:
        """Raise ``UsageError`` if the model does not have the protected tables any more."""
        for module, table in self.modules:
            if module._parameters.get("weight") is not table.weight:
                raise UsageError(
                    f"{table.name}: its weight is another parameter than the one that was "
                    "protected, by an assignment or load_state_dict(assign=True): copy into it "
                    "instead; or call `close`, and `protect` again with optimizers of the new one"
                )
            table.require_same()

    def check_optimizers(self) -> None:
        """Raise ``UsageError`` if an optimizer of a table may not update it any more."""
        for table in self.tables:
            if table.optimizer is not None:
                check_optimizer(table.name, table.weight, table.optimizer)

    def check_update(self, optimizer: Optimizer) -> None:
        """Raise ``UsageError`` as ``check_tables``, and if an optimizer is about to update the
        table of another one."""
        self.check_tables()
        others = {id(each.weight): each for each in self.tables if each.optimizer is not optimizer}
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter.grad is not None and id(parameter) in others:
                raise UsageError(
                    f"{others[id(parameter)].name}: a {type(optimizer).__name__} is about to "
                    "update it that did not have it when it was protected; call `close`, and "
                    "`protect` again"
                )
