"""Tables that are protected in trainings of Lightning and Accelerate: their checkpoints come back
with the tables of their step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import portus.embedding
from portus.companions.embedding.store import MODEL
from portus.errors import UsageError
from tests.adapters.tiny import NO_FUSS, files, trainer

pytestmark = [
    *NO_FUSS,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]

ROWS = 40
BATCHES = [torch.tensor([[n % ROWS, 3 * n % ROWS], [7 * n % ROWS, 1]]) for n in range(12)]


class Rows(torch.nn.Module):
    """A table and a layer, with an optimizer for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = torch.nn.EmbeddingBag(ROWS, 4, mode="sum", sparse=True)
        self.top = torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.top(self.table(ids)).pow(2).mean()
        return loss


def optimizers(rows: Rows) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adagrad(rows.table.parameters(), lr=0.5),
        torch.optim.Adam(rows.top.parameters(), lr=0.1),
    ]


def loader() -> DataLoader[Any]:
    return DataLoader(BATCHES, batch_size=None)  # type: ignore[arg-type]


def table_of(pool: Path) -> torch.Tensor:
    """As the pool has it."""
    with portus.open(pool) as view:
        state: Any = view.load(MODEL)
    found: torch.Tensor = state["model"]["table.weight"]
    return found


class Module(LightningModule):
    """One optimizer, which Lightning steps with a closure: gradients are there after it."""

    def __init__(self, pool: Path | None) -> None:
        super().__init__()
        self.rows = Rows()
        self.optimizer = torch.optim.Adagrad(self.rows.parameters(), lr=0.5)
        self.tables = None
        if pool is not None:  # before weights are loaded: they lead to the pool
            self.tables = portus.embedding.protect(self.rows, self.optimizer, pool=pool)

    def training_step(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.rows(ids)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer

    def on_fit_end(self) -> None:
        if self.tables is not None:
            self.tables.close()


@pytest.mark.long
def test_lightning_resumes_with_the_tables_of_the_checkpoint_that_it_loads(tmp_path: Path) -> None:
    pool = tmp_path / "tables.portus"

    def fit(module: Module, steps: int, **more: Any) -> None:
        saves = ModelCheckpoint(
            dirpath=tmp_path / "ckpt", filename="{step}", every_n_train_steps=3, save_top_k=-1
        )
        made = trainer(tmp_path, callbacks=[saves], max_steps=steps)
        made.fit(module, loader(), **more)

    whole = Module(None)
    trainer(tmp_path, max_steps=8, enable_checkpointing=False).fit(whole, loader())
    first = Module(pool)
    fit(first, 5)
    assert files(tmp_path) == ["step=3.ckpt"]
    assert torch.equal(table_of(pool), first.rows.table.weight.detach())
    again = Module(pool)
    fit(again, 8, ckpt_path=str(tmp_path / "ckpt" / "step=3.ckpt"))
    for name, value in whole.rows.state_dict().items():
        assert torch.equal(again.rows.state_dict()[name], value), name
    assert torch.equal(table_of(pool), whole.rows.table.weight.detach())


def test_files_of_lightning_have_their_tables(tmp_path: Path) -> None:
    pool = tmp_path / "tables.portus"
    kept: dict[str, torch.Tensor] = {}

    class Noting(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 3:
                kept.update(copy.deepcopy(dict(self.rows.named_parameters())))

    saves = ModelCheckpoint(
        dirpath=tmp_path / "ckpt", filename="{step}", every_n_train_steps=3, save_top_k=-1
    )
    trainer(tmp_path, callbacks=[saves], max_steps=5).fit(Noting(pool), loader())
    pool.unlink()
    state = torch.load(tmp_path / "ckpt" / "step=3.ckpt", weights_only=True)
    for name, value in kept.items():
        assert torch.equal(state["state_dict"][f"rows.{name}"], value.detach())
    kept_of_rows = state["optimizer_states"][0]["state"][0]["sum"]
    assert kept_of_rows.shape == (ROWS, 4)


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    yield Accelerator(cpu=True)
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def test_accelerate_loads_a_state_with_the_tables_of_its_step(
    tmp_path: Path, accelerator: Accelerator
) -> None:
    pool, rows = tmp_path / "tables.portus", Rows()
    both = optimizers(rows)
    with portus.embedding.protect(rows, both, pool=pool) as tables:
        model, *prepared = accelerator.prepare(rows, *both)
        kept = torch.empty(0)
        for number, ids in enumerate(BATCHES, 1):
            accelerator.backward(model(ids))
            for optimizer in prepared:
                optimizer.step()
                optimizer.zero_grad()
            if number == 4:
                accelerator.save_state(str(tmp_path / "state"), safe_serialization=False)
                kept = rows.table.weight.detach().clone()
        assert tables.batches == len(BATCHES)
        assert not torch.equal(rows.table.weight, kept)
        accelerator.load_state(str(tmp_path / "state"))
        assert torch.equal(rows.table.weight, kept)
        assert tables.batches == 4


def test_an_optimizer_that_accelerate_has_prepared_is_refused_with_what_to_do(
    tmp_path: Path, accelerator: Accelerator
) -> None:
    rows = Rows()
    model, *prepared = accelerator.prepare(rows, *optimizers(rows))
    with pytest.raises(UsageError, match=r"protect the tables before `accelerator\.prepare`"):
        portus.embedding.protect(model, prepared, pool=tmp_path / "tables.portus")
