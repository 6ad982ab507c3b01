"""A training with embedding tables that are protected: killed at any moment, it goes on where it
was. Dropout and a scheduler: a batch that was lost or done twice shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import portus
from portus.companions.embedding.store import MODEL
from portus.embedding import ProtectedTables, RowwiseAdagrad, protect
from portus.engine.spec import PAGE
from tests.device import stand_in
from tests.nursery import Say

ROWS = (700, 300, 50)
LOG = 150 * PAGE
FACTS = "facts"
CPU = torch.device("cpu")


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = torch.nn.EmbeddingBag(ROWS[0], 8, mode="sum", sparse=True)
        self.items = torch.nn.Embedding(ROWS[1], 6, sparse=True)
        self.users = torch.nn.Embedding(ROWS[2], 3, sparse=True)
        self.norm = torch.nn.BatchNorm1d(17)
        self.drop = torch.nn.Dropout(0.2)
        self.top = torch.nn.Linear(17, 1)

    def forward(self, bags: torch.Tensor, items: torch.Tensor, users: torch.Tensor) -> Any:
        found = torch.cat([self.bags(bags), self.items(items), self.users(users)], 1)
        return self.top(self.drop(self.norm(found)))


class Training:
    """The model, an optimizer for each part of it, and a scheduler."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = Tiny()
        rest = [*self.model.norm.parameters(), *self.model.top.parameters()]
        self.optimizers: list[Any] = [
            torch.optim.SparseAdam([self.model.bags.weight], lr=0.05),
            torch.optim.Adagrad([self.model.items.weight], lr=0.05),
            RowwiseAdagrad([self.model.users.weight], lr=0.05),
            torch.optim.AdamW(rest, lr=0.01),
        ]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[3], 7, 0.9)

    def extra(self) -> dict[str, Any]:
        return {
            "scheduler": self.scheduler.state_dict(),
            "randomness": portus.capture_randomness(CPU),
        }

    def protected(self, path: str, **settings: Any) -> ProtectedTables:
        settings = {"log_bytes": LOG, **settings}
        return protect(self.model, self.optimizers, pool=path, extra=self.extra, **settings)

    def load(self, tables: ProtectedTables) -> int:
        resumed = tables.load()
        if resumed is None:
            return 0
        extra: Any = resumed.extra
        self.scheduler.load_state_dict(extra["scheduler"])
        portus.restore_randomness(extra["randomness"], CPU)
        return resumed.batch

    def step(self, number: int) -> None:
        chance = torch.Generator().manual_seed(number)
        ids = [torch.randint(0, ROWS[0], (16, 3), generator=chance)]
        ids += [torch.randint(0, rows, (16,), generator=chance) for rows in ROWS[1:]]
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model(*ids).pow(2).mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.scheduler.step()

    def parts(self) -> str:
        """A digest of the tables and of what is kept of their rows, and one of the rest."""
        rows, rest = xxhash.xxh3_128(), xxhash.xxh3_128()
        for each in (*self.model.norm.buffers(), *self.model.norm.parameters()):
            rest.update(each.detach().numpy().tobytes())
        for optimizer in self.optimizers:
            for parameter in optimizer.param_groups[0]["params"]:
                kept = optimizer.state.get(parameter, {})
                for each in (parameter.detach(), *(kept[key] for key in sorted(kept))):
                    is_rows = optimizer is not self.optimizers[3] and torch.as_tensor(each).ndim
                    data = torch.as_tensor(each).numpy().tobytes()
                    (rows if is_rows else rest).update(data)
        return f"{rows.hexdigest()} {rest.hexdigest()}"

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
            "scheduler": self.scheduler.state_dict(),
        }


def same(one: Any, other: Any) -> bool:
    """True if two states have the same bits."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def device(path: str) -> bool:
    """True if a file beside the pool says that it stands in for a device: it does from now on."""
    facts = Path(path).with_name(FACTS)
    if facts.exists():
        stand_in(path, str(facts), pytest.MonkeyPatch())
    return facts.exists()


def run(say: Say, path: str) -> None:
    """Until it is killed. Tells the batch that it found, and each that it has done."""
    training = Training()
    with training.protected(path, in_place=device(path)) as tables:
        number = training.load(tables)
        say(f"resumed {number}")
        while True:
            number += 1
            with tables.batch():
                training.step(number)
            say(f"batch {number}")


GAP = 8


def relax(say: Say, path: str) -> None:
    """The same in relaxed mode. With each batch, what the tables are then, and the dense part; with
    the one that it found, the batch of its dense part too."""
    training = Training()
    settings = {"mode": "relaxed", "gap": GAP, "in_place": device(path)}
    with training.protected(path, **settings) as tables:
        resumed = tables.load()
        number = 0 if resumed is None else resumed.batch
        say(f"resumed {number} {0 if resumed is None else resumed.dense_batch} {training.parts()}")
        while True:
            number += 1
            with tables.batch():
                training.step(number)
            say(f"batch {number} {training.parts()}")


def compare(say: Say, path: str) -> None:
    """Tells what is durable, and whether it is what a training has that nobody killed."""
    killed = Training()
    with killed.protected(path, in_place=device(path)) as tables:
        done = killed.load(tables)
    with portus.open(path) as view:
        found: Any = view.load(MODEL)
    whole = Training()
    for number in range(1, done + 1):
        whole.step(number)
    expected = whole.state()
    is_same = all(same(found[part], expected[part]) for part in ("model", "optimizers"))
    is_same &= same(found["extra"]["scheduler"], expected["scheduler"])
    say(f"{'same' if is_same and found['batch'].item() == done else 'other'} {done}")
