"""Tables that are changed in place, in a pool on a DAX device, for which a file stands in."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import portus
from portus.companions.embedding.fold import Fold, Slices
from portus.companions.embedding.moment import Moment
from portus.companions.embedding.pool_tables import PlacedStore
from portus.companions.embedding.store import MODEL
from portus.embedding import Elsewhere, ProtectedTables, RowwiseAdagrad, fill, protect
from portus.engine.spec import PAGE, Extent
from portus.errors import BusyError, CorruptionError, MediumError, UsageError
from portus.reach.index import in_place, log
from portus.reach.index.check import check
from portus.reach.index.findings import Severity
from portus.reach.index.pool import PoolWriter
from portus.reach.versions import open_version
from tests.crash.embedded import Training, same
from tests.unit.embedding import sliced
from tests.unit.embedding.test_protected import Small

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")

BIG = 96 << 20
LOG = 60 * PAGE


class InPlace(sliced.Halves):
    """The training whose tables are in the pool."""

    def protected(self, path: str, **settings: Any) -> Any:
        return super().protected(path, log_bytes=LOG, in_place=True, **settings)


def durable(path: str) -> Any:
    """What the pool has, as anything loads it; no rule of the format is broken."""
    errors = [str(each) for each in check(path) if each.severity is Severity.ERROR]
    assert not errors, errors
    with portus.open(path) as view:
        found: Any = view.load(MODEL)
    found.pop("digests", None)
    return found


def after(batches: int) -> Any:
    """The state of a training that nobody interrupted and nothing protected."""
    whole = Training()
    for number in range(1, batches + 1):
        whole.step(number)
    return whole.state()


def require_the_same(found: Any, batches: int) -> None:
    expected = after(batches)
    assert found["batch"].item() == batches
    assert same(found["model"], expected["model"])
    assert same(found["optimizers"], expected["optimizers"])


@pytest.mark.long
def test_tables_in_place_train_to_the_same_bits_over_folding_in(device: str) -> None:
    training = InPlace()
    with training.protected(device) as tables:
        logs = set()
        for number in range(1, 13):
            with tables.batch():
                training.step(number)
            tables.wait()
            logs.add(tables._store._log.log.name)
        assert len(logs) > 1, "the log was never folded in"
    require_the_same(durable(device), 12)


def test_a_training_in_place_goes_on_where_it_was_closed(device: str) -> None:
    for begin, end in ((1, 3), (4, 8)):
        training = InPlace()
        with training.protected(device) as tables:
            assert training.load(tables) == begin - 1
            for number in range(begin, end + 1):
                with tables.batch():
                    training.step(number)
    require_the_same(durable(device), 8)


GAP = 8


class Relaxed(InPlace):
    def protected(self, path: str, **settings: Any) -> Any:
        return super().protected(path, mode="relaxed", gap=GAP, **settings)


def trained(device: str, numbers: range, patch: pytest.MonkeyPatch) -> tuple[list[int], Any]:
    """The gaps that a crash may leave: after each batch, and before the version that ends slices.
    And what the logs were; the device is left as at the oldest dense part."""
    training, gaps, dense, logs = Relaxed(), list[int](), dict[int, Any](), set[bytes]()
    copy, fold_in = f"{device}.oldest", PlacedStore._fold_in

    def look(batch: int) -> None:
        state = durable(device)
        dense_batch = int(state["dense_batch"])
        assert int(state["batch"]) == batch
        found = [state["model"]["top.weight"], state["extra"]["scheduler"]["last_epoch"]]
        assert same(found, dense[dense_batch])
        if not gaps or batch - dense_batch > max(gaps):
            shutil.copy(device, copy)
        gaps.append(batch - dense_batch)

    def shown() -> list[Any]:
        return [training.model.top.weight.detach().clone(), training.scheduler.last_epoch]

    def noted(self: PlacedStore, moment: Any) -> None:
        if self._slices is not None and self._slices.is_whole:
            look(moment.batch)
        fold_in(self, moment)

    with training.protected(device) as tables, patch.context() as within:
        within.setattr(PlacedStore, "_fold_in", noted)
        if training.load(tables):
            dense[int(durable(device)["dense_batch"])] = shown()
        for number in numbers:
            with tables.batch():
                training.step(number)
                dense[tables.batches + 1] = shown()
            tables.wait()
            look(tables.batches)
            found = durable(device)["model"]
            for name in ("items", "bags", "users"):
                weight = training.model.get_parameter(f"{name}.weight")
                assert torch.equal(weight.detach(), found[f"{name}.weight"])
            logs.add(tables._store._log.log.name)
    assert max(gaps) < GAP
    shutil.copy(copy, device)
    return gaps, logs


@pytest.mark.long
def test_in_place_a_dense_part_is_written_in_slices_and_a_crash_anywhere_is_within_the_gap(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = sliced.noted(monkeypatch)
    gaps, logs = trained(device, range(1, 3 * GAP), monkeypatch)
    sliced.require_even(written, gaps, GAP)
    assert len(logs) > 3, "no log was folded in after the last slice"
    # Whoever goes on from the oldest dense part stays within the gap as well.
    trained(device, range(100, 102 + GAP), monkeypatch)
    assert "views of tables" not in caplog.text, "the dense part that was copied holds tables"


def _update_and_fail(training: Training) -> None:
    """The third batch, but for its scheduler."""
    training.model.zero_grad()
    for table, shape in ((training.model.items, (5,)), (training.model.bags, (5, 3))):
        table(torch.ones(shape, dtype=torch.int64)).sum().backward()
    for optimizer in training.optimizers:
        optimizer.step()


def test_what_an_unfinished_batch_changed_is_put_back(device: str) -> None:
    """The process ends after one optimizer of a batch stepped, and the other one did not."""
    training = InPlace()
    with training.protected(device) as tables:
        for number in (1, 2):
            with tables.batch():
                training.step(number)
        training.optimizers.append(None)  # the loop fails in its third batch, after the updates
        with pytest.raises(AttributeError), tables.batch():
            _update_and_fail(training)
    require_the_same(durable(device), 2)  # as a reader sees it
    training = InPlace()
    with training.protected(device) as tables:
        assert training.load(tables) == 2
        with tables.batch():
            training.step(3)
    require_the_same(durable(device), 3)


def test_rows_that_were_announced_are_logged_beside_the_training(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rows that nobody announced, such as those of other ranks, before the update."""
    logged: list[list[int]] = []
    log = PlacedStore.log

    def noted(self: PlacedStore, rows: Any) -> None:
        logged.append([each for _, numbers in rows for each in numbers.tolist()])
        log(self, rows)

    small = Small()
    batches = [[1, 2], [2, 3], [5]]
    with small.protect(
        Path(device), in_place=True, ids_of=lambda ids: {"table": torch.tensor(ids[:1])}
    ) as tables:
        monkeypatch.setattr(PlacedStore, "log", noted)
        for ids in tables.ahead(batches):
            with tables.batch():
                small.step(*ids)
        tables.wait()
        shown = small.weight.detach().clone()
    assert logged == [[1, 2], [2], [2, 3], [5], [5], []]
    assert torch.equal(durable(device)["model"]["table.weight"], shown)


def test_a_mark_stays_as_it_was_while_tables_are_changed_in_place(device: str) -> None:
    small = Small()
    with small.protect(Path(device), in_place=True, keep=2) as tables:
        small.step(1, 2)
        state = small.model.state_dict()
        small.step(2, 3)
        tables.wait()
        marked: Any = fill(state)
        assert marked["table.weight"][1:4, 0].tolist() == [-1, -1, 0]
        assert durable(device)["model"]["table.weight"][1:4, 0].tolist() == [-1, -2, -1]
        assert isinstance(state["table.weight"], Elsewhere)
        small.model.load_state_dict(state)
        # Nothing is committed of it yet: what is in the pool is as it was, in its place.
        assert durable(device)["model"]["table.weight"][1:4, 0].tolist() == [-1, -2, -1]
        small.step(3)
        tables.wait()
        assert durable(device)["model"]["table.weight"][1:4, 0].tolist() == [-1, -1, -1]


def test_what_something_else_wrote_to_a_table_in_place_is_in_the_next_batch(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small()
    with small.protect(Path(device), in_place=True):
        small.step(1)
        with torch.no_grad():
            small.weight[7] = 5
        small.step(2)
    assert "table changed outside of an update" in caplog.text
    assert durable(device)["model"]["table.weight"][[1, 2, 7], 0].tolist() == [-1, -1, 5]


def test_a_crash_after_a_written_table_in_place_was_loaded_finds_what_was_written(
    device: str,
) -> None:
    """The rows are in the pool already: they are committed before others take their place."""
    small = Small()
    with small.protect(Path(device), in_place=True) as tables:
        small.step(1)
        tables.wait()
        with torch.no_grad():
            small.weight[7] = 5
        small.model.load_state_dict({"table.weight": torch.zeros_like(small.weight)})
        found = durable(shutil.copy(device, f"{device}.crashed"))
    assert found["model"]["table.weight"][[1, 7], 0].tolist() == [-1, 5]


def test_what_something_else_wrote_last_is_durable_once_it_is_closed(device: str) -> None:
    """Within a batch, after it, and after a load."""
    small = Small(torch.optim.Adagrad)
    with small.protect(Path(device), in_place=True) as tables:
        small.step(1)
        with tables.batch():
            small.step(2)
            with torch.no_grad():
                small.weight[6] = 5
        tables.wait()
        assert torch.equal(durable(device)["model"]["table.weight"], small.weight.detach())
        with torch.no_grad():
            small.weight[7] = 5
    small = Small(torch.optim.Adagrad)
    with small.protect(Path(device), in_place=True) as tables:
        assert tables.load() is not None
        with torch.no_grad():
            small.weight[8] = 5
    found = durable(device)
    assert found["model"]["table.weight"][5:, 0].nonzero().flatten().tolist() == [1, 2, 3]
    assert found["batch"] == 2


def test_who_reads_tables_that_are_being_changed_is_told_so(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log grew since it was read, and bytes are of another batch than it says."""
    small = Small()
    with small.protect(Path(device), in_place=True) as tables:
        small.step(1)
        tables.wait()
        right, busy = in_place.unit_sum, [True]

        def slowly(data: memoryview, cell: int, rank: int) -> int:
            if busy.pop() if busy else False:
                small.step(2)
                tables.wait()
            return right(data, cell, rank) + 1

        monkeypatch.setattr(in_place, "unit_sum", slowly)
        with portus.open(device) as view, pytest.raises(BusyError, match="changed in place"):
            view.load(MODEL)


def test_a_reader_of_a_version_that_was_folded_in_is_told_to_come_back(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pinned the version before that, and reads it when its tables are another one's."""
    small = Small()
    with small.protect(Path(device), in_place=True) as tables:
        small.step(1)
        tables.wait()
        store = cast(Any, tables._store)

        def late(*found: Any) -> Any:
            before = store._log.log.name
            while store._log.log.name == before:
                small.step(2)
                tables.wait()
            small.step(3)
            tables.wait()
            return log.read_log(*found)

        monkeypatch.setattr(open_version, "read_log", late)
        for _ in range(3):
            with portus.open(device) as view, pytest.raises(BusyError, match="changed in place"):
                view.load(MODEL)


def train(training: Training, tables: ProtectedTables) -> None:
    """Until it fails."""
    while True:
        with tables.batch():
            training.step(tables.batches + 1)
        tables.wait()


def test_a_pool_without_room_for_a_dense_part_in_slices_stops_training_and_loses_nothing(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, taken = Relaxed(), list[Extent]()
    make = Slices.__init__

    def crowded(self: Slices, pool: PoolWriter, moment: Moment) -> None:
        """Somebody else has taken all that there was."""
        for pages in (1024, 64, 8, 1):
            with contextlib.suppress(MediumError):
                while True:
                    taken.extend(pool.reserve(pages * PAGE))
        make(self, pool, moment)

    monkeypatch.setattr(Slices, "__init__", crowded)
    tables = training.protected(device)
    with pytest.raises(MediumError, match="take a larger one"):
        train(training, tables)
    done = tables.batches
    assert taken
    with pytest.raises(MediumError, match="take a larger one"):
        tables.close()
    monkeypatch.undo()
    assert int(durable(device)["batch"]) in (done, done + 1)
    again = Relaxed()
    with again.protected(device) as tables:
        resumed = again.load(tables)
        assert resumed in (done, done + 1)


def test_a_pool_too_small_for_its_tables_changes_no_model(device: str) -> None:
    """There is room for one of two, which is in memory still."""
    model = torch.nn.ModuleDict(
        {name: torch.nn.Embedding(60 << 12, 64, sparse=True) for name in ("one", "other")}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    shown = [each.detach()[:3].clone() for each in model.parameters()]
    with pytest.raises(MediumError, match="cannot"):
        protect(model, optimizer, pool=device, in_place=True)
    assert all(map(torch.equal, shown, (each[:3] for each in model.parameters())))


def test_a_batch_that_fails_leaves_no_view_of_its_tables(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Or all of them would be copied to memory, while its error is handled."""
    table = torch.nn.Embedding(BIG // 256, 64, sparse=True, device="meta")
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    tables = protect(table, optimizer, pool=device, log_bytes=BIG, in_place=True)
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
    with pytest.raises(MediumError, match="keep fewer versions"):
        tables.close()
    assert "views of tables" not in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda training: training.model.items.bfloat16(), "expected a table of"),
        (lambda training: training.optimizers.reverse(), "nothing was loaded: pass them in"),
        (lambda training: setattr(training.model, "top", torch.nn.Linear(17, 2)), "does not fit"),
        (lambda training: None, "expected a dense part that is at most 0 batches older"),
    ],
    ids=["table", "optimizer", "dense part", "gap"],
)
def test_a_load_that_is_refused_leaves_no_view_of_its_tables(
    device: str, change: Callable[[Any], Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Or all of them would be copied to memory, while its error is handled."""
    training: Relaxed | InPlace = Relaxed()
    with training.protected(device) as tables:
        for number in range(1, 5):
            with tables.batch():
                training.step(number)
    training = InPlace() if "older" in said else Relaxed()
    change(training)
    with training.protected(device) as tables, pytest.raises(UsageError, match=said) as raised:
        tables.load()
    assert raised.value.__traceback__ is not None
    assert "views of tables" not in caplog.text
    assert durable(device)["batch"] == 4


def test_nobody_else_goes_on_with_what_an_update_folds_in(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, shared = Fold.finish, list[bool]()
    training = InPlace()
    with training.protected(device) as tables, monkeypatch.context() as patch:

        def told(self: Fold, *rest: Any) -> Any:
            shared.append(tables._store.has_more)
            return finish(self, *rest)

        patch.setattr(Fold, "finish", told)
        while len(shared) < 3:
            with tables.batch():
                training.step(tables.batches + 1)
            tables.wait()
    assert not any(shared), "the thread that commits would copy the same pieces"


def test_folding_in_flushes_no_table_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.nn.Embedding(BIG // 256, 64, sparse=True, device="meta")
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    with protect(table, optimizer, pool=device, log_bytes=LOG, in_place=True) as tables:
        logs, flushed = set[bytes](), list[int]()
        medium = tables._pool.medium
        persist = medium.persist

        def noted(ranges: Any) -> None:
            flushed.append(sum(each.length for each in ranges))
            persist(ranges)

        monkeypatch.setattr(medium, "persist", noted)
        for number in range(9):
            optimizer.zero_grad()
            table(torch.arange(number, 300)).sum().backward()
            optimizer.step()
            tables.wait()
            logs.add(cast(Any, tables._store)._log.log.name)
    assert len(logs) > 2
    assert max(flushed) >= BIG  # the first batch
    assert sorted(flushed)[-2] < 2 * LOG


def test_a_view_of_a_table_in_place_that_outlives_it_is_a_copy(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small(torch.optim.Adagrad)
    with small.protect(Path(device), in_place=True):
        small.step(1)
        view = small.weight.detach()
        array = view.numpy()
        shown = view.clone()
    assert "views of tables" in caplog.text
    assert torch.equal(view, shown)
    view[1] = 5
    assert array[1].tolist() == [5, 5, 5, 5]
    assert torch.equal(durable(device)["model"]["table.weight"], shown)


@pytest.mark.parametrize(
    ("exchange", "said"),
    [
        (lambda model: model.half(), r"found torch\.float16"),
        (
            lambda model: model.load_state_dict(Training().model.state_dict(), assign=True),
            "its weight is another parameter",
        ),
    ],
    ids=["dtype", "parameter"],
)
def test_a_table_in_place_that_was_exchanged_leaves_the_pool_as_it_was(
    device: str, exchange: Callable[[Any], Any], said: str
) -> None:
    training = InPlace()
    with training.protected(device) as tables:
        with tables.batch():
            training.step(1)
        tables.wait()
        exchange(training.model)
        with pytest.raises(UsageError, match=said):
            training.model.state_dict()
        with pytest.raises(UsageError, match=said), tables.batch():
            pass
    require_the_same(durable(device), 1)


def test_after_it_is_closed_a_model_has_no_rows_that_lead_to_the_pool(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    small = Small(torch.optim.Adagrad)
    with small.protect(Path(device), in_place=True) as tables:
        small.step(1)
        tables.load()
        small.step(2)
    assert "views of tables" not in caplog.text
    assert small.weight.shape == (0, 4)
    assert small.optimizer.state[small.weight]["sum"].shape == (0, 4)


def test_misuse_of_tables_in_place_is_named(device: str, tmp_path: Path) -> None:
    (tmp_path / "ordinary").mkdir()
    with pytest.raises(UsageError, match="expected a DAX device, or a file on a file system with"):
        Small().protect(tmp_path / "ordinary" / "x.portus", in_place=True)
    assert os.listdir(tmp_path / "ordinary") == []
    with Small().protect(tmp_path / "ordinary" / "x.portus"):
        pass
    with pytest.raises(UsageError, match="expected a DAX device, or a file on a file system with"):
        Small().protect(tmp_path / "ordinary" / "x.portus", in_place=True)
    assert (tmp_path / "ordinary" / "x.portus").exists()
    small = Small()
    with small.protect(Path(device), in_place=True) as tables:
        small.step(0)
        tables.wait()
        store: Any = tables._store
        store._log_bytes = PAGE  # once folded in, there is no room for any batch
        store._log._tail = store._log.log.extent.end
        with pytest.raises(UsageError, match="give more log_bytes"):
            small.step(1)
    with pytest.raises(UsageError, match="found some that were protected with in_place=True; pass"):
        Small().protect(Path(device))


@pytest.mark.long
def test_tables_in_place_take_no_memory(device: str) -> None:
    """The table has more bytes than the process may get in addition, by the kernel's count."""
    rows = BIG // 256

    def resident() -> int:
        text = Path("/proc/self/status").read_text()
        [found] = re.findall(r"RssAnon:\s+(\d+) kB", text)
        return int(found) << 10

    gc.collect()
    before = resident()
    table = torch.nn.Embedding(rows, 64, sparse=True, device="meta")
    optimizer = RowwiseAdagrad([table.weight], lr=1.0)
    for batch in (0, 3):
        with protect(table, optimizer, pool=device, log_bytes=LOG, in_place=True) as tables:
            resumed = tables.load()
            assert (0 if resumed is None else resumed.batch) == batch
            if resumed is None:
                torch.nn.init.ones_(table.weight)
            for number in range(3):
                optimizer.zero_grad()
                table(torch.tensor([number, rows - 1])).sum().backward()
                optimizer.step()
            tables.wait()
            assert table.weight.nbytes == BIG
            assert resident() - before < BIG // 2
        table = torch.nn.Embedding(rows, 64, sparse=True, device="meta")
        optimizer = RowwiseAdagrad([table.weight], lr=1.0)


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.long)])
def test_a_flipped_byte_of_tables_in_place_is_found_or_does_no_harm(
    device: str, count: int, seed: int
) -> None:
    """Also while a batch is under way, when undo counts."""
    small = Small(torch.optim.Adagrad)
    with small.protect(Path(device), in_place=True) as tables:
        small.step(1, 2)
        small.step(2, 3)
        tables.wait()
        mapped, store = cast(Any, tables._mapped), cast(Any, tables._store)
        mapped.log(mapped.rows(tables._training.tables[0], torch.tensor([2, 5])))
        with torch.no_grad():
            small.weight[[2, 5]] = 77
        extent = next(iter(store.places.values())).extent
        log = store._log.used_extent
    whole = durable(device)
    source, found = np.random.default_rng(seed), 0
    used = [range(extent.offset, extent.end), range(log.offset, log.end), range(32768, 200_000)]
    with open(device, "r+b", buffering=0) as file:
        for number in range(count):
            place = int(source.choice(used[number % 3]))
            file.seek(place)
            [byte] = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1 << int(source.integers(8))]))
            try:
                with portus.open(device) as view:
                    state: Any = view.load(MODEL)
                state.pop("digests")
                same_bits = same(state["model"], whole["model"])
                assert same_bits or state["batch"] < whole["batch"], f"byte {place}"
            except CorruptionError:
                found += 1
            file.seek(place)
            file.write(bytes([byte]))
    assert found > count // 4
    assert same(durable(device)["model"], whole["model"])
