"""Learning rates of protected trainings: what a loop does to them after an update is of that batch,
wherever the training ends."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import portus
from portus.companions.embedding.tables import settings_of
from portus.embedding import ProtectedTables, protect
from portus.engine.spec import PAGE
from portus.errors import UsageError

CPU = torch.device("cpu")
LOG = 60 * PAGE
BATCHES = 9
Look = Callable[[], None]


class OfAUser(lr_scheduler.LambdaLR):
    """Steps in a way of its own."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5


def decay(number: int) -> float:
    return 1 / (1 + number / 3)


KINDS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, decay),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one cycle, and momentum": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=BATCHES + 1),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.8)], [3]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.8)]
    ),
    "of a user": lambda o: OfAUser(o, decay),
    "now and then": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "by hand": lambda _: None,
    "by hand, before": lambda _: None,
}


class Loop:
    """A loop whose learning rates change. ``drawn``: how many batches its loader gave."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(3)
        self.kind = kind
        self.table = torch.nn.EmbeddingBag(60, 4, mode="sum", sparse=True)
        self.top = torch.nn.Sequential(
            torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1)
        )
        self.model = torch.nn.Sequential(self.table, self.top)
        self.sparse = torch.optim.SGD(self.table.parameters(), lr=0.1)
        self.dense = torch.optim.SGD(self.top.parameters(), lr=0.1, momentum=0.9)
        self.optimizers = [self.sparse, self.dense]
        self.schedulers = [lr_scheduler.LambdaLR(self.sparse, decay)]
        if (made := KINDS[kind](self.dense)) is not None:
            self.schedulers.append(made)
        self.drawn = 0
        self.loss = torch.tensor(0.0)

    def extra(self) -> Any:
        return {
            "schedulers": [each.state_dict() for each in self.schedulers],
            "randomness": portus.capture_randomness(CPU),
            "drawn": self.drawn,
        }

    def protected(self, path: object, **settings: Any) -> ProtectedTables:
        return protect(
            self.model,
            self.optimizers,
            pool=str(path),
            extra=self.extra,
            log_bytes=LOG,
            **settings,
        )

    def load(self, tables: ProtectedTables) -> int:
        loaded: Any = tables.load()
        if loaded is None:
            return 0
        for each, state in zip(self.schedulers, loaded.extra["schedulers"], strict=True):
            each.load_state_dict(state)
        portus.restore_randomness(loaded.extra["randomness"], CPU)
        self.drawn = loaded.extra["drawn"]
        batch: int = loaded.batch
        return batch

    def step(self, number: int, look: Look = lambda: None) -> None:
        self.drawn += 1
        chance = torch.Generator().manual_seed(self.drawn)
        if self.kind == "by hand, before":
            self.change_by_hand()
        ids = torch.randint(60, (8, 3), generator=chance)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.loss = (self.model(ids) - torch.rand(8, 1)).square().mean()
        self.loss.backward()
        look()
        self.sparse.step()
        self.dense.step()
        look()
        self.change(number)
        look()

    def change(self, number: int) -> None:
        """Change the learning rates, as the kind does."""
        if self.kind == "now and then" and number % 3:
            return
        for each in self.schedulers:
            if isinstance(each, lr_scheduler.ReduceLROnPlateau):
                self.model.eval()
                self.model(torch.tensor([[1, 2]]))
                self.model.train()
                with torch.no_grad():
                    self.table(torch.tensor([[3]]))
                each.step(self.loss.item())
            else:
                each.step()
        if self.kind == "by hand":
            self.change_by_hand()

    def change_by_hand(self) -> None:
        for group in self.dense.param_groups:
            group["lr"] *= 0.9

    def state(self) -> list[Any]:
        return [
            *(each.detach().clone() for each in self.model.parameters()),
            *(each.clone() for each in self.model.buffers()),
            settings_of(self.optimizers),
            self.drawn,
        ]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def after(kind: str, batches: int) -> list[Any]:
    loop = Loop(kind)
    for number in range(1, batches + 1):
        loop.step(number)
    return loop.state()


def run(
    kind: str, path: object, end: int, *, block: bool, look: Look | None = None, **settings: Any
) -> list[Any]:
    """Go on up to a batch, and close. look: called between any two things that a batch does, once
    what is begun is durable."""
    loop = Loop(kind)
    with loop.protected(path, **settings) as tables:

        def settled() -> None:
            if look is not None:
                tables._committer.settle()
                look()

        for number in range(loop.load(tables) + 1, end + 1):
            with tables.batch() if block else contextlib.nullcontext():
                loop.step(number, settled)
            settled()
        tables.wait()
        return loop.state()


def goes_on(kind: str, folder: Path, *, block: bool, every: int) -> None:
    """Go on from where the process died: at every moment of a batch, or at some of them."""
    wanted, moments, copies = after(kind, BATCHES), itertools.count(), list[Path]()

    def look() -> None:
        if next(moments) % every == 0:
            copies.append(folder / f"{len(copies)}.portus")
            shutil.copy(folder / "all.portus", copies[-1])

    assert same(run(kind, folder / "all.portus", 5, block=block, look=look), after(kind, 5))
    assert len(copies) == 20 // every
    for path in copies:
        assert same(run(kind, path, BATCHES, block=block), wanted), path
    assert same(run(kind, folder / "all.portus", BATCHES, block=block), wanted)


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(
    ("kind", "block"), [*((kind, False) for kind in KINDS), ("lambda", True), ("by hand", True)]
)
def test_learning_rates_go_on_to_the_same_bits_wherever_the_process_dies(
    kind: str, block: bool, tmp_path: Path
) -> None:
    """There are four moments in a batch: each of them in another batch."""
    goes_on(kind, tmp_path, block=block, every=5)


@pytest.mark.long
@pytest.mark.parametrize("block", [False, True], ids=["no block", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_learning_rates_go_on_to_the_same_bits_from_each_moment_of_each_batch(
    kind: str, block: bool, tmp_path: Path
) -> None:
    goes_on(kind, tmp_path, block=block, every=1)


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("kind", ["lambda", "one cycle, and momentum", "by hand"])
def test_learning_rates_beside_tables_in_place_go_on_to_the_same_bits(
    kind: str, device: str
) -> None:
    for end in (3, 4, BATCHES):
        loop = Loop(kind)
        tables = loop.protected(device, in_place=True)
        for number in range(loop.load(tables) + 1, end + 1):
            loop.step(number)
        found = loop.state()
        tables.close()
    with portus.open(device) as view:
        state: Any = view.load("embedding")
    wanted = after(kind, BATCHES)
    assert same(found[1:], wanted[1:])
    assert torch.equal(state["model"]["0.weight"], wanted[0])


@pytest.mark.parametrize("in_place", [False, True], ids=["memory", "in place"])
def test_a_relaxed_dense_part_has_the_schedulers_step_of_its_batch(
    in_place: bool, device: str, tmp_path: Path
) -> None:
    path = device if in_place else str(tmp_path / "tables.portus")
    loop, seen = Loop("lambda"), set[int]()
    with loop.protected(path, mode="relaxed", gap=4, in_place=in_place) as tables:
        for number in range(1, 12):
            loop.step(number)
            tables._committer.settle()
            if number > 1:
                with portus.open(path) as view:
                    state: Any = view.load("embedding")
                dense = int(state["dense_batch"])
                seen.add(dense)
                rates = [each["param_groups"][0]["lr"] for each in state["optimizers"]]
                assert rates == [0.1 * decay(dense)] * 2
                for each in state["extra"]["schedulers"]:
                    assert each["last_epoch"] == dense
    assert len(seen) > 2


def test_a_scheduler_is_told_of_again_after_a_wait(tmp_path: Path) -> None:
    for end in (3, BATCHES):
        loop = Loop("lambda")
        with loop.protected(tmp_path / "tables.portus") as tables:
            for number in range(loop.load(tables) + 1, end + 1):

                def wait(tables: ProtectedTables = tables) -> None:
                    tables.wait()

                loop.step(number, wait)
    assert same(loop.state(), after("lambda", BATCHES))


def before_the_update(loop: Loop, _: ProtectedTables) -> None:
    loop.schedulers[0].step()
    loop.step(1)


def within_the_update(loop: Loop, _: ProtectedTables) -> None:
    loop.step(1, loop.schedulers[1].step)


def after_a_lookup(loop: Loop, _: ProtectedTables) -> None:
    loop.step(1)
    loop.table(torch.tensor([[1]]))
    loop.schedulers[0].step()
    loop.step(2)


def before_a_block(loop: Loop, tables: ProtectedTables) -> None:
    loop.schedulers[0].step()
    with tables.batch():
        loop.step(1)


@pytest.mark.parametrize(
    "stray", [before_the_update, within_the_update, after_a_lookup, before_a_block]
)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_scheduler_that_may_be_of_two_batches_is_refused(
    stray: Callable[[Loop, ProtectedTables], None], tmp_path: Path
) -> None:
    loop = Loop("lambda")
    told = pytest.raises(UsageError, match=r"a LambdaLR stepped before .* `with tables.batch")
    with loop.protected(tmp_path / "tables.portus") as tables, told:
        stray(loop, tables)


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_block_has_the_step_of_a_scheduler_wherever_it_is(tmp_path: Path) -> None:
    def stepped(loop: Loop, number: int) -> None:
        loop.schedulers[0].step()
        loop.step(number)

    whole = Loop("lambda")
    for number in range(1, 8):
        stepped(whole, number)
    for end in (3, 7):
        loop = Loop("lambda")
        with loop.protected(tmp_path / "tables.portus") as tables:
            for number in range(loop.load(tables) + 1, end + 1):
                with tables.batch():
                    stepped(loop, number)
    assert same(loop.state(), whole.state())


def test_schedulers_of_others_and_those_of_closed_trainings_are_left_alone(tmp_path: Path) -> None:
    loop, other = Loop("lambda"), Loop("lambda")
    with loop.protected(tmp_path / "tables.portus"):
        other.step(1)
        other.schedulers[0].step()
        loop.step(1)
    loop.schedulers[0].step()
    loop.schedulers[0].step()
    loop.step(2)
    assert len(loop.schedulers[0].state_dict()) == len(other.schedulers[0].state_dict())
