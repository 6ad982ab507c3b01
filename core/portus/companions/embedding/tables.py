"""The tables of a model, the rows that an update changes, and the rows that it must not change.

An update of an ``Embedding`` or ``EmbeddingBag`` with ``sparse=True`` changes the rows that the
gradient names, by the optimizers in ``_NEEDED``. After a reduction over ranks these are the rows
that any rank looked up. The optimizer state of these rows changes too.

An update that would change a table unnoticed is refused before it does: by an unknown optimizer, of
a replaced weight, or in a forked child.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from portus.companions.embedding.moment import Rows
from portus.errors import UsageError
from portus.reach.index.pool import PoolWriter


class RowwiseAdagrad(Optimizer):
    """Row-wise Adagrad, as in fbgemm's embedding tables (``EXACT_ROWWISE_ADAGRAD``, without weight
    decay). For each row with a gradient g:

        s <- s + mean(g ** 2)
        row <- row - lr * g / (sqrt(s) + eps)

    Gradients must be sparse. The sum s has shape (rows,) and dtype float32, on the weight's device.
    """

    def __init__(
        self, params: Iterable[torch.Tensor], lr: float = 1e-2, *, eps: float = 1e-8
    ) -> None:
        if not lr >= 0 or not eps >= 0:
            raise ValueError(
                f"RowwiseAdagrad: expected lr and eps of at least 0, found {lr} and {eps}"
            )
        super().__init__(params, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["sum"] = torch.zeros(
                    weight.shape[0], dtype=torch.float32, device=weight.device
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters once. Raises ``RuntimeError`` for a dense gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if not weight.grad.is_sparse:
                    raise RuntimeError(
                        "RowwiseAdagrad: expected a sparse gradient, found a dense one"
                    )
                gradient = weight.grad.coalesce()
                number, values = gradient.indices()[0], gradient.values()
                total = self.state[weight]["sum"]
                total.index_add_(0, number, values.float().pow(2).flatten(1).mean(1))
                scale = group["lr"] / (total[number].sqrt() + group["eps"])
                shape = (-1, *([1] * (values.ndim - 1)))
                weight.index_add_(0, number, -(values * scale.reshape(shape)).to(weight.dtype))
        return loss


_KINDS: Final = (torch.nn.Embedding, torch.nn.EmbeddingBag)

_NEEDED: Final[dict[type[Optimizer], tuple[str, ...]]] = {
    SGD: ("momentum", "weight_decay"),
    Adagrad: ("weight_decay",),
    SparseAdam: (),
    RowwiseAdagrad: (),
}
"""Optimizers that change only rows in a sparse gradient, and settings that must be 0 for that."""

_COALESCING: Final = (Adagrad, SparseAdam, RowwiseAdagrad)
"""Optimizers that coalesce the gradient before any other use of it."""

Known = tuple[int, int]
"""The address of a tensor's memory, and how many writes torch counted."""


@dataclass(slots=True)
class Table:
    """One table, and the optimizer that updates it. ``touched``: rows that updates changed since
    the last moment was taken."""

    name: str
    weight: torch.nn.Parameter
    optimizer: Optimizer | None
    shape: torch.Size
    dtype: torch.dtype
    touched: list[torch.Tensor] = field(default_factory=list)
    known: list[Known] = field(default_factory=list)
    """The fingerprint of each tensor at the last moment or the end of an update."""

    @property
    def key(self) -> str:
        """The key of the table in the state of the model."""
        return f"{self.name}.weight".lstrip(".")

    def tensors_by_key(self) -> dict[str | None, torch.Tensor]:
        """Return the table, by None, and the optimizer state of its rows, by key."""
        state: dict[str, Any] = {} if self.optimizer is None else self.optimizer.state[self.weight]
        found: dict[str | None, torch.Tensor] = {None: self.weight.detach()}
        for key, each in state.items():
            if isinstance(each, torch.Tensor) and each.ndim and each.shape[0] == self.shape[0]:
                found[key] = each
        return found

    def tensors(self) -> list[torch.Tensor]:
        """Return the table, and the optimizer state of its rows."""
        return list(self.tensors_by_key().values())

    def note(self) -> None:
        """Record the fingerprints of the table's tensors, to detect writes by other code."""
        self.known = [fingerprint(each) for each in self.tensors()]

    def is_as_noted(self) -> bool:
        """Return False if other code wrote to the table, or replaced its rows' state."""
        return self.known == [fingerprint(each) for each in self.tensors()][: len(self.known)]

    def was_written(self) -> bool:
        """Return whether other code wrote to the table since, at the same address."""
        now = dict(fingerprint(each) for each in self.tensors())
        return any(now.get(place, count) != count for place, count in self.known)

    def touch(self) -> bool:
        """Record which rows the next update changes; return False if it changes none. Raise
        ``UsageError`` before anything is changed, naming what is not as it was protected."""
        if self.optimizer is not None:
            check_optimizer(self.name, self.weight, self.optimizer)
        gradient = self.weight.grad
        if gradient is None:
            return False
        if gradient.layout is not torch.sparse_coo:
            raise UsageError(
                f"{self.name}: expected a sparse gradient, found a dense one: is the table also "
                "used elsewhere in the model, or was sparse=True reset?"
            )
        if type(self.optimizer) in _COALESCING and not gradient.is_coalesced():
            # Here, so that the optimizer, which would do the same, need not do it again.
            self.weight.grad = gradient = gradient.coalesce()
        # ``indices()`` raises if the gradient is not coalesced.
        number = gradient._indices()[0]
        if not gradient.is_coalesced():
            number = torch.unique(number)
        if len(number) and not 0 <= int(number.min()) <= int(number.max()) < self.shape[0]:
            raise UsageError(
                f"{self.name}: expected a gradient of rows 0 to {self.shape[0] - 1}, found rows "
                f"{int(number.min())} to {int(number.max())}; nothing was updated"
            )
        self.touched.append(number.detach())
        return True

    def rows(self) -> torch.Tensor:
        """Return the distinct rows that changed since the last moment, in order."""
        if not self.touched:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        return self.touched[0] if len(self.touched) == 1 else torch.unique(torch.cat(self.touched))

    def require_saved(self, saved: Any) -> None:
        """Raise ``UsageError`` unless the saved optimizer state of the rows fits this table."""
        assert self.optimizer is not None
        params = _parameters_of(self.optimizer)
        place = next(i for i, each in enumerate(params) if each is self.weight)
        numbers = [each for group in saved["param_groups"] for each in group["params"]]
        if place >= len(numbers):
            return  # torch says what does not fit
        for key, each in saved["state"].get(numbers[place], {}).items():
            kept = isinstance(each, torch.Tensor) and each.ndim
            if kept and each.shape not in (self.shape, self.shape[:1]):
                raise UsageError(
                    f"{self.name}: expected {key!r} of {tuple(self.shape)} in its optimizer's "
                    f"state, found {tuple(each.shape)} in the pool; nothing was loaded: pass the "
                    "optimizers in the order in which they were saved"
                )


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
        return self._pool.uuid.hex()

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

    def check_tables(self) -> None:
        """Raise ``UsageError`` if the model does not have the protected tables any more."""
        for module, table in self.modules:
            if module._parameters.get("weight") is not table.weight:
                raise UsageError(
                    f"{table.name}: its weight is another parameter than the one that was "
                    "protected, by an assignment or load_state_dict(assign=True): copy into it "
                    "instead; or call `close`, and `protect` again with optimizers of the new one"
                )
            weight = table.weight
            if weight.dtype != table.dtype or weight.shape != table.shape:
                raise UsageError(
                    f"{table.name}: expected a table of {table.dtype} {tuple(table.shape)}, as "
                    f"protected, found {weight.dtype} {tuple(weight.shape)}; call `close`, and "
                    "protect the new table with a new pool"
                )

    def check_optimizers(self) -> None:
        """Raise ``UsageError`` if an optimizer of a table may not update it any more."""
        for table in self.tables:
            if table.optimizer is not None:
                check_optimizer(table.name, table.weight, table.optimizer)

    def check_update(self, optimizer: Optimizer) -> None:
        """Raise ``UsageError`` as ``check_tables``, and if an optimizer is about to update the
        table of another one. Gradients of an unknown one may come later, from a closure."""
        is_known = self.has(optimizer)
        if is_known:
            self.check_tables()
        others = {id(each.weight): each for each in self.tables if each.optimizer is not optimizer}
        for parameter in _parameters_of(optimizer):
            if id(parameter) in others and (parameter.grad is not None or not is_known):
                found = "did not have it when it was protected"
                raise UsageError(
                    f"{others[id(parameter)].name}: a {type(optimizer).__name__} is about to "
                    f"update it that {found if is_known else 'was not passed to `protect`'}; call "
                    "`close`, and `protect` again with that optimizer"
                )


def tables_of(
    model: torch.nn.Module, optimizers: Sequence[Optimizer], *, in_place: bool = False
) -> list[Table]:
    """Return the tables of a model, each once. in_place: they may have no bytes yet ("meta"). Raise
    ``UsageError`` naming a table that cannot be protected, and why."""
    devices = ("cpu", "meta") if in_place else ("cpu",)
    found: dict[int, Table] = {}
    for name, module in model.named_modules():
        if isinstance(module, _KINDS) and module.sparse and id(module.weight) not in found:
            found[id(module.weight)] = _table(name, module, optimizers, devices)
    if not found:
        raise UsageError(
            "protect: the model has no Embedding or EmbeddingBag with sparse=True; without it each "
            "update changes all rows: save such a model with a Checkpointer"
        )
    _refuse_others(model, found)
    return list(found.values())


def _refuse_others(model: torch.nn.Module, tables: Mapping[int, Table]) -> None:
    """Raise ``UsageError`` if a module that is not a table with sparse=True has a table's
    parameter: its gradients are dense, or unknown."""
    for name, module in model.named_modules():
        is_table = isinstance(module, _KINDS) and module.sparse
        for key, parameter in module._parameters.items():
            table = tables.get(id(parameter))
            if table is not None and not (is_table and key == "weight"):
                raise UsageError(
                    f"{table.name}: the {type(module).__name__} {name or 'model'!r} has it too, "
                    f"as {key!r}, so an update may change all of its rows; give that module a "
                    "parameter of its own, or make the Embedding with sparse=False and save the "
                    "model with a Checkpointer"
                )


def check_ids(name: str, rows: int, ids: object) -> None:
    """Raise ``UsageError`` for ids that the table does not have."""
    if isinstance(ids, torch.Tensor) and ids.numel() and not ids.is_meta:
        low, high = (int(each) for each in torch.aminmax(ids))
        if low < 0 or high >= rows:
            raise UsageError(
                f"{name}: expected ids from 0 to {rows - 1}, found {low if low < 0 else high}; "
                "nothing was looked up"
            )


def check_optimizer(name: str, weight: torch.nn.Parameter, optimizer: Optimizer) -> None:
    """Raise ``UsageError`` for an optimizer that changes rows that no batch looked up."""
    kind = type(optimizer)
    within = getattr(optimizer, "optimizer", None)
    if kind not in _NEEDED and isinstance(within, Optimizer):
        raise UsageError(
            f"{name}: expected an optimizer of torch, found a {kind.__name__} around a "
            f"{type(within).__name__}; protect the tables before `accelerator.prepare`, with the "
            "optimizer itself"
        )
    if kind not in _NEEDED:
        names = ", ".join(each.__name__ for each in _NEEDED)
        raise UsageError(
            f"{name}: {kind.__name__} may change rows that a batch did not look up, so Portus "
            f"cannot tell which rows changed; use one of {names}"
        )
    owning = [each for each in optimizer.param_groups if any(p is weight for p in each["params"])]
    if not owning:
        raise UsageError(
            f"{name}: the {kind.__name__} that had it when it was protected no longer has it; call "
            "`close`, and `protect` again with the optimizer that has it"
        )
    [group] = owning
    for key in _NEEDED[kind]:
        if group[key]:
            raise UsageError(
                f"{name}: {kind.__name__} with {key}={group[key]} changes rows that a batch did "
                f"not look up; set {key}=0 for the table"
            )


def copy_rows(tensor: torch.Tensor, number: torch.Tensor) -> Rows:
    """Return copies of rows of a table."""
    data = tensor.index_select(0, number).contiguous().view(torch.uint8)
    row = tensor.nbytes // tensor.shape[0]
    return Rows(number.numpy(), data.reshape(len(number), row).numpy())


def fingerprint(tensor: torch.Tensor) -> Known:
    """Return the fingerprint of a tensor, which changes with each write that torch counts."""
    return tensor.data_ptr(), tensor._version


def _table(
    name: str,
    module: torch.nn.Embedding | torch.nn.EmbeddingBag,
    optimizers: Sequence[Optimizer],
    devices: Sequence[str],
) -> Table:
    weight = module._parameters.get("weight")
    if weight is None:
        raise UsageError(
            f"{name}: expected a weight that is a parameter, found one that is computed "
            "(torch.nn.utils.parametrize); such a table cannot be protected"
        )
    if module.max_norm is not None:
        raise UsageError(
            f"{name}: max_norm changes rows in the forward pass, before any update; such a "
            "table cannot be protected"
        )
    if weight.device.type not in devices or type(weight.data) is not torch.Tensor:
        raise UsageError(f"{name}: expected a table in CPU memory, found {weight.device}")
    if not weight.numel():
        raise UsageError(f"{name}: expected a table with rows, found {tuple(weight.shape)}")
    if not weight.is_contiguous() or weight.untyped_storage().nbytes() != weight.nbytes:
        raise UsageError(f"{name}: expected a table that owns its memory, found a view")
    owners = [each for each in optimizers if any(p is weight for p in _parameters_of(each))]
    if weight.requires_grad and len(owners) != 1:
        raise UsageError(
            f"{name}: expected it in exactly one of the optimizers, found it in {len(owners)}; "
            "pass every optimizer that steps in a batch, each once"
        )
    optimizer = owners[0] if owners else None
    if optimizer is not None:
        check_optimizer(name, weight, optimizer)
    return Table(name, weight, optimizer, weight.shape, weight.dtype)


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def settings_of(optimizers: Sequence[Optimizer]) -> str:
    """Return learning rates, momenta and other settings of the groups, for comparison."""

    def value(each: object) -> object:
        return each.tolist() if isinstance(each, torch.Tensor) else each

    return repr(
        [
            {key: value(each) for key, each in group.items() if key != "params"}
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
    )
