"""What a user does with a shelf, and finds again."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import portus
from portus.companions import model_log
from portus.companions.media import private
from portus.companions.media.private import PrivateMapping
from portus.companions.shelf import Shelf
from portus.engine.image.torch_reader import read_torch
from portus.engine.spec import PAGE
from portus.errors import BusyError, CorruptionError, MediumError, PortusError, UsageError
from portus.reach.format.layout import SLOT_OFFSETS
from portus.reach.index.check import check
from portus.reach.index.directory import open_reader
from portus.reach.index.log import LogWriter
from portus.reach.leaving import export
from portus.reach.leaving.options import ExportOptions
from portus.reach.pools.state_file import StateFile
from portus.reach.versions.open_version import open_version

RANDOM = np.random.default_rng(7)


def test_everything_is_back_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.portus"
    centers = RANDOM.normal(size=(10, 784))
    weights = torch.randn(3, 5, dtype=torch.bfloat16)
    state = OrderedDict(weight=torch.eye(3), steps={0: torch.tensor(7), "a.b": [1, (2.5, None)]})
    plain = {"text": "ä", "big": 1 << 70, "bytes": b"\0x", "infinite": float("-inf"), "no": None}
    with Shelf(path) as shelf:
        shelf.centers = centers
        shelf.weights = weights
        shelf["state of a model"] = state
        shelf.plain = plain
        shelf.empty = np.empty((0, 4), np.int16)
        shelf.number = np.float32(1.5)
    modes: tuple[Literal["w", "r"], ...] = ("w", "r")
    for mode in modes:
        with Shelf(path, mode) as shelf:
            assert shelf.keys() == (
                *("centers", "weights", "state of a model", "plain", "empty", "number"),
            )
            assert np.array_equal(shelf.centers, centers)
            assert shelf.centers.dtype == centers.dtype
            assert torch.equal(shelf.weights, weights)
            back = shelf["state of a model"]
            assert torch.equal(back["weight"], torch.eye(3))
            assert back["steps"][0] == 7
            assert back["steps"]["a.b"] == [1, (2.5, None)]
            assert shelf.plain == plain
            assert shelf.empty.shape == (0, 4)
            assert shelf.number == np.float32(1.5)
    assert check(path) == []
    loaded = portus.open(path).load("shelf")
    assert isinstance(loaded, dict)
    assert np.array_equal(loaded["centers"], centers)
    assert loaded["plain"] == plain


@pytest.mark.parametrize("size", [40, 3 << 20])
def test_a_view_is_changed_in_place_and_durable_at_sync(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.portus"
    with Shelf(path) as shelf:
        shelf.x = np.zeros(size, np.uint8)
        shelf.y = torch.zeros(size)
        x, y = shelf.x, shelf.y
        x[size // 2] = 1
        y[-1] = 2
        with Shelf(path, "r") as other:
            assert not other.x.any()
        shelf.sync()
        assert shelf.x is x
        with Shelf(path, "r") as other:
            assert other.x[size // 2] == 1
            assert other.x.sum() == 1
            assert other.y[-1] == 2
            x[0] = 3
            shelf.sync()
            assert other.x[0] == 0
            other.refresh()
            assert other.x[0] == 3
        y[0] = 5
    with Shelf(path) as shelf:
        assert shelf.y[0] == 5
        assert shelf.x[0] == 3
    assert check(path) == []


def test_what_was_changed_outside_of_a_transaction_and_not_synced_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.portus"

    def change() -> None:
        with Shelf(path) as shelf:
            shelf.x = np.zeros(3)
            shelf.x[0] = 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        change()
    with Shelf(path) as shelf:
        assert not shelf.x.any()


def test_a_transaction_that_throws_leaves_everything_as_it_was(tmp_path: Path) -> None:
    with Shelf(tmp_path / "a.portus") as shelf:
        shelf.big = np.zeros(1 << 20)
        shelf.small = torch.zeros(3)
        shelf.step = 1
        big, small = shelf.big, shelf.small

        def change() -> None:
            with shelf.transaction():
                shelf.big[1000] = 1
                shelf.small += 1
                shelf.step = 2
                shelf.new = np.ones(3)
                shelf.big = np.ones(2)
                del shelf.step
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            change()
        assert shelf.keys() == ("big", "small", "step")
        assert shelf.big is big
        assert shelf.small is small
        assert not big.any()
        assert not small.any()
        assert shelf.step == 1
        with shelf.transaction():
            shelf.big[1000] = 1
            shelf.small += 1
            shelf.step = 2
    with Shelf(tmp_path / "a.portus", "r") as shelf:
        assert shelf.big[1000] == shelf.big.sum() == 1
        assert shelf.small.tolist() == [1, 1, 1]
        assert shelf.step == 2


def test_an_assignment_commits_its_name_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.portus"
    with Shelf(path) as shelf:
        shelf.x, shelf.y = np.zeros(1000), np.zeros(1000)
        x = shelf.x
        shelf.y[0] = 1
        shelf.x += 2
        assert shelf.x is x
        with Shelf(path, "r") as other:
            assert (other.x == 2).all()
            assert not other.y.any()
        shelf.x = np.full(1000, 5.0)
        assert shelf.x is x
        with Shelf(path, "r") as other:
            assert (other.x == 5).all()


def test_names_are_changed_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.portus"
    with Shelf(path) as shelf:
        shelf.a, shelf.b = np.arange(700_000), torch.arange(5)
        shelf.a[3] = -3  # in the log
        shelf.sync()
        shelf.swap("a", "b")
        shelf.rename("b", "c")
        shelf.c[4] = -4
        shelf.resize("c", 600_000)
        shelf.resize("a", 7)
        assert shelf.a.tolist() == [0, 1, 2, 3, 4, 0, 0]
        shelf.b = "text"
        del shelf.a
    with Shelf(path) as shelf:
        assert shelf.keys() == ("c", "b")
        assert shelf.c[:6].tolist() == [0, 1, 2, -3, -4, 5]
        assert len(shelf.c) == 600_000
        assert shelf.b == "text"
    assert check(path) == []


def test_a_commit_writes_what_changed(tmp_path: Path) -> None:
    """Counted by the pages of the log: whatever the shelf holds."""
    with Shelf(tmp_path / "a.portus") as shelf:
        shelf.big = np.zeros(32 << 20, np.uint8)
        log = shelf._store._log
        assert log is not None
        before = log.used_extent.length
        for place in (5, 20 << 20):
            shelf.big[place] = 1
        shelf.step = 3
        shelf.sync()
        assert log is shelf._store._log
        assert log.used_extent.length - before <= 4 * PAGE + PAGE


def test_arrays_that_nobody_looked_at_are_not_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked, right = tmp_path / "a.portus", list[int](), private.PrivateMapping.changes
    with Shelf(path) as shelf:
        shelf.small, shelf.big, shelf.state = np.zeros(3), np.ones(1 << 20), {"w": torch.ones(9)}

    def noted(memory: private.PrivateMapping) -> Any:
        asked.append(memory.size)
        return right(memory)

    monkeypatch.setattr(private.PrivateMapping, "changes", noted)
    with Shelf(path) as shelf:
        with shelf.transaction():
            shelf.small[1] = 5
        shelf.small = np.full(3, 6.0)
        assert set(asked) == {24}
        with shelf.transaction():
            shelf.small = np.full(3, 7.0)
            shelf.big[70_000] = 7
            shelf.state["w"][8] = 7
        assert set(asked) == {24, 8 << 20, 36}
    with Shelf(path, "r") as shelf:
        assert (shelf.small == 7).all()
        assert (shelf.big[70_000], shelf.big.sum()) == (7, (1 << 20) + 6)
        assert shelf.state["w"].tolist() == [1] * 8 + [7]


def test_a_full_log_is_folded_in_and_all_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.portus"
    expected = np.zeros(50 * PAGE, np.uint8)
    with Shelf(path, log_bytes=16 * PAGE) as shelf:
        shelf.x = expected
        shelf.other = np.ones(3)
        for step in range(40):
            place = int(RANDOM.integers(len(expected)))
            expected[place : place + 10] = shelf.x[place : place + 10] = step
            with shelf.transaction():
                shelf.other[0] = step
                if step % 11 == 3:
                    shelf[f"extra {step}"] = np.full(PAGE, step)
            with Shelf(path, "r") as other:
                assert np.array_equal(other.x, expected)
                assert other.other[0] == step
    with Shelf(path) as shelf:
        assert np.array_equal(shelf.x, expected)
        assert len(shelf) == 6
    assert check(path) == []


def test_what_pymm_lost_comes_back(tmp_path: Path) -> None:
    """Long lists, names that begin alike, and changes by ``[:]`` and ``copy_``."""
    path = tmp_path / "a.portus"
    with Shelf(path) as shelf:
        shelf.mnist10, shelf.mnist1 = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
        shelf.layers = [np.full(2, number) for number in range(12)]
        shelf.x, shelf.y = np.zeros(3), torch.zeros(3)
        shelf.x[:] = 5
        shelf.y.copy_(torch.ones(3))
        shelf.layers[11][0] = -1
    with Shelf(path, "r") as shelf:
        assert shelf.mnist1["w"].tolist() == [0, 0]
        assert shelf.mnist10["w"].tolist() == [1, 1]
        assert [int(each[0]) for each in shelf.layers] == [*range(11), -1]
        assert shelf.x.tolist() == [5, 5, 5]
        assert shelf.y.tolist() == [1, 1, 1]


@pytest.mark.parametrize("told", [True, False])
def test_whatever_the_kernel_tells_every_changed_page_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    if told and not private.tells():
        pytest.skip("this kernel tells nothing")
    monkeypatch.setattr(private, "tells", lambda: told)
    path, rng = tmp_path / "a.portus", np.random.default_rng(5)
    expected = rng.integers(0, 255, 500_001, np.uint8)
    with Shelf(path) as shelf:
        shelf.x = expected
        for _ in range(8):
            places = rng.integers(0, len(expected), 5)
            expected[places] = shelf.x[places] = rng.integers(0, 255, 5, np.uint8)
            shelf.sync()
        before = shelf.x[:].copy()
        with contextlib.suppress(ZeroDivisionError), shelf.transaction():
            shelf.x[rng.integers(0, len(expected), 9)] += 1
            raise ZeroDivisionError
        assert np.array_equal(shelf.x, before)
    with Shelf(path, "r") as shelf:
        assert np.array_equal(shelf.x, expected)


def test_memory_of_arrays_goes_with_the_last_view(tmp_path: Path) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("portus-shelf")

    if not private.tells():
        pytest.skip("arrays are plain memory here")
    before = mapped()
    with Shelf(tmp_path / "a.portus") as shelf:
        shelf.x = np.zeros(1 << 20, np.uint8)
        part = shelf.x[5:10]
        assert mapped() > before
    del shelf
    assert mapped() > before
    assert part.tolist() == [0] * 5
    del part
    gc.collect()
    assert mapped() == before


@pytest.mark.parametrize("moment", ["advance", "store"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_an_interrupt_within_a_commit_leaves_one_state_or_the_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    error: type[BaseException],
) -> None:
    """Ctrl-C, and what the handler of an alarm raises."""

    def interrupted(*arguments: object, **named: object) -> None:
        raise error

    path = tmp_path / "a.portus"
    shelf = Shelf(path)
    shelf.x, shelf.y = np.zeros(10), np.zeros(10)
    with monkeypatch.context() as patch:
        patch.setattr(LogWriter, moment, interrupted)
        with pytest.raises(error), shelf.transaction():
            shelf.x[:], shelf.y[:] = 1, 1
    assert not shelf.x.any()
    shelf.x[0] = 5
    with pytest.raises(MediumError, match="interrupted"):
        shelf.sync()
    with pytest.raises(MediumError):
        shelf.close()
    with Shelf(path) as again:
        assert again.x.tolist() == again.y.tolist()
        assert set(again.x.tolist()) == {float(moment == "advance")}
    assert check(path) == []


@pytest.mark.parametrize("where", ["transaction", "assignment"])
def test_what_was_undone_in_part_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Ctrl-C once more, while what the first one interrupted is undone."""

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    def half(target: np.ndarray, value: np.ndarray) -> None:
        target[:2] = value[:2]
        raise KeyboardInterrupt

    def change() -> None:
        if where == "assignment":
            shelf.x = np.ones(4)
        with shelf.transaction():
            shelf.x[:2] = 1
            raise TimeoutError

    path = tmp_path / "a.portus"
    shelf = Shelf(path)
    shelf.x = np.zeros(4)
    with monkeypatch.context() as patch:
        patch.setattr(PrivateMapping, "revert", interrupted)
        patch.setattr(np, "copyto", half)
        with pytest.raises(KeyboardInterrupt):
            change()
    with pytest.raises(MediumError, match="undone"):
        shelf.sync()
    with pytest.raises(MediumError):
        shelf.close()
    with Shelf(path) as again:
        assert not again.x.any()


@pytest.mark.parametrize(("moment", "count"), [("append", 40), ("append", 9000), ("copy", 300_000)])
def test_what_a_thread_writes_while_it_is_stored_is_in_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, count: int
) -> None:
    """By an entry of the log, or by new extents."""
    path = tmp_path / "a.portus"
    place = LogWriter if moment == "append" else model_log
    right = getattr(place, moment)

    def and_then_written(*arguments: Any) -> Any:
        found = right(*arguments)
        shelf.x[-1] = 9
        return found

    with Shelf(path) as shelf:
        shelf.x = np.zeros(count)
        shelf.x[:] = 1
        with monkeypatch.context() as patch:
            patch.setattr(place, moment, and_then_written)
            shelf.sync()
        assert shelf.x[-1] == 9
        with Shelf(path, "r") as other:
            assert (other.x == 1).all()
        shelf.sync()
        with Shelf(path, "r") as other:
            assert other.x[-1] == 9
            assert (other.x[:-1] == 1).all()
    assert check(path) == []


def test_a_tensor_takes_what_lies_in_its_own_memory_and_whatever_became_of_its_view(
    tmp_path: Path,
) -> None:
    path, square = tmp_path / "a.portus", torch.arange(10_000.0).reshape(100, 100)
    with Shelf(path) as shelf:
        shelf.x, shelf.y, shelf.z = square, torch.zeros(3), np.zeros((2, 3))
        shelf.x = shelf.x.T
        shelf.y.requires_grad_()
        shelf.y = torch.ones(3)
        shelf.resize("y", 4)
        assert not shelf.y.requires_grad
        shelf.z.shape = (6,)
        shelf.z = np.ones((2, 3))
    with Shelf(path, "r") as shelf:
        assert torch.equal(shelf.x, square.T)
        assert shelf.y.tolist() == [1, 1, 1, 0]
        assert shelf.z.tolist() == [[1, 1, 1], [1, 1, 1]]


def share(tensor: torch.Tensor) -> None:
    tensor.share_memory_()


def send(tensor: torch.Tensor) -> None:
    queue = torch.multiprocessing.get_context("spawn").Queue()
    queue.put(tensor)
    assert torch.equal(queue.get(), tensor)


def set_data(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.clone()


@pytest.mark.parametrize("move", [share, send, set_data])
@pytest.mark.parametrize("size", [7, 300_000])
def test_a_tensor_that_torch_moves_elsewhere_is_still_on_the_shelf(
    tmp_path: Path, move: Callable[[torch.Tensor], None], size: int
) -> None:
    def durable() -> list[float]:
        with Shelf(path, "r") as there:
            found: list[float] = there.x.unique().tolist()
            return found

    path = tmp_path / "a.portus"
    with Shelf(path) as shelf:
        shelf.x = torch.zeros(size)
        view = shelf.x
        move(view)
        view.fill_(1)
        shelf.sync()
        assert durable() == [1]
        with shelf.transaction():
            view.fill_(2)
        assert durable() == [2]
        with contextlib.suppress(ZeroDivisionError), shelf.transaction():
            view.fill_(3)
            raise ZeroDivisionError
        assert view.unique().tolist() == shelf.x.unique().tolist() == durable() == [2]
        view.fill_(4)
        shelf.x = view
        assert durable() == [4]
        shelf.x = torch.full((size,), 5.0)
        assert shelf.x.unique().tolist() == durable() == [5]
        shelf.x.fill_(6)
    assert durable() == [6]


def test_a_view_whose_data_has_another_shape_is_refused_by_name_and_undone(tmp_path: Path) -> None:
    with Shelf(tmp_path / "a.portus") as shelf:
        shelf.x = torch.zeros(5)
        shelf.x.data = torch.ones(2)
        with pytest.raises(UsageError, match=r"expected \[5\] of float32, found \[2\]"):
            shelf.sync()
        with contextlib.suppress(ZeroDivisionError), shelf.transaction():
            raise ZeroDivisionError
        assert shelf.x.tolist() == [0] * 5
        shelf.x += 1
    with Shelf(tmp_path / "a.portus", "r") as shelf:
        assert shelf.x.tolist() == [1] * 5


def test_a_shelf_that_nobody_holds_is_released_and_keeps_what_was_committed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.portus"
    shelf = Shelf(path)
    shelf.x = np.zeros(3)
    view = shelf.x
    view += 1
    del shelf
    gc.collect()
    with Shelf(path) as shelf:
        assert shelf.x.tolist() == [0] * 3
    assert view.tolist() == [1] * 3


def test_no_name_is_lost_in_silence(tmp_path: Path) -> None:
    with Shelf(tmp_path / "a.portus") as shelf:
        names = ["_centers", "__class__", "_items"]
        for name in names:
            if name != "_items":  # that is its own
                with pytest.raises(AttributeError, match="use shelf"):
                    setattr(shelf, name, 5)
            shelf[name] = name
        shelf.x = 1
        wrong: tuple[Any, ...] = ("$x", "", 5, "\ud800")
        for name in wrong:
            with pytest.raises(UsageError):
                shelf.rename("x", name)
            with pytest.raises(UsageError):
                shelf[name] = 1
        with pytest.raises(AttributeError, match="use shelf"):
            shelf._centers  # noqa: B018
        assert [shelf[name] for name in shelf] == [*names, 1]


def test_a_shelf_is_not_closed_within_a_transaction(tmp_path: Path) -> None:
    path = tmp_path / "a.portus"
    with Shelf(path) as shelf:
        with shelf.transaction():
            shelf.x = np.ones(2)
            with pytest.raises(UsageError, match="transaction"):
                shelf.close()
        assert shelf.x.tolist() == [1, 1]

    def begun() -> Iterator[None]:
        with shelf.transaction():
            shelf.x[:] = 2
            yield

    steps = begun()
    with pytest.raises(UsageError, match="transaction"), Shelf(path) as shelf:
        next(steps)
    with Shelf(path) as again:
        assert again.x.tolist() == [1, 1]
    with pytest.raises(UsageError, match="closed"):
        list(steps)


def _commit_in_child(shelf: Shelf, found: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    """In a forked child; says what the view has, which was not changed, whenever a commit may be
    at work."""
    shelf.x[0] = 7
    right = LogWriter.append

    def looked(*arguments: Any) -> None:
        found.put("the pool was stored to")
        right(*arguments)

    LogWriter.append = looked  # type: ignore[method-assign, assignment]
    for act in (shelf.sync, shelf.close, lambda: setattr(shelf, "n", 1)):
        with contextlib.suppress(UsageError):
            act()
            found.put("it was let do that")
    found.put("done")


def test_a_forked_child_commits_nothing_not_even_in_memory(tmp_path: Path) -> None:
    with Shelf(tmp_path / "a.portus") as shelf:
        shelf.x = np.zeros(1 << 20, np.uint8)
        context = multiprocessing.get_context("fork")
        found = context.Queue()
        child = context.Process(target=_commit_in_child, args=(shelf, found))
        child.start()
        assert found.get(timeout=60) == "done"
        child.join()
        assert not shelf.x.any()


def test_one_writer_and_who_it_is(tmp_path: Path) -> None:
    advice = r"pid .*To read it meanwhile: portus.Shelf\('.*a.portus', mode=\"r\"\)"
    with Shelf(tmp_path / "a.portus"), pytest.raises(BusyError, match=advice):
        Shelf(tmp_path / "a.portus", timeout_s=0)


def test_a_pool_that_is_too_small_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.portus"
    with Shelf(path, max_bytes=2 << 20, log_bytes=8 * PAGE) as shelf:
        shelf.x = np.zeros(100 * PAGE, np.uint8)
        for step in range(30):
            shelf.x[step * PAGE] = step
            shelf.sync()
        with pytest.raises(MediumError, match="max_bytes"):
            shelf.y = np.zeros(2 << 20, np.uint8)
        assert shelf.keys() == ("x",)
        shelf.x[0] = 77
    with Shelf(path) as shelf:
        assert shelf.x[::PAGE][:30].tolist() == [77, *range(1, 30)]


def test_bad_input_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.portus"
    with Shelf(path) as shelf:
        shelf.y = np.zeros(2)
        values = (object(), np.array([object()]), {3.5: 1}, {1, 2}, torch.empty(2).to_sparse())
        masked = np.ma.array([1.0, 2.0], mask=[False, True])
        for value in (*values, masked, "\ud800", {"\udfff": 1}):
            with pytest.raises(UsageError):
                shelf.x = value
            with pytest.raises(UsageError), shelf.transaction():
                shelf.y = value
        shelf.z = torch.zeros(2, 2)
        with FakeTensorMode():
            fake = torch.ones(2, 2)
        for strange in (torch.eye(2).to_sparse(), torch.empty(2, 2, device="meta"), fake):
            with pytest.raises(UsageError, match="only dense"):
                shelf.z = strange
        for name, sizes in (("y", (0, 1 << 62)), ("y", (1,) * 70), ("z", (0, 1 << 70))):
            with pytest.raises(UsageError, match=f"{len(sizes)} sizes"):
                shelf.resize(name, *sizes)
        with pytest.raises(MediumError, match="no memory"):
            shelf.resize("y", 1 << 62)
        with pytest.raises(UsageError):
            shelf["$x"] = 1
        with pytest.raises(AttributeError):
            shelf.sync = 1  # type: ignore[method-assign,assignment]
        with pytest.raises(AttributeError):
            shelf.missing  # noqa: B018
        with pytest.raises(KeyError):
            shelf.swap("a", "b")
        shelf.x = 1
        with pytest.raises(UsageError):
            shelf.resize("x", 3)
        with pytest.raises(UsageError), shelf.transaction(), shelf.transaction():
            pass
        with pytest.raises(UsageError), shelf.transaction():
            shelf.sync()
    with pytest.raises(UsageError):
        shelf.x = 2
    with Shelf(path, "r") as other, pytest.raises(UsageError):
        other.x = 2
    with portus.PoolCheckpointer(tmp_path / "b.portus") as checkpointer:
        checkpointer.save({"x": torch.ones(1)}, step=1).wait()
    with pytest.raises(UsageError, match="expected a shelf"):
        Shelf(tmp_path / "b.portus")


def test_what_is_no_shelf_s_place_is_told_with_what_is(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UsageError, match="whose name ends with"):
            Shelf(path)
    with pytest.raises(PortusError, match=r"none\.portus"):
        Shelf(tmp_path / "none.portus", "r")
    assert list(tmp_path.iterdir()) == []


def test_an_assignment_that_fails_half_way_leaves_the_array_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(target: np.ndarray, value: np.ndarray) -> None:
        target[:2] = value[:2]
        raise KeyboardInterrupt

    with Shelf(tmp_path / "a.portus") as shelf:
        shelf.x = np.zeros(4)
        with monkeypatch.context() as patch:
            patch.setattr(np, "copyto", interrupted)
            with pytest.raises(KeyboardInterrupt):
                shelf.x = np.ones(4)
        assert shelf.x.tolist() == [0] * 4
        shelf.resize("x", np.int64(2))
        assert shelf.x.tolist() == [0, 0]


def test_neither_a_shelf_nor_a_run_of_its_name_takes_the_place_of_the_other(tmp_path: Path) -> None:
    shelf_path, run_path, state = tmp_path / "a.portus", tmp_path / "b.portus", {"x": torch.ones(1)}
    with Shelf(shelf_path) as shelf:
        shelf.x = torch.zeros(1)
    with portus.PoolCheckpointer(run_path, model="shelf") as run:
        run.save(state, step=1).wait()
    with pytest.raises(UsageError, match="expected a shelf"):
        Shelf(run_path)
    with pytest.raises(UsageError, match="expected checkpoints, found a shelf"):
        portus.PoolCheckpointer(shelf_path, model="shelf")
    with portus.PoolCheckpointer(shelf_path) as beside:  # of another name
        beside.save(state, step=1).wait()
        with pytest.raises(BusyError):
            Shelf(shelf_path, timeout_s=0)
    with Shelf(shelf_path) as shelf:
        assert shelf.x.tolist() == [0]
        shelf.x = torch.full((1,), 5.0)
    with portus.PoolCheckpointer(run_path, model="shelf") as run:
        assert [each.step for each in run.versions()] == [1]
    with portus.PoolCheckpointer(shelf_path) as beside:
        assert beside.load() == state


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.portus"
    with Shelf(path) as shelf:
        shelf.x = np.full(3 * PAGE, 7, np.uint8)
        shelf.x[:] = 9
    data = bytearray(path.read_bytes())
    for value in (7, 9):
        at = data.index(bytes([value]) * PAGE)
        path.write_bytes(data[:at] + b"!" + data[at + 1 :])
        with pytest.raises(CorruptionError, match="x" if value == 7 else "entry"):
            Shelf(path)
        assert check(path)
    path.write_bytes(data)
    assert check(path) == []


def test_what_a_lost_version_left_in_the_log_is_no_damage_and_comes_back_in_no_other(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.portus"
    with Shelf(path) as shelf:
        shelf.x = np.zeros(5000)
        shelf.y = np.ones(3)  # a version, to which both entries of the log belong
        for place in (0, 600):
            shelf.x[place] = 5
            shelf.sync()
    with contextlib.closing(open_reader(str(path))) as reader:
        catalogue = reader.catalogue()
    [entry] = catalogue.entries()
    data = bytearray(path.read_bytes())
    places = [*SLOT_OFFSETS[catalogue.root.slot :: 2]]
    places += [each.offset for each in entry.pointer.extents]
    for place in places:
        data[place + 20] ^= 1
    path.write_bytes(data)
    with Shelf(path) as shelf:  # the version before it is all that is left
        assert shelf.keys() == ("x",)
    with Shelf(path) as shelf:
        shelf.x[700] = 1
        shelf.sync()
        shelf.z = 1  # of the same number, on the same log
        shelf.w = np.ones(3)
    with Shelf(path) as shelf:
        assert (shelf.keys(), shelf.x.sum()) == (("x", "z", "w"), 1)
    assert check(path) == []


def many_commits(path: Path) -> dict[str, object]:
    """A shelf of some commits of all kinds, closed; what it shows."""
    with Shelf(path, log_bytes=24 * PAGE) as shelf:
        shelf.x, shelf.y = np.arange(5000.0), torch.ones(700)
        for step in range(12):
            with shelf.transaction():
                shelf.x[step * 300] = step
                shelf.y += 1
                shelf.step = step
            if step == 7:
                shelf.swap("x", "y")
                shelf.swap("x", "y")
        shelf.z = np.full(2000, 3)
        shelf.y[5] = 7
        shelf.sync()
        return content(shelf)


def content(shelf: Shelf) -> dict[str, object]:
    return plain({name: shelf[name] for name in shelf})


def plain(state: object) -> dict[str, object]:
    assert isinstance(state, dict)
    return {name: getattr(value, "tolist", lambda v=value: v)() for name, value in state.items()}


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.long)])
def test_a_flipped_byte_is_found_or_does_no_harm(tmp_path: Path, count: int) -> None:
    path = tmp_path / "a.portus"
    expected = many_commits(path)
    pages = np.fromfile(path, np.uint8).reshape(-1, PAGE)
    used = np.flatnonzero(pages.any(axis=1))  # others are the space of nobody
    rng, damaged = np.random.default_rng(11), 0
    for _ in range(count):
        place = int(rng.choice(used)) * PAGE + int(rng.integers(PAGE))
        with path.open("r+b") as file:
            byte = pages.reshape(-1)[place]
            file.seek(place)
            file.write(bytes([byte ^ 1 << int(rng.integers(8))]))
        try:
            with Shelf(path, "r") as shelf:
                assert content(shelf) == expected
        except CorruptionError:
            damaged += 1
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes([byte]))
    assert damaged > count // 10


def test_every_way_to_load_a_version_sees_what_the_log_says(tmp_path: Path) -> None:
    path = tmp_path / "a.portus"
    expected = many_commits(path)
    view = portus.open(path)
    assert plain(view.load("shelf")) == expected
    into = {"y": torch.zeros(700)}
    view.restore_into(into, "shelf", names="y")
    assert into["y"].tolist() == expected["y"]
    [info] = view.versions("shelf")
    assert view.verify(info) == info.size
    view.close()
    with portus.Shelf(path, "r"), contextlib.closing(open_reader(str(path))) as reader:
        [entry] = reader.catalogue().entries()
        out = tmp_path / "a.pt"
        with open_version(reader, entry) as version:
            export.write(StateFile(version), "it", str(out), ExportOptions(out="a.pt"))
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
    data = out.read_bytes()

    def read(offset: int, length: int) -> bytes:
        return data[offset : offset + length]

    read_torch(read, len(data), "out").verify(read)
    assert plain(torch.load(out, weights_only=False)) == expected


def _read_in_child(path: str, view: np.ndarray, found: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    with Shelf(path, "r") as shelf:
        found.put((shelf.x.sum(), view.sum()))


def test_a_forked_child_sees_views_and_may_read(tmp_path: Path) -> None:
    with Shelf(tmp_path / "a.portus") as shelf:
        shelf.x = np.zeros(1 << 20, np.uint8)
        shelf.x[5] = 1
        context = multiprocessing.get_context("fork")
        found = context.Queue()
        child = context.Process(
            target=_read_in_child, args=(str(tmp_path / "a.portus"), shelf.x, found)
        )
        child.start()
        assert found.get(timeout=60) == (0, 1)
        child.join()


@pytest.mark.parametrize(
    "wrong", [{"max_bytes": 0}, {"max_bytes": 1.5}, {"log_bytes": -1}, {"timeout_s": "1"}]
)
def test_a_setting_that_makes_no_sense_is_named_and_makes_no_file(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "s.portus"
    (name,) = wrong
    with pytest.raises(UsageError, match=rf"^{name}: expected (bytes|seconds)"):
        portus.Shelf(path, **wrong)
    assert not path.exists()


@pytest.mark.parametrize("size", [0, 1, 10, 300_000])
def test_whoever_writes_to_a_view_of_a_shelf_for_reading_is_told(size: int, tmp_path: Path) -> None:
    path = tmp_path / "a.portus"
    with Shelf(path) as writer:
        writer.array, writer.tensor = np.zeros(size), torch.zeros(size)
        writer.nested = {"array": [np.zeros(size)], "tensor": (torch.zeros(size),)}
        with Shelf(path, mode="r") as reader:
            for each in (reader.array, reader.nested["array"][0]):
                assert not each.flags.writeable
                with pytest.raises(ValueError, match="read-only"):
                    each[:] = 1
            for each in (reader.tensor, reader.nested["tensor"][0]):
                with pytest.raises(RuntimeError, match="inference tensor"):
                    each.add_(1)
            writer.array, writer.tensor = np.ones(size), torch.ones(size)
            reader.refresh()
            assert (reader.array == 1).all()
            assert (reader.tensor == 1).all()
            assert not reader.array.flags.writeable
            assert reader.tensor.is_inference()
        writer.array[:] = 2  # those of a writer are as ever
        writer.tensor.fill_(2)
