"""Tables that are protected: what is durable when, what others save, and what is refused."""

from __future__ import annotations

import copy
import io
import logging
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import parametrize

import portus
from portus.companions.embedding import fold, lookups
from portus.companions.embedding.committer import Committer
from portus.companions.embedding.fold import Fold
from portus.companions.embedding.moment import Moment
from portus.companions.embedding.store import MARKS, MODEL, TableStore
from portus.embedding import Elsewhere, ProtectedTables, RowwiseAdagrad, fill, protect
from portus.engine.copying.segments import Stop
from portus.engine.spec import PAGE
from portus.errors import BusyError, CorruptionError, MediumError, StaleError, UsageError
from portus.reach.index.check import check
from portus.reach.index.log import LogWriter
from tests.crash.embedded import Training, same
from tests.moments import until
from tests.unit.embedding import sliced
from tests.warm import Warm

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

ROWS = 50


class Small:
    """One table, and a number for each batch."""

    def __init__(self, optimizer: Callable[..., Any] = torch.optim.SGD, **settings: Any) -> None:
        self.model = torch.nn.ModuleDict({"table": torch.nn.Embedding(ROWS, 4, sparse=True)})
        torch.nn.init.zeros_(self.weight)
        self.optimizer = optimizer([self.weight], lr=1.0, **settings)

    @property
    def weight(self) -> torch.nn.Parameter:
        found = self.model["table"].weight
        assert isinstance(found, torch.nn.Parameter)
        return found

    def protect(self, path: Path, **settings: Any) -> ProtectedTables:
        return protect(self.model, self.optimizer, pool=path, log_bytes=20 * PAGE, **settings)

    def step(self, *ids: int) -> None:
        self.optimizer.zero_grad()
        self.model["table"](torch.tensor(ids)).sum().backward()
        self.optimizer.step()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tables.portus"


def durable(path: Path) -> torch.Tensor:
    """The table as the pool has it, by loading it as anything is loaded."""
    with portus.open(path) as view:
        state: Any = view.load(MODEL)
    found: torch.Tensor = state["model"]["table.weight"]
    return found


# --- durable ------------------------------------------------------------------------------------


def test_an_update_begins_when_the_batch_before_it_is_durable(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    waits, begins = threading.Event(), threading.Event()
    commit, wait = TableStore.commit, Committer.wait

    def slow(self: TableStore, moment: Moment) -> None:
        if moment.batch == 2:
            begins.wait()  # that the next update waits, or is over
        commit(self, moment)
        order.append(f"durable {moment.batch}")

    def waiting(self: Committer) -> None:
        waits.set()
        wait(self)

    monkeypatch.setattr(TableStore, "commit", slow)
    small = Small()
    with small.protect(path) as tables:
        small.step(1)
        small.step(2)
        monkeypatch.setattr(Committer, "wait", waiting)
        small.optimizer.register_step_pre_hook(lambda *_: order.append("update"))

        def third() -> None:
            small.step(3)
            waits.set()

        thread = threading.Thread(target=third)
        thread.start()
        waits.wait()
        begins.set()
        thread.join()
        tables.wait()
    assert order == ["durable 1", "durable 2", "update", "durable 3"]


def test_the_closure_of_a_step_runs_while_the_batch_before_is_made_durable(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, commit = threading.Event(), TableStore.commit

    def slow(self: TableStore, moment: Moment) -> None:
        if moment.batch == 2:
            assert computed.wait(60)
        commit(self, moment)

    monkeypatch.setattr(TableStore, "commit", slow)
    small = Small()

    def closure() -> float:
        small.optimizer.zero_grad()
        small.model["table"](torch.tensor([3])).sum().backward()
        computed.set()
        return 0.0

    with small.protect(path):
        small.step(1)
        small.step(2)
        small.optimizer.step(closure)
    assert durable(path)[3].tolist() == [-1.0] * 4


def test_each_batch_is_in_the_log_at_the_price_of_its_rows(path: Path) -> None:
    training = Training()
    with training.protected(str(path)) as tables:
        for number in range(1, 4):
            with tables.batch():
                training.step(number)
        tables.wait()
        log = tables._store._log
        assert log is not None
        before = log.used_extent.length
        with tables.batch():
            training.step(4)
        tables.wait()
        assert 0 < log.used_extent.length - before < 60_000 < training.model.bags.weight.nbytes * 3


@pytest.mark.long
def test_training_goes_on_with_the_same_bits_over_folding_in(path: Path) -> None:
    whole = Training()
    for number in range(1, 30):
        whole.step(number)
    first = Training()
    with first.protected(str(path)) as tables:
        assert tables.load() is None
        for number in range(1, 20):
            with tables.batch():
                first.step(number)
    second = Training()
    with second.protected(str(path)) as tables:
        assert second.load(tables) == 19
        for number in range(20, 30):
            with tables.batch():
                second.step(number)
        assert tables.batches == 29
    assert same(second.state(), whole.state())
    assert check(path) == []


def test_a_batch_waits_for_one_piece_of_folding_in_and_not_for_all(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    go_on, commit, small = Fold.go_on, TableStore.commit, Small()

    def slow(self: Fold, stop: Stop) -> None:
        if not self.image.done and order:  # the first image is awaited
            until(lambda: tables._committer._work is not None)
        go_on(self, stop)
        order.append("piece")

    def told(self: TableStore, moment: Moment) -> None:
        commit(self, moment)
        order.append("durable")
        if moment.batch == 1:
            order[:] = ["begun"]

    monkeypatch.setattr(fold, "PIECE", 1)
    monkeypatch.setattr(Fold, "go_on", slow)
    monkeypatch.setattr(TableStore, "commit", told)
    monkeypatch.setattr(TableStore, "is_behind", False)
    with small.protect(path) as tables:
        while "piece" not in order:
            small.step(tables.batches % ROWS)
        tables.wait()
        first = order.index("piece")
        assert order[first - 1 : first + 2] == ["durable", "piece", "durable"]
        wanted = small.weight.detach().clone()
    assert torch.equal(durable(path), wanted)


def test_no_batch_waits_for_a_whole_image_also_if_batches_leave_no_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing: list[bool] = []
    finish, small = Fold.finish, Small(torch.optim.Adagrad)

    def told(self: Fold, *rest: Any) -> Any:
        missing.append(not self.image.is_whole)
        return finish(self, *rest)

    monkeypatch.setattr(fold, "PIECE", 1)
    monkeypatch.setattr(Fold, "finish", told)
    monkeypatch.setattr(TableStore, "has_more", False)
    with small.protect(path) as tables:
        while len(missing) < 4:
            small.step(tables.batches % ROWS, 7)
        wanted = small.weight.detach().clone()
    assert missing == [True, False, False, False]
    assert torch.equal(durable(path), wanted)
    assert check(path) == []


def test_a_load_gives_up_what_was_folded_in_of_an_update_that_is_not_gone_on_with(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TableStore, "has_more", False)
    monkeypatch.setattr(TableStore, "is_behind", False)
    small = Small()
    with small.protect(path) as tables:
        while tables._store._fold is None:
            small.step(1)
            tables.wait()
        with pytest.raises(RuntimeError, match="later"):
            broken_off(tables, small)
        assert small.weight[2].any()
        while not tables._store._fold.image.is_whole:
            tables._store.go_on(Stop())
        tables.load()
        small.step(1)
        wanted = small.weight.detach().clone()
    assert torch.equal(durable(path), wanted)
    assert not wanted[2].any()


def test_what_something_else_wrote_to_a_table_is_durable(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small()
    with small.protect(path):
        small.step(1)
        with torch.no_grad():
            small.weight.add_(5)
        with caplog.at_level(logging.WARNING):
            small.step(2)
    assert "table changed outside of an update" in caplog.text
    assert torch.equal(durable(path), small.weight.detach())


def test_what_something_else_writes_after_a_whole_batch_is_not_in_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = TableStore.commit

    def slow(self: TableStore, moment: Moment) -> None:
        time.sleep(0.2)
        commit(self, moment)

    monkeypatch.setattr(TableStore, "commit", slow)
    small = Small()
    with small.protect(path) as tables:
        for number in (1, 2):  # the first one; and one before which something else wrote
            small.step(number)
            small.model["table"](torch.tensor([0]))  # the next one begins
            wanted = small.weight.detach().clone()
            with torch.no_grad():
                small.weight.clamp_(min=-0.5)
            tables.wait()
            assert torch.equal(durable(path), wanted)


def test_a_table_is_loaded_once_the_batch_before_is_durable(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, order = TableStore.commit, list[str]()

    def slow(self: TableStore, moment: Moment) -> None:
        time.sleep(0.2)
        commit(self, moment)
        order.append(f"durable {moment.batch}")

    small = Small()
    with small.protect(path) as tables:
        small.step(1)
        tables.wait()
        monkeypatch.setattr(TableStore, "commit", slow)
        small.step(2)
        small.model.load_state_dict({"table.weight": torch.ones(ROWS, 4)})
        order.append("loaded")
    assert order == ["durable 2", "loaded"]


def test_ctrl_c_at_the_end_of_a_batch_leaves_its_rows_to_the_next_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Committer, moment: Moment) -> None:
        raise KeyboardInterrupt

    small = Small()
    with small.protect(path):
        small.step(1)
        with monkeypatch.context() as patch:
            patch.setattr(Committer, "put", interrupted)
            with pytest.raises(KeyboardInterrupt):
                small.step(2)
        small.step(3)
    assert torch.equal(durable(path), small.weight.detach())


@pytest.mark.timeout(30)
def test_ctrl_c_while_a_batch_is_handed_over_holds_up_no_update_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    small = Small()
    with small.protect(path) as tables:
        small.step(1)
        small.step(2)
        tables.wait()
        with monkeypatch.context() as patch:
            put = Committer.put

            def cut_short(self: Committer, moment: Moment) -> None:
                patch.setattr(self._changed, "notify_all", interrupted)
                put(self, moment)

            small.step(3)
            patch.setattr(Committer, "put", cut_short)
            with pytest.raises(KeyboardInterrupt):
                small.step(4)
        small.step(4)
    assert torch.equal(durable(path), small.weight.detach())


def test_what_something_else_wrote_within_a_batch_is_durable_with_it(path: Path) -> None:
    small = Small()
    with small.protect(path) as tables:
        small.step(1)
        for number in (2, 3):
            with tables.batch():
                small.step(number)
                with torch.no_grad():
                    small.weight[7] += 5
                if number == 3:  # also before another update of the same batch
                    small.step(4)
            tables.wait()
            assert torch.equal(durable(path), small.weight.detach())


def test_optimizers_that_do_not_step_in_each_batch_end_it_when_one_steps_again(
    path: Path,
) -> None:
    small, rest = Small(), torch.nn.Linear(1, 1)
    other = torch.optim.Adam(rest.parameters())
    with protect(small.model, [small.optimizer, other], pool=path) as tables:
        small.step(1)
        assert tables.batches == 0
        small.step(2)
        assert tables.batches == 1
        other.step()
        assert tables.batches == 2
    assert torch.equal(durable(path), small.weight.detach())


def test_a_block_that_raises_leaves_its_rows_to_the_next_batch(path: Path) -> None:
    small = Small()
    with small.protect(path) as tables:
        with tables.batch():
            small.step(1)
        with pytest.raises(RuntimeError, match="later"):
            broken_off(tables, small)
        assert tables.batches == 1
        with tables.batch():
            small.step(3)
    assert torch.equal(durable(path), small.weight.detach())


@pytest.mark.long
def test_relaxed_the_dense_part_is_of_some_batches_before_and_a_load_says_of_which(
    path: Path,
) -> None:
    training, dense = Training(), {}
    with protect(
        training.model, training.optimizers, pool=path, mode="relaxed", gap=4, log_bytes=80 * PAGE
    ) as tables:
        for number in range(1, 24):
            with tables.batch():
                training.step(number)
            dense[number] = training.model.top.weight.detach().clone()
            tables.wait()
            state = state_of(path)
            found = int(state["dense_batch"])
            assert int(state["batch"]) == number
            assert number - 4 < found <= number
            assert torch.equal(state["model"]["top.weight"], dense[found])
            rows = training.model.items.weight.detach()
            assert torch.equal(state["model"]["items.weight"], rows)
    again = Training()
    with again.protected(str(path)) as tables:
        before = again.model.top.weight.detach().clone()
        if found < 23:
            with pytest.raises(UsageError, match=f"at most 0 batches older .* found {23 - found}"):
                tables.load()
            assert torch.equal(again.model.top.weight.detach(), before)
        resumed = tables.load(gap_max=3)
        assert resumed is not None
        assert (resumed.batch, resumed.dense_batch) == (23, found)
        assert torch.equal(again.model.top.weight.detach(), dense[found])


GAP = 8


def relaxed(training: Training, path: Path) -> ProtectedTables:
    return protect(
        training.model, training.optimizers, pool=path, extra=training.extra, mode="relaxed",
        gap=GAP, log_bytes=400 * PAGE,
    )  # fmt: skip


@pytest.mark.long
def test_a_dense_part_is_written_in_slices_and_a_crash_anywhere_is_within_the_gap(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = sliced.noted(monkeypatch)
    monkeypatch.setattr(TableStore, "has_more", False)  # as late as may be
    training = sliced.Halves()
    gaps = trained(training, path, tmp_path, range(1, 2 * GAP + 2))
    sliced.require_even(written, gaps, GAP)
    # Whoever goes on from the oldest dense part stays within the gap as well.
    worst = tmp_path / f"{1 + gaps.index(max(gaps))}.portus"
    trained(sliced.Halves(), worst, tmp_path, range(100, 102 + GAP))


def trained(training: Training, path: Path, place: Path, numbers: range) -> list[int]:
    """The gap after each batch, of which the pool is copied then, as a crash leaves it."""
    gaps, dense = [], {}
    with relaxed(training, path) as tables:
        resumed = tables.load()
        if resumed is not None:
            dense[resumed.dense_batch] = training.model.top.weight.detach().clone()
        for number in numbers:
            with tables.batch():
                training.step(number)
            dense[tables.batches] = training.model.top.weight.detach().clone()
            tables.wait()
            copied = shutil.copy(path, place / f"{number}.portus")
            state = state_of(Path(copied))
            assert int(state["batch"]) == tables.batches
            assert torch.equal(state["model"]["top.weight"], dense[int(state["dense_batch"])])
            rows = training.model.items.weight.detach()
            assert torch.equal(state["model"]["items.weight"], rows)
            gaps.append(tables.batches - int(state["dense_batch"]))
    assert max(gaps) < GAP
    return gaps


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("before", [7, 8])
def test_a_training_that_loads_while_it_runs_stays_within_the_gap(
    path: Path, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dense part that was taken last is not the one that was loaded, which may be as old as
    allowed; and it is never saved."""
    monkeypatch.setattr(TableStore, "has_more", False)  # as late as may be
    training = Training()
    with relaxed(training, path) as tables:
        for number in range(1, before + 1):
            with tables.batch():
                training.step(number)
        resumed = tables.load(gap_max=GAP)
        assert resumed is not None
        dense = {resumed.dense_batch: training.model.top.weight.detach().clone()}
        for number in range(100, 102 + GAP):
            with tables.batch():
                training.step(number)
            dense[tables.batches] = training.model.top.weight.detach().clone()
            tables.wait()
            state = state_of(path)
            assert torch.equal(state["model"]["top.weight"], dense[int(state["dense_batch"])])
            assert tables.batches - int(state["dense_batch"]) < GAP


def broken_off(tables: ProtectedTables, small: Small) -> None:
    with tables.batch():
        small.step(2)
        raise RuntimeError("later")


def test_rowwise_adagrad_is_what_its_source_says() -> None:
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(6, 3))
    rows, total = weight.detach().double().clone(), torch.zeros(6, dtype=torch.float64)
    optimizer = RowwiseAdagrad([weight], lr=0.1, eps=1e-3)
    for ids in ([1, 1, 4], [4, 0, 5]):
        optimizer.zero_grad()
        bag = torch.nn.functional.embedding(torch.tensor(ids), weight, sparse=True)
        (bag * torch.arange(9.0).reshape(3, 3)).sum().backward()
        gradient = torch.zeros(6, 3, dtype=torch.float64)
        gradient.index_add_(0, torch.tensor(ids), torch.arange(9.0).reshape(3, 3).double())
        optimizer.step()
        for row in set(ids):
            total[row] += (gradient[row] ** 2).mean()
            rows[row] -= 0.1 * gradient[row] / (total[row].sqrt() + 1e-3)
    assert torch.allclose(weight.detach().double(), rows, atol=1e-6)


def test_ids_of_is_asked_one_batch_ahead_and_wrong_ids_come_when_it_is_their_turn(
    path: Path,
) -> None:
    small, order = Small(), list[object]()

    def ids_of(batch: list[int]) -> dict[str, torch.Tensor]:
        order.append(batch)
        return {"table": torch.tensor(batch)}

    with small.protect(path, ids_of=ids_of) as tables:

        def train() -> None:
            for batch in tables.ahead([[1], [2, 2], [3], [50], [4]]):
                small.step(*batch)
                order.append(tables.batches)

        with pytest.raises(UsageError, match="table: expected ids from 0 to 49, found 50"):
            train()
        assert order == [[1], [2, 2], 1, [3], 2, [50], 3]
        assert list(tables.ahead(iter([]))) == []
    assert durable(path)[:, 0].nonzero().flatten().tolist() == [1, 2, 3]


class Bags(torch.nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(ROWS, 4, sparse=True, **{"mode": "sum", **settings})
        self.top = torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.top(self.bag(ids)).square().mean()
        return found


def looked_up(path: Path, optimizer: Callable[..., Any], *, is_early: bool) -> list[torch.Tensor]:
    """What a model has after some batches, many of whose rows repeat; and its losses."""
    torch.manual_seed(3)
    model, losses = Bags(), list[torch.Tensor]()
    both = [optimizer(model.bag.parameters(), lr=0.3), torch.optim.SGD(model.top.parameters(), 0.1)]
    batches = torch.randint(0, ROWS, (9, 16, 5))
    ids_of = lambda ids: {"bag": ids}  # noqa: E731
    with protect(
        model, both, pool=path, log_bytes=90 * PAGE, ids_of=ids_of, early_lookup=is_early
    ) as tables:
        for number, ids in enumerate(tables.ahead(batches)):
            if number == 5:
                with torch.no_grad():
                    model.bag.weight[3] += 1  # what was looked up before is of no use
            loss = model(ids)
            losses.append(loss.detach())
            for each in both:
                each.zero_grad()
            loss.backward()
            for each in both:
                each.step()
    return [*(each.detach() for each in model.parameters()), *losses]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, RowwiseAdagrad])
def test_a_lookup_that_is_made_early_and_made_good_is_close(
    optimizer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = looked_up(tmp_path / "plain.portus", optimizer, is_early=False)
    used, sums = [], lookups._Lookup.sums

    def noted(self: lookups._Lookup) -> torch.Tensor:
        used.append(len(self.changes))
        return sums(self)

    monkeypatch.setattr(lookups._Lookup, "sums", noted)
    found = looked_up(tmp_path / "early.portus", optimizer, is_early=True)
    # The first has no update before it; 5 and 6 were looked up before the table was written to.
    assert used == [0, 1, 1, 1, 1, 1, 1]
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"mode": "mean"}, "bag: .* EmbeddingBag with mode='sum', found EmbeddingBag with mode='m"),
        ({"padding_idx": 0}, "bag: early_lookup takes no padding_idx"),
    ],
)
def test_an_early_lookup_of_what_is_no_sum_is_refused(
    settings: dict[str, Any], reason: str, path: Path
) -> None:
    model = Bags(**settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(UsageError, match=reason):
        protect(model, optimizer, pool=path, ids_of=lambda ids: {"bag": ids}, early_lookup=True)
    with pytest.raises(UsageError, match=r"table: .* mode='sum', found Embedding$"):
        Small().protect(path, ids_of=lambda ids: {"table": ids}, early_lookup=True)
    plain = Bags()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    with pytest.raises(UsageError, match="early_lookup: expected a function ids_of"):
        protect(plain, optimizer, pool=path, early_lookup=True)
    assert not path.exists()


def test_what_a_loader_raises_loses_no_batch_before_it(path: Path) -> None:
    small = Small()

    def loader() -> Iterator[int]:
        yield 1
        yield 2
        raise RuntimeError("the disk of the data is gone")

    with small.protect(path, ids_of=lambda batch: {"table": torch.tensor([batch])}) as tables:

        def train() -> None:
            for batch in tables.ahead(loader()):
                small.step(batch)

        with pytest.raises(RuntimeError, match="disk of the data"):
            train()
        assert tables.batches == 2


def test_ids_of_a_table_that_is_not_there_are_named(path: Path) -> None:
    small = Small()
    with (
        small.protect(path, ids_of=lambda batch: {"tabel": torch.tensor(batch)}) as tables,
        pytest.raises(UsageError, match="names of tables, such as table, found 'tabel'"),
    ):
        list(tables.ahead([[1]]))
    with (
        small.protect(path) as tables,
        pytest.raises(UsageError, match="ahead: expected a function ids_of"),
    ):
        tables.ahead([[1]])


# --- what others save ---------------------------------------------------------------------------


@pytest.mark.long
def test_others_save_a_state_without_the_tables_and_load_them_at_that_batch(
    path: Path, tmp_path: Path
) -> None:
    training = Training()
    kept: dict[int, Any] = {}
    with portus.PoolCheckpointer(tmp_path / "run.portus", keep=None) as run:
        with training.protected(str(path)) as tables:
            for number in range(1, 25):  # over several logs
                with tables.batch():
                    training.step(number)
                if number in (3, 4, 21):
                    tables.wait()
                    kept[number] = state_of(path)
                    state: Any = {
                        "model": training.model.state_dict(),
                        "optimizers": [each.state_dict() for each in training.optimizers],
                    }
                    info = run.save(state, number).wait()
                    assert isinstance(state["model"]["bags.weight"], Elsewhere)
                    assert info.size < 12_000
        for number, before in kept.items():
            loaded: Any = run.load(number)
            filled: Any = fill(loaded)
            assert same(filled["model"], before["model"])
            assert same(filled["optimizers"], before["optimizers"])
            again = Training()
            with again.protected(str(path)) as tables:
                again.model.load_state_dict(loaded["model"])
                for optimizer, each in zip(again.optimizers, loaded["optimizers"], strict=True):
                    optimizer.load_state_dict(each)
                assert tables.batches == number
            assert same(dict(again.model.state_dict()), dict(before["model"]))
    assert check(path) == []


def state_of(path: Path) -> Any:
    """What the pool has now. It is open in this process: by a reader of another."""
    with portus.open(path) as view:
        return view.load(MODEL)


WITH_TABLES: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "all of it": (lambda model: {"model": model.state_dict()}, {}),
    "by the name of the table": (
        lambda model: {"model": model.state_dict()},
        {"names": "*.table.weight"},
    ),
    "what the state lacks is left": (
        lambda model: {"model": {"top.weight": model["top"].weight.detach()}},
        {"strict": False},
    ),
    "into a table that is not protected": (
        lambda model: {"model": {"table.weight": torch.zeros(ROWS, 4)}},
        {"strict": False},
    ),
    "under another name": (
        lambda model: {"other": model.state_dict()},
        {"rename": lambda name: name.replace("model", "other"), "strict": False},
    ),
    "from before it was protected": (
        lambda model: {"model": model.state_dict()},
        {"step": 0, "strict": False},
    ),
    "from before it was protected, by name": (
        lambda model: {"other": model.state_dict()},
        {
            "step": 0,
            "strict": False,
            "names": "model.*",
            "rename": lambda name: name.replace("model", "other"),
        },
    ),
}


@pytest.mark.parametrize("name", WITH_TABLES)
def test_a_state_is_not_restored_beside_tables_of_another_batch(
    name: str, path: Path, tmp_path: Path
) -> None:
    small = Small()
    small.model["top"] = torch.nn.Linear(4, 1)
    top: Any = small.model["top"].weight
    with portus.PoolCheckpointer(tmp_path / "run.portus", keep=None) as run:
        run.save({"model": small.model.state_dict()}, 0)
        run.wait()
        with small.protect(path) as tables:
            small.step(1)
            run.save({"model": small.model.state_dict()}, 1)
            run.wait()
            with torch.no_grad():
                top += 1
            small.step(2)
            tables.wait()
            model, rows = copy.deepcopy(small.model).state_dict(), small.weight.detach().clone()
            state_of_it, settings = WITH_TABLES[name]
            state, step = state_of_it(small.model), settings.get("step", 1)
            more = {key: each for key, each in settings.items() if key != "step"}
            before = top.detach().clone()
            with pytest.raises(UsageError, match=r"table\.weight.* `load_state_dict`"):
                run.restore_into(state, step, **more)
            assert torch.equal(top, before)
            assert torch.equal(small.weight, rows)
            run.restore_into({"model": small.model.state_dict()}, 1, names="model.top.*")
            assert torch.equal(top + 1, model["top.weight"])
            assert torch.equal(small.weight, rows)


def test_a_training_goes_on_from_an_older_batch(path: Path, tmp_path: Path) -> None:
    small = Small()
    with small.protect(path):
        small.step(1)
        file = tmp_path / "one.pt"
        torch.save(small.model.state_dict(), file)
        small.step(2)
    again = Small()
    with again.protect(path) as tables:
        again.model.load_state_dict(torch.load(file, weights_only=True))
        assert tables.batches == 1
        again.step(3)
    changed = durable(path)[:, 0].nonzero().flatten().tolist()
    assert changed == [1, 3]


def test_so_many_marks_are_kept_and_others_are_named_when_they_are_asked_for(path: Path) -> None:
    small = Small()
    with small.protect(path, keep=2):
        states = []
        for number in range(4):
            small.step(number)
            states.append(small.model.state_dict())
            assert states[-1]["table.weight"] == small.model.state_dict()["table.weight"]
    with pytest.raises(StaleError, match="expected the tables of batch 2"):
        fill(states[1])
    filled: Any = fill(states[2])
    assert filled["table.weight"][:, 0].nonzero().flatten().tolist() == [0, 1, 2]
    with portus.open(path) as view:
        assert len([info for info in view.versions() if info.model == MARKS]) == 2


@pytest.mark.parametrize("keep", [None, 4])
def test_many_images_that_marks_keep_are_said_once_with_what_to_do(
    path: Path, keep: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    small, sizes = Small(), []
    with small.protect(path, keep=keep) as tables:
        for number in range(300):
            small.step(number % ROWS)
            if number % 5 == 0:
                small.model.state_dict()
            tables.wait()
            if number in (150, 299):
                sizes.append(os.stat(path).st_blocks)
    said = [each.message for each in caplog.records if "images of the tables" in each.message]
    if keep is None:
        [warning] = said
        assert "keep 17 images" in warning
        assert "portus rm 'embedding marks' --keep N --force" in warning
        assert sizes[1] > sizes[0]
    else:
        assert said == []
        assert sizes[1] == sizes[0]


def test_a_state_that_is_asked_for_again_has_what_something_else_wrote_meanwhile(
    path: Path,
) -> None:
    small = Small()
    with small.protect(path) as tables:
        small.step(1)
        first, unwritten = small.model.state_dict(), small.weight.detach().clone()
        with torch.no_grad():
            small.weight[7] += 5
        second, written = small.model.state_dict(), small.weight.detach().clone()
        assert tables.batches == 1
    for state, expected in ((first, unwritten), (second, written)):
        filled: Any = fill(state)
        assert torch.equal(filled["table.weight"], expected)


def test_a_state_that_is_asked_for_within_a_batch_is_of_what_it_did_so_far(path: Path) -> None:
    small = Small()
    with small.protect(path) as tables:
        assert small.model.state_dict()["table.weight"].batch == 0
        with tables.batch():
            small.step(1)
            state = small.model.state_dict()
            small.step(2)
        assert tables.batches == 1
        assert state["table.weight"].batch == 1
    filled: Any = fill(state)
    assert filled["table.weight"][:, 0].nonzero().flatten().tolist() == [1]
    assert durable(path)[:, 0].nonzero().flatten().tolist() == [1, 2]


# --- what is refused ----------------------------------------------------------------------------


def model_with(**settings: Any) -> tuple[torch.nn.ModuleDict, torch.nn.Parameter]:
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(ROWS, 4, **settings)})
    weight = model["table"].weight
    assert isinstance(weight, torch.nn.Parameter)
    return model, weight


SPARSE = {"sparse": True}
REFUSED: dict[str, tuple[dict[str, Any], Callable[[Any], Any], str]] = {
    "momentum": (
        SPARSE,
        lambda weight: torch.optim.SGD([weight], momentum=0.9),
        "table: SGD with momentum=0.9 changes rows that a batch did not look up",
    ),
    "weight decay": (
        SPARSE,
        lambda weight: torch.optim.Adagrad([weight], weight_decay=0.1),
        "Adagrad with weight_decay=0.1 changes rows",
    ),
    "Adam": (SPARSE, lambda weight: torch.optim.Adam([weight]), "table: Adam may change rows"),
    "max_norm": (
        {**SPARSE, "max_norm": 1.0},
        lambda weight: torch.optim.SGD([weight]),
        "max_norm changes rows in the forward pass",
    ),
    "a dense table": (
        {},
        lambda weight: torch.optim.SGD([weight]),
        "no Embedding or EmbeddingBag with sparse=True",
    ),
    "no optimizer": (
        SPARSE,
        lambda weight: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]),
        "expected it in exactly one of the optimizers, found it in 0",
    ),
    "two optimizers": (
        SPARSE,
        lambda weight: [torch.optim.SGD([weight]), torch.optim.Adagrad([weight])],
        "found it in 2; pass every optimizer that steps in a batch, each once",
    ),
    "what is no optimizer": (
        SPARSE,
        lambda weight: weight,
        "optimizer: expected an optimizer of torch, or a list of them, found a Parameter",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_table_that_cannot_be_protected_is_named_with_the_reason(name: str, path: Path) -> None:
    settings, optimizer, said = REFUSED[name]
    model, weight = model_with(**settings)
    with pytest.raises(UsageError, match=said):
        protect(model, optimizer(weight), pool=path)
    assert not path.exists()


def momentum_now(small: Small) -> None:
    small.optimizer.param_groups[0]["momentum"] = 0.5
    small.step(1)


def another_dtype(small: Small) -> None:
    small.model.half()
    small.step(1)


def another_optimizer(small: Small) -> None:
    small.optimizer = torch.optim.SGD([small.weight], lr=1.0)
    small.step(1)


def a_dense_gradient(small: Small) -> None:
    small.weight.sum().backward()
    small.optimizer.step()


def ids_out_of_range(small: Small) -> None:
    small.step(ROWS)


def negative_ids(small: Small) -> None:
    small.step(-1)


def max_norm_now(small: Small) -> None:
    table: Any = small.model["table"]
    table.max_norm = 0.1
    small.step(7)


def another_parameter(small: Small) -> None:
    same_values = {"table.weight": small.weight.detach().clone()}
    small.model.load_state_dict(same_values, assign=True)
    small.step(1)


def in_no_optimizer(small: Small) -> None:
    small.optimizer.param_groups.clear()
    small.step(1)


MISUSED: dict[str, tuple[Callable[[Small], None], str]] = {
    "momentum": (momentum_now, "table: SGD with momentum=0.5"),
    "dtype": (another_dtype, r"expected a table of torch.float32 \(50, 4\).*found torch.float16"),
    "optimizer": (another_optimizer, "table: a SGD is about to update it that was not passed"),
    "dense": (a_dense_gradient, "table: expected a sparse gradient, found a dense one"),
    "ids": (ids_out_of_range, "table: expected ids from 0 to 49, found 50"),
    "negative ids": (negative_ids, "table: expected ids from 0 to 49, found -1"),
    "max_norm": (max_norm_now, "table: max_norm=0.1 changes rows in the forward pass"),
    "parameter": (another_parameter, "table: its weight is another parameter.*assign=True"),
    "no optimizer": (in_no_optimizer, "table: the SGD that had it when it was protected"),
}


@pytest.mark.parametrize("name", MISUSED)
def test_misuse_is_named_before_anything_is_changed(name: str, path: Path) -> None:
    misuse, said = MISUSED[name]
    small = Small()
    with small.protect(path):
        small.step(7)
        before = small.weight.detach().clone()
        with pytest.raises(UsageError, match=said):
            misuse(small)
        assert torch.equal(small.weight.detach().float(), before)
    assert torch.equal(durable(path), before)


def test_an_optimizer_that_got_the_table_of_another_one_updates_nothing(path: Path) -> None:
    small, rest = Small(), torch.nn.Linear(1, 1)
    other = torch.optim.SGD(rest.parameters(), lr=1.0)
    with protect(small.model, [small.optimizer, other], pool=path) as tables:
        with tables.batch():
            small.step(7)
        before = small.weight.detach().clone()
        other.add_param_group({"params": [small.weight]})
        with pytest.raises(UsageError, match="table: a SGD is about to update it that did not"):
            other.step()
        assert torch.equal(small.weight.detach(), before)
    assert torch.equal(durable(path), before)


def test_a_table_of_another_dtype_is_not_committed_over_the_one_before(path: Path) -> None:
    small = Small()
    with small.protect(path) as tables:
        small.step(7)
        small.model.half()
        with pytest.raises(UsageError, match=r"found torch\.float16"):
            small.model.state_dict()
        with pytest.raises(UsageError, match=r"found torch\.float16"), tables.batch():
            pass
        tables.wait()
        assert durable(path).dtype == torch.float32
        small.model.float()
        small.step(8)
        assert tables.batches == 2
    assert torch.equal(durable(path), small.weight.detach())


def test_a_copy_of_a_protected_model_is_a_model_like_any_other(path: Path) -> None:
    small = Small(torch.optim.Adagrad)
    with small.protect(path) as tables:
        small.step(7)
        twin = copy.deepcopy(small.model)
        weight: Any = twin["table"].weight
        torch.nn.init.ones_(weight)
        assert torch.equal(twin.state_dict()["table.weight"], torch.ones(ROWS, 4))
        saved = small.model.state_dict()
        small.step(8)
        wanted = small.weight.detach().clone()
        twin.load_state_dict(saved)
        assert weight[:, 0].nonzero().flatten().tolist() == [7]
        assert torch.equal(small.weight.detach(), wanted)
        assert tables.batches == 2
        small.step(9)
        assert tables.batches == 3
    assert torch.equal(durable(path), small.weight.detach())


def by_torch(model: torch.nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("pickled", [lambda model: pickle.loads(pickle.dumps(model)), by_torch])
def test_a_protected_model_that_is_pickled_comes_back_as_one_like_any_other(
    path: Path, pickled: Callable[[torch.nn.Module], Any]
) -> None:
    small, twin = Small(torch.optim.Adagrad), Small(torch.optim.Adagrad)
    with small.protect(path) as tables:
        small.step(7)
        twin.model = pickled(pickled(small.model))
        assert torch.equal(twin.weight, small.weight)
        twin.optimizer = torch.optim.Adagrad([twin.weight], lr=1.0)
        twin.step(8)
        state = twin.model.state_dict()
        assert state["table.weight"][:, 0].nonzero().flatten().tolist() == [7, 8]
        twin.model.load_state_dict(state)
        assert tables.batches == 1
        small.step(9)
    assert durable(path)[:, 0].nonzero().flatten().tolist() == [7, 9]


def test_a_forked_child_does_not_wait_for_a_thread_that_it_has_not(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Small().protect(path) as tables, monkeypatch.context() as patch:
        process = os.getpid()
        patch.setattr(os, "getpid", lambda: process + 1)
        with pytest.raises(UsageError, match="a forked child cannot use it"):
            tables.wait()


@pytest.mark.parametrize(
    "wrong",
    [{"max_bytes": 0}, {"timeout_s": -1}, {"in_place": 1}, {"extra": 3}, {"ids_of": {}}],
)
def test_a_setting_that_makes_no_sense_is_named_and_makes_no_pool(
    wrong: dict[str, Any], path: Path
) -> None:
    (name,) = wrong
    with pytest.raises(UsageError, match=rf"^{name}: expected (bytes|seconds|True|a function)"):
        Small().protect(path, **wrong)
    assert not path.exists()


def test_a_training_in_the_pool_is_not_written_over(path: Path) -> None:
    small = Small()
    with small.protect(path):
        small.step(7)
    again = Small()
    with again.protect(path):
        assert isinstance(again.model.state_dict()["table.weight"], torch.Tensor)
        with pytest.raises(
            UsageError, match="the pool already holds a training; call `load` before"
        ):
            again.step(1)
    assert torch.equal(durable(path), small.weight.detach())


def test_what_does_not_fit_the_model_is_named(path: Path) -> None:
    small = Small()
    with small.protect(path):
        small.step(7)
    model, weight = model_with(sparse=True)
    model["more"] = torch.nn.Linear(2, 2)
    with (
        protect(model, torch.optim.SGD([weight]), pool=path) as tables,
        pytest.raises(UsageError, match=r"(?s)does not fit this model.*more\.weight"),
    ):
        tables.load()


def test_a_pool_that_is_too_small_stops_training_and_loses_nothing(path: Path) -> None:
    training = Training()
    tables = protect(
        training.model,
        training.optimizers,
        pool=path,
        extra=training.extra,
        log_bytes=20 * PAGE,
        max_bytes=70 * PAGE,
    )
    with pytest.raises(MediumError, match="max_bytes is"):
        train_on(training, tables)
    done = tables.batches
    with pytest.raises(MediumError, match="max_bytes is"):
        tables.close()
    again = Training()
    with again.protected(str(path)) as tables:
        assert again.load(tables) == done - 1
    assert check(path) == []


def train_on(training: Training, tables: ProtectedTables) -> None:
    while True:
        with tables.batch():
            training.step(tables.batches + 1)


def test_a_device_that_fails_stops_training_and_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Small()
    tables = small.protect(path)
    small.step(1)
    small.step(2)
    tables.wait()

    def broken(self: LogWriter, *rest: Any) -> None:
        raise MediumError(5, "the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(LogWriter, "append", broken)
        small.step(3)
        before = small.weight.detach().clone()
        with pytest.raises(MediumError, match="the disk is gone"):
            small.step(4)
        assert torch.equal(small.weight.detach(), before)
    with pytest.raises(MediumError, match="the disk is gone"):
        tables.close()
    assert durable(path)[:, 0].nonzero().flatten().tolist() == [1, 2]


def test_a_checkpointer_and_a_shelf_do_not_take_the_place_of_tables(path: Path) -> None:
    small = Small()
    with small.protect(path):
        small.step(7)
    with pytest.raises(UsageError, match="expected a shelf"):
        portus.Shelf(path)
    with (
        pytest.raises(UsageError, match=r"or embedding tables \(portus.embedding.protect\)"),
        portus.PoolCheckpointer(path, model=MODEL) as run,
    ):
        run.save({"a": torch.ones(1)}, 1).wait()
    with portus.PoolCheckpointer(path.with_name("run.portus")) as run:
        run.save({"a": torch.ones(1)}, 1).wait()
    with pytest.raises(UsageError, match="expected tables of a training, found checkpoints"):
        small.protect(path.with_name("run.portus"))


@pytest.mark.long
def test_a_flipped_byte_of_tables_is_found_or_does_no_harm(path: Path, seed: int) -> None:
    small = Small(torch.optim.Adagrad)
    with small.protect(path) as tables:
        for number in range(6):
            small.step(number, number + 9)
            if number == 3:
                small.model.state_dict()
        wanted = small.weight.detach().clone()
        assert tables.batches == 6
    whole = path.read_bytes()
    used = np.flatnonzero(np.frombuffer(whole, np.uint8))  # most of a small pool is empty
    places = np.random.default_rng(seed).choice(used, 2000)
    found = 0
    for place in places.tolist():
        data = bytearray(whole)
        data[place] ^= 16
        path.write_bytes(data)
        try:
            assert torch.equal(durable(path), wanted)
        except (CorruptionError, UsageError):
            found += 1
    assert found > 100  # records are there twice
    assert os.path.getsize(path) == len(whole)


@pytest.mark.long
def test_rows_that_only_another_rank_looked_up_are_durable(path: Path, tmp_path: Path) -> None:
    ranks = Warm("tests.unit.embedding.ranks")
    wish = (str(tmp_path / "store"), str(path))
    with ranks.start("rank", 0, *wish) as first, ranks.start("rank", 1, *wish) as second:
        weights = [bytes.fromhex(child.line()) for child in (first, second)]
        assert [child.wait() for child in (first, second)] == [0, 0]
    assert weights[0] == weights[1]
    with portus.open(path) as view:
        state: Any = view.load(MODEL)
    assert state["model"]["0.weight"].numpy().tobytes() == weights[0]


def with_table(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Callable[[], Small]:
    def make() -> Small:
        small = Small()
        small.model["table"] = torch.nn.Embedding(rows, width, sparse=True, dtype=dtype)
        small.optimizer = torch.optim.SGD([small.weight], lr=1.0)
        return small

    return make


def under(optimizer: Callable[..., Any]) -> Callable[[], Small]:
    return lambda: Small(optimizer)


SGD, ADAGRAD, SPARSE_ADAM = torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam
OF_ANOTHER_RUN: dict[str, tuple[Callable[[], Small], Callable[[], Small], str]] = {
    "grown": (Small, with_table(60, 4), r"\(60, 4\), found one of torch.float32 \(50, 4\) in"),
    "wider": (Small, with_table(50, 8), r"\(50, 8\), found .* nothing was loaded: make the table"),
    "dtype": (Small, with_table(50, 4, torch.float64), r"found one of torch.float32"),
    "Adagrad": (Small, under(ADAGRAD), "expected the optimizers SGD, as .* found Adagrad;"),
    "SGD": (under(ADAGRAD), Small, "Adagrad, as in the pool, found SGD; .* or a new pool"),
    "rows": (under(ADAGRAD), under(RowwiseAdagrad), "Adagrad, as .* found RowwiseAdagrad"),
    "moments": (under(SPARSE_ADAM), under(RowwiseAdagrad), "SparseAdam, .* found RowwiseAdagrad"),
    "none": (under(RowwiseAdagrad), under(SPARSE_ADAM), "RowwiseAdagrad, .* found SparseAdam"),
}


@pytest.mark.parametrize("name", OF_ANOTHER_RUN)
def test_what_is_of_another_kind_than_saved_is_named_and_the_run_can_go_on(
    name: str, path: Path
) -> None:
    before, after, said = OF_ANOTHER_RUN[name]
    small = before()
    with small.protect(path):
        small.step(1)
    other = after()
    shown = other.weight.detach().clone()
    with other.protect(path) as tables:
        with pytest.raises(UsageError, match=said):
            tables.load()
        with pytest.raises(UsageError, match="call `load` before the first update"):
            other.step(2)
        assert torch.equal(other.weight.detach(), shown)
    assert torch.equal(durable(path), small.weight.detach())
    again = before()
    with again.protect(path) as tables:
        assert tables.load() is not None
        again.step(2)
        assert tables.batches == 2
    assert torch.equal(durable(path), again.weight.detach())


OTHER_KINDS: dict[str, tuple[Callable[..., Any], bool, str]] = {
    "SGD": (torch.optim.SGD, False, "expected the optimizers SGD, AdamW, .* found SGD, SGD;"),
    "the state of Adam is that of AdamW": (torch.optim.Adam, False, "AdamW, .* found SGD, Adam;"),
    "and that of Adamax": (torch.optim.Adamax, False, "AdamW, as in the pool, .* or a new pool"),
    "in another order": (
        torch.optim.AdamW,
        True,
        "SGD, AdamW, as in the pool, found AdamW, SGD; nothing was loaded: pass them in that order",
    ),
}


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_another_kind_of_dense_optimizer_is_named(name: str, path: Path) -> None:
    dense, is_reversed, said = OTHER_KINDS[name]
    for kind in (torch.optim.AdamW, dense):
        small = Small()
        small.model["top"] = torch.nn.Linear(4, 1)
        both = [small.optimizer, kind(small.model["top"].parameters(), lr=0.1)]
        is_first = not path.exists()
        order = both[::-1] if is_reversed and not is_first else both
        with protect(small.model, order, pool=path) as tables:
            if is_first:
                with tables.batch():
                    small.step(1)
                continue
            with pytest.raises(UsageError, match=said):
                tables.load()
    assert durable(path)[1, 0] == -1


def test_extra_may_have_all_that_weights_only_loads_and_arrays(path: Path) -> None:
    state = np.random.default_rng(1).bit_generator.state
    extra: dict[str, Any] = {"numpy": state, "array": np.arange(3), "set": {1}}
    small = Small()
    with small.protect(path, extra=lambda: extra):
        small.step(1)
    with Small().protect(path) as tables:
        resumed = tables.load()
    assert resumed is not None
    found: Any = resumed.extra
    assert np.array_equal(found.pop("array"), extra.pop("array"))
    assert found == extra


def test_extra_that_could_not_be_loaded_again_is_refused_with_its_place(path: Path) -> None:
    small, extra = Small(), dict[str, object](place="here")
    with small.protect(path, extra=lambda: extra) as tables:
        small.step(1)
        tables.wait()
        extra["place"] = Path("here")
        with pytest.raises(UsageError, match=r"^extra\.place: .*weights_only"):
            small.step(2)
        extra["place"] = "there"
        small.step(3)
    assert durable(path)[:, 0].nonzero().flatten().tolist() == [1, 2, 3]


def test_tables_are_restored_into_the_state_of_another_model(path: Path) -> None:
    small = Small(torch.optim.Adagrad)
    extra = {"rates": [0.5, 0.25], "array": np.arange(3), "sparse": torch.eye(2).to_sparse()}
    with small.protect(path, extra=lambda: extra):
        small.step(1, 7)
    wanted = small.weight.detach().clone()
    weight = torch.zeros(ROWS, 4)
    other: dict[str, Any] = {"rates": [1.0], "array": None, "sparse": None, "more": 1}
    state = {"model": {"table.weight": weight}, "extra": other}
    with portus.open(path) as view:
        with pytest.raises(UsageError, match=r"unexpected, not in the state: batch"):
            view.restore_into(state, MODEL)
        assert not weight.any()
        view.restore_into(state, MODEL, names=["model", "extra"])
        part: Any = view.load(MODEL, names=["extra.array", "optimizers.0.state.*"])
    assert torch.equal(weight, wanted)
    assert (other["rates"], other["array"].tolist(), other["more"]) == ([0.5, 0.25], [0, 1, 2], 1)
    assert torch.equal(other["sparse"].to_dense(), torch.eye(2))
    assert part["optimizers"][0]["state"][0]["sum"].shape == (ROWS, 4)
    assert part.keys() == {"extra", "optimizers"}


def test_optimizers_in_another_order_are_named(path: Path) -> None:
    for order in (1, -1):
        model = torch.nn.ModuleDict(
            {name: torch.nn.Embedding(rows, 4, sparse=True) for name, rows in (("a", 5), ("b", 6))}
        )
        both = [torch.optim.Adagrad([each]) for each in model.parameters()][::order]
        with protect(model, both, pool=path) as tables:
            if order < 0:
                with pytest.raises(
                    UsageError, match=r"a: expected 'sum' of \(5, 4\) .*in the order"
                ):
                    tables.load()
            else:
                with tables.batch():
                    model["a"](torch.tensor([1])).sum().backward()
                    both[0].step()


def test_a_scheduler_that_was_not_there_before_is_no_other_optimizer(path: Path) -> None:
    for batch in range(2):
        small = Small()
        if batch:
            torch.optim.lr_scheduler.StepLR(small.optimizer, 1)
        with small.protect(path) as tables:
            assert (tables.load() is not None) == bool(batch)
            small.step(1)
    assert durable(path)[1, 0] == -2


def test_tables_are_protected_by_one_at_a_time(path: Path) -> None:
    small = Small()
    with small.protect(path):
        for pool in (path, path.with_name("other.portus")):
            with pytest.raises(
                UsageError, match=f"table: it is protected already, in {path}; call"
            ):
                small.protect(pool)
        with pytest.raises(BusyError, match=f"another writer has held it.* pid {os.getpid()} "):
            Small().protect(path, timeout_s=0)
        small.step(1)
    assert not path.with_name("other.portus").exists()
    with small.protect(path.with_name("other.portus")):  # closed, it is free again
        small.step(2)
    assert durable(path)[:3, 0].tolist() == [0, -1, 0]


def with_head(table: torch.nn.Embedding) -> torch.nn.Module:
    head = torch.nn.Linear(4, ROWS, bias=False)
    head.weight = table.weight
    return head


def with_parametrized_head(table: torch.nn.Embedding) -> torch.nn.Module:
    head = with_head(table)
    parametrize.register_parametrization(head, "weight", torch.nn.Identity())
    return head


def with_dense_embedding(table: torch.nn.Embedding) -> torch.nn.Module:
    return torch.nn.Embedding(ROWS, 4)


def with_parameter_of_another_name(table: torch.nn.Embedding) -> torch.nn.Module:
    return torch.nn.ParameterDict({"another": table.weight})


@pytest.mark.parametrize(
    ("shares", "kind"),
    [
        (with_head, "Linear 'head'"),
        (with_parametrized_head, "ParametrizationList 'head.parametrizations.weight'"),
        (with_dense_embedding, "Embedding 'head'"),
        (with_parameter_of_another_name, "ParameterDict 'head'"),
    ],
)
def test_a_table_that_a_module_of_another_kind_has_too_is_refused(
    shares: Callable[[torch.nn.Embedding], torch.nn.Module], kind: str, path: Path
) -> None:
    table = torch.nn.Embedding(ROWS, 4, sparse=True)
    model = torch.nn.ModuleDict({"head": shares(table), "table": table})
    if shares is with_dense_embedding:
        model["head"].weight = table.weight
    with pytest.raises(UsageError, match=f"table: the {kind} has it too, .*sparse=False"):
        protect(model, torch.optim.SGD([table.weight], lr=1.0), pool=path)
    assert not path.exists()


def test_a_table_whose_weight_is_computed_is_refused(path: Path) -> None:
    small = Small()
    parametrize.register_parametrization(small.model["table"], "weight", torch.nn.Identity())
    with pytest.raises(UsageError, match="table: expected a weight that is a parameter"):
        small.protect(path)


def test_a_table_that_a_function_uses_too_is_refused_before_its_update(path: Path) -> None:
    small = Small()
    with small.protect(path):
        small.model["table"](torch.tensor([1])).sum().backward()
        torch.nn.functional.linear(torch.ones(1, 4), small.weight).sum().backward()
        with pytest.raises(UsageError, match="is the table also used elsewhere in the model"):
            small.optimizer.step()
        assert not small.weight.any()


def test_two_embeddings_that_share_a_table_go_on_to_the_same_bits(path: Path) -> None:
    def made() -> Small:
        small = Small()
        small.model["other"] = torch.nn.Embedding(ROWS, 4, sparse=True)
        small.model["other"].weight = small.weight
        return small

    def step(small: Small, number: int) -> None:
        small.optimizer.zero_grad()
        found = small.model["table"](torch.tensor([number])) * 0.3
        (found + small.model["other"](torch.tensor([number + 1]))).sum().backward()
        small.optimizer.step()

    whole = made()
    for number in range(6):
        step(whole, number)
    for end in (3, 6):
        small = made()
        with small.protect(path) as tables:
            resumed = tables.load()
            for number in range(resumed.batch if resumed else 0, end):
                step(small, number)
    assert torch.equal(small.weight, whole.weight)
