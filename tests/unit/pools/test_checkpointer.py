from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import errno
import logging
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
import torch

import portus
from portus.engine.paths import process
from portus.engine.pipeline.audit import Guard
from portus.errors import (
    AbandonedError,
    CorruptionError,
    MediumError,
    NoCheckpointError,
    PortusError,
    StaleError,
    TransportError,
    UsageError,
)
from portus.reach.index.directory import WRITERS, open_reader
from portus.reach.pools.checkpointer import PoolCheckpointer
from portus.reach.pools.image_draft import ImageDraft
from portus.reach.pools.view import PoolView
from portus.reach.protocol.address import Address, Scheme
from portus.reach.versions.pool_draft import PoolDraft
from tests.adapters.torn import slow_down
from tests.hosts import serving, url
from tests.moments import at, elsewhere
from tests.warm import in_process


class Training:
    """A little model that is really trained."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 64)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 64)).pow(2).mean().backward()
        self.optimizer.step()

    def state(self, step: int = 0) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": step,
            "losses": [0.5, step],
        }


def same(left: object, right: object) -> bool:
    """Bit for bit, through dicts, lists and tuples."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and bool(
            left.dtype == right.dtype and torch.equal(left, right)
        )
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and list(left) == list(right)
            and all(same(left[key], right[key]) for key in left)
        )
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and all(map(same, left, right))
    return left == right


@pytest.fixture
def training() -> Training:
    torch.manual_seed(0)
    return Training()


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return tmp_path / "pool" / "run.portus"


@pytest.fixture(params=["file", "tcp", "unix"])
def checkpointer(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[PoolCheckpointer]:
    """One of this machine, or on a storage host: for a training loop they are the same."""
    if request.param == "file":
        with PoolCheckpointer(pool) as opened:
            yield opened
        return
    monkeypatch.chdir(tmp_path)
    with tempfile.TemporaryDirectory(prefix="portus-") as folder:  # paths of sockets are short
        unix = Address(Scheme.UNIX, path=f"{folder}/portus.sock")
        with (
            serving(pool.parent, address=unix if request.param == "unix" else None) as server,
            PoolCheckpointer(url(server)) as opened,
        ):
            yield opened


def test_every_version_holds_the_state_at_its_call(
    checkpointer: PoolCheckpointer, training: Training
) -> None:
    states = {}
    for step in range(6):
        training.step()
        states[step] = copy.deepcopy(training.state(step))
        handle = checkpointer.save(training.state(step), step)
        training.step()
        assert handle.wait(10).step == step
        assert same(checkpointer.load(step), states[step])
    assert checkpointer.steps() == [4, 5]
    assert same(checkpointer.load(4), states[4])


def test_a_load_right_after_a_save_waits_for_it(
    checkpointer: PoolCheckpointer, training: Training
) -> None:
    training.step()
    checkpointer.save(training.state(7), 7)
    assert same(checkpointer.load(), training.state(7))


def test_restore_into_fills_the_same_tensors_and_sets_the_rest(
    checkpointer: PoolCheckpointer, training: Training
) -> None:
    training.step()
    checkpointer.save(training.state(3), 3)
    saved = copy.deepcopy(training.state(3))
    training.step()
    target = training.state(4)
    pointers = [tensor.data_ptr() for tensor in training.model.state_dict().values()]
    restored = checkpointer.restore_into(target)
    assert restored.version.step == 3
    assert same(target, saved)
    assert same(training.model.state_dict(), saved["model"])
    assert [t.data_ptr() for t in training.model.state_dict().values()] == pointers


@dataclasses.dataclass(frozen=True)
class Average:
    """A container that is neither dict nor list."""

    value: torch.Tensor
    updates: int


class Bounds(NamedTuple):
    low: torch.Tensor
    name: str


def test_restore_into_keeps_the_tensors_in_containers_of_any_kind(
    checkpointer: PoolCheckpointer,
) -> None:
    def state(fill: float, number: int) -> dict[str, Any]:
        return {
            "tuple": (torch.full((3,), fill), number, [torch.full((2,), fill), number]),
            "named": Bounds(torch.full((4,), fill), str(number)),
            "dataclass": Average(torch.full((5,), fill), number),
            "deque": collections.deque([torch.full((6,), fill), number], maxlen=3),
            "namespace": argparse.Namespace(tensor=torch.full((7,), fill), number=number),
        }

    checkpointer.save(state(1.0, 1), 0)
    target = state(0.0, 0)
    tensors = [
        target["tuple"][0], target["tuple"][2][0], target["named"].low,
        target["dataclass"].value, target["deque"][0], target["namespace"].tensor,
    ]  # fmt: skip
    dataclass = target["dataclass"]
    checkpointer.restore_into(target, weights_only=False)
    assert all(bool((tensor == 1).all()) for tensor in tensors)
    assert target["tuple"][:2] == (tensors[0], 1)
    assert target["tuple"][2][0] is tensors[1]
    assert target["tuple"][2][1] == 1
    assert target["named"].low is tensors[2]
    assert target["named"].name == "1"
    assert target["dataclass"] is dataclass
    assert dataclass.value is tensors[3]
    assert dataclass.updates == 1
    assert target["deque"][0] is tensors[4]
    assert target["deque"][1] == 1
    assert target["namespace"].tensor is tensors[5]
    assert target["namespace"].number == 1


def test_restore_into_gives_lists_their_length_and_dicts_their_values_again(
    checkpointer: PoolCheckpointer,
) -> None:
    saved = {
        "x": torch.ones(1),
        "losses": [3.0, 2.0],
        "mixed": [torch.ones(1), None, {"a": 1}],
        "best": {"score": 0.5},
        "none": None,
    }
    checkpointer.save(saved, 0)
    later = {
        "x": torch.zeros(1),
        "losses": [3.0, 2.0, 1.0],
        "mixed": [torch.zeros(1), 7, {}, "more"],
        "best": {},
        "none": 5,
    }
    losses = later["losses"]
    checkpointer.restore_into(later)
    assert same(later, saved)
    assert later["losses"] is losses
    fresh: dict[str, Any] = {"x": torch.zeros(1), "losses": [], "best": {}}
    checkpointer.restore_into(fresh, names=["losses", "best.*"], strict=False)
    assert same(fresh, {"x": torch.zeros(1), "losses": [3.0, 2.0], "best": {}})


def test_restore_into_by_names_leaves_the_rest_alone(
    checkpointer: PoolCheckpointer, training: Training
) -> None:
    training.step()
    checkpointer.save(training.state(3), 3)
    saved = copy.deepcopy(training.state(3))
    training.step()
    later = copy.deepcopy(training.state(4))
    target = training.state(4)
    checkpointer.restore_into(target, names="model.0.*")
    assert torch.equal(target["model"]["0.weight"], saved["model"]["0.weight"])
    assert torch.equal(target["model"]["2.weight"], later["model"]["2.weight"])
    assert target["step"] == 4


def test_restore_into_what_has_lazy_bits_reads_back_as_saved(
    checkpointer: PoolCheckpointer,
) -> None:
    saved = torch.randn(4, 3, dtype=torch.complex64)
    names = ("plain", "conjugate", "negative", "both")
    for source in (saved, saved.conj(), torch._neg_view(saved)):
        checkpointer.save(dict.fromkeys(names, source.clone()), 1, synchronous=True)
        checkpointer.save(dict.fromkeys(names, source), 2, synchronous=True)
        for step in (1, 2):
            blank = [torch.zeros(4, 3, dtype=torch.complex64) for _ in names]
            target = {
                "plain": blank[0],
                "conjugate": blank[1].conj(),
                "negative": torch._neg_view(blank[2]),
                "both": torch._neg_view(blank[3].conj()),
            }
            checkpointer.restore_into(target, step)
            for tensor in target.values():
                assert torch.equal(tensor, source)


def test_restore_into_an_expanded_tensor_is_refused_before_anything_is_written(
    checkpointer: PoolCheckpointer,
) -> None:
    checkpointer.save({"a": torch.ones(3), "b": torch.arange(6.0).view(2, 3)}, 1, synchronous=True)
    target = {"a": torch.zeros(3), "b": torch.zeros(3).expand(2, 3)}
    with pytest.raises(UsageError, match="which is untouched: b is expanded in the state"):
        checkpointer.restore_into(target)
    assert not target["a"].any()
    row = torch.arange(3.0)
    checkpointer.save({"a": torch.ones(3), "b": row.expand(2, 3)}, 2, synchronous=True)
    checkpointer.restore_into(target)
    assert torch.equal(target["b"], row.expand(2, 3))
    assert torch.equal(target["a"], torch.ones(3))


def test_restore_into_renames(checkpointer: PoolCheckpointer) -> None:
    checkpointer.save({"old": torch.arange(4)}, 0)
    target = {"new": torch.zeros(4, dtype=torch.int64)}
    checkpointer.restore_into(target, rename={"old": "new"})
    assert target["new"].tolist() == [0, 1, 2, 3]


def test_restore_into_what_does_not_fit_lists_it_and_touches_nothing(
    checkpointer: PoolCheckpointer,
) -> None:
    checkpointer.save({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)}, 0)
    target = {"a": torch.zeros(2), "b": torch.zeros(5), "d": torch.zeros(4)}
    with pytest.raises(UsageError) as caught:
        checkpointer.restore_into(target)
    for part in ("size mismatch for b", "[3]", "[5]", "missing in the version: d", "unexpected"):
        assert part in str(caught.value)
    assert not any(bool(tensor.any()) for tensor in target.values())
    assert checkpointer.restore_into(
        {"a": target["a"], "d": target["d"]}, strict=False
    ).missing == ("d",)
    assert target["a"].tolist() == [1, 1]


def test_restore_into_casts_views_and_ties(checkpointer: PoolCheckpointer) -> None:
    base = torch.arange(20.0)
    state = {"tied": base, "view": base[5:9], "transposed": torch.arange(6.0).reshape(2, 3).t()}
    checkpointer.save(state, 0)
    target = {
        "tied": torch.zeros(20, dtype=torch.float64),
        "view": torch.zeros(4),
        "transposed": torch.zeros(3, 2),
    }
    checkpointer.restore_into(target)
    assert target["tied"].tolist() == base.tolist()
    assert target["view"].tolist() == [5, 6, 7, 8]
    assert torch.equal(target["transposed"], state["transposed"])


def test_a_part_is_loaded_by_pattern(checkpointer: PoolCheckpointer, training: Training) -> None:
    training.step()
    checkpointer.save(training.state(), 0)
    part = checkpointer.load(names=["model.0.*", "step"])
    assert isinstance(part, dict)
    assert set(part) == {"model", "step"}
    assert list(part["model"]) == ["0.weight", "0.bias"]


def test_the_newest_that_verifies_is_loaded_when_the_newest_is_damaged(
    checkpointer: PoolCheckpointer, pool: Path, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    states = {}
    for step in (1, 2):
        training.step()
        states[step] = copy.deepcopy(training.state(step))
        checkpointer.save(training.state(step), step).wait()
    _damage(pool, step=2)
    with caplog.at_level(logging.ERROR, "portus"):
        assert same(checkpointer.load(), states[1])
    assert "FALLING BACK to step 1" in caplog.text
    with pytest.raises(
        CorruptionError, match=r"'default', step 2 .* are not those that were saved"
    ):
        checkpointer.load(2)


def test_restore_into_is_untouched_when_nothing_verifies(
    checkpointer: PoolCheckpointer, pool: Path, training: Training
) -> None:
    training.step()
    checkpointer.save(training.state(1), 1).wait()
    _damage(pool, step=1)
    training.step()
    target = training.state(2)
    before = copy.deepcopy(target)
    with pytest.raises(CorruptionError):
        checkpointer.restore_into(target)
    assert same(target, before)


def test_frozen_weights_are_written_once(
    checkpointer: PoolCheckpointer,
) -> None:
    frozen = torch.nn.Linear(512, 512).requires_grad_(False)
    head = torch.nn.Linear(512, 8)
    optimizer = torch.optim.AdamW(head.parameters())
    sizes = []
    for step in range(4):
        optimizer.zero_grad()
        head(frozen(torch.randn(4, 512))).sum().backward()
        optimizer.step()
        state = {"frozen": frozen.state_dict(), "head": head.state_dict()}
        handle = checkpointer.save(state, step)
        handle.wait()
        sizes.append(handle.stats.copied_bytes)
    assert all(size <= 0.06 * sizes[0] for size in sizes[1:]), sizes
    assert same(checkpointer.load(), state)


class Stepped:
    """Weights of a size that an optimizer steps, seen doing so."""

    def __init__(self, count: int, size: int) -> None:
        self.weights = [torch.nn.Parameter(torch.rand(size)) for _ in range(count)]
        self.optimizer = torch.optim.SGD(self.weights, lr=0.1)

    def step(self) -> None:
        for weight in self.weights:
            weight.grad = torch.ones_like(weight)
        self.optimizer.step()


@pytest.mark.parametrize("guard", ["exact", "probe"])
def test_a_guard_may_be_chosen_and_is_told_of_in_the_statistics(pool: Path, guard: Guard) -> None:
    run = Stepped(2, 1 << 10)
    with PoolCheckpointer(pool, guard=guard) as checkpointer:
        ways = []
        for step in range(2):
            checkpointer.save({"weights": run.weights}, step).wait()
            assert checkpointer.last_stats is not None
            ways.append(checkpointer.last_stats.guard)
            run.step()
    assert ways == ["", "hash" if guard == "exact" else "probe"], "nothing was late before a step"


def test_a_writer_costs_a_version_now_and_then_and_never_ends_overlap_for_good(pool: Path) -> None:
    """The storage that was torn, and what the same optimizer has, is copied at once for 1, 2, 4...
    saves, and then late again."""
    run, other = Stepped(3, 1 << 10), Stepped(1, 1 << 10)
    lost, late = [], []
    with PoolCheckpointer(pool, keep=None) as checkpointer:
        for step in range(12):
            run.step()
            other.step()
            written = threading.Event()
            slow_down(checkpointer._saver, written.wait)
            handle = checkpointer.save({"weights": run.weights, "other": other.weights}, step)
            late.append(len(handle.of.storages))  # type: ignore[attr-defined]
            run.weights[1].detach().numpy()[3] = step
            written.set()
            try:
                handle.wait()
            except AbandonedError:
                lost.append(step)
    assert lost == [0, 2, 5, 10]
    assert late == [4 if step in lost else 1 for step in range(12)]


@pytest.mark.long(every_case=True)
def test_two_saves_of_one_step_copy_once(
    checkpointer: PoolCheckpointer, training: Training
) -> None:
    for step in range(3):
        training.step()
        first = checkpointer.save(training.state(1), 2 * step)
        second = checkpointer.save({**training.state(1), "note": "last"}, 2 * step + 1)
        second.wait()
        assert second.stats.copied_bytes <= first.stats.copied_bytes * 0.02 + 50_000
    assert same(checkpointer.load(), {**training.state(1), "note": "last"})


def test_a_step_that_is_saved_again_is_replaced(
    checkpointer: PoolCheckpointer,
) -> None:
    for value in (1, 2):
        checkpointer.save({"x": torch.tensor([value])}, 5)
    assert int(checkpointer.load(5)["x"]) == 2
    checkpointer.wait()
    assert checkpointer.steps() == [5]


def test_nothing_is_made_before_the_first_save(pool: Path) -> None:
    with PoolCheckpointer(pool) as checkpointer:
        assert checkpointer.steps() == []
        with pytest.raises(NoCheckpointError, match="there is no pool yet"):
            checkpointer.load()
        with pytest.raises(UsageError, match="step"):
            checkpointer.save({}, "one")  # type: ignore[arg-type]
    assert not pool.parent.exists()


def _unused(pool: Path) -> PoolCheckpointer:
    """One that made a pool, and saved nothing to it."""
    made = PoolCheckpointer(pool, "unused", max_bytes=4 << 20)
    with pytest.raises(MediumError, match="max_bytes"):
        made.save({"x": torch.ones(4 << 20)}, 1).wait()
    assert pool.exists()
    return made


def test_a_pool_that_was_never_used_goes_at_the_end(pool: Path) -> None:
    _unused(pool).close()
    assert not pool.exists()


def test_a_pool_that_another_used_stays(pool: Path) -> None:
    first = _unused(pool)
    second = PoolCheckpointer(pool, "second")

    def save_and_close() -> None:
        second.save({"step": 1}, 1).wait()
        second.close()

    with at("call", WRITERS.close, elsewhere(save_and_close)):
        first.close()
    assert PoolView(pool).load("second") == {"step": 1}


def test_the_same_process_shares_the_writer(pool: Path) -> None:
    with (
        PoolCheckpointer(pool, model="a") as first,
        PoolCheckpointer(pool, model="b") as second,
    ):
        first.save({"x": torch.ones(1)}, 1).wait()
        second.save({"x": torch.ones(2)}, 2).wait()
        assert first.path == second.path
        assert (first.steps(), second.steps()) == ([1], [2])


def test_another_process_is_refused_and_told_how_to_read(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PoolCheckpointer(pool) as checkpointer:
        _refuse_others(checkpointer)


def _refuse_others(checkpointer: PoolCheckpointer) -> None:
    checkpointer.save({"x": torch.ones(3)}, 1).wait()
    script = (
        "import sys, portus\n"
        "from portus.reach.index.directory import WRITERS\n"
        "try:\n"
        "    WRITERS.open(sys.argv[1], timeout_s=0.1)\n"
        "except portus.BusyError as error:\n"
        "    print('busy:', error)\n"
        "with portus.open(sys.argv[1]) as view:\n"
        "    print('read:', view.load()['x'].tolist())\n"
    )
    result = in_process(script, checkpointer.path)
    assert f"pid {os.getpid()}" in result.stdout
    assert "portus.open(" in result.stdout
    assert "read: [1.0, 1.0, 1.0]" in result.stdout


def test_a_forked_child_may_not_use_it(checkpointer: PoolCheckpointer) -> None:
    checkpointer.save({"x": torch.ones(3)}, 1).wait()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            checkpointer.save({}, 2)
            os.write(write, b"saved")
        except UsageError as error:
            os.write(write, str(error).encode()[:200])
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"another process opened this" in os.read(read, 500)
    checkpointer.save({"x": torch.ones(3)}, 2).wait()


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_failed_save_is_reported_once_and_older_versions_load(
    pool: Path, on_error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with PoolCheckpointer(pool, on_error=on_error, max_bytes=8 << 20) as checkpointer:
        checkpointer.save({"x": torch.ones(1000)}, 1).wait()
        handle = checkpointer.save({"x": torch.ones(16 << 20)}, 2)
        assert handle.done
        if on_error == "raise":
            with pytest.raises(MediumError, match="max_bytes"):
                checkpointer.save({"x": torch.ones(1000)}, 3)
        checkpointer.save({"x": torch.ones(1000)}, 4).wait()
        assert checkpointer.steps()[-1] == 4
        assert (caplog.text.count("a save failed") == 1) == (on_error == "warn")
        with pytest.raises(MediumError, match="more bytes needed"):
            handle.wait()


@pytest.mark.parametrize("call", ["save", "wait", "close"])
def test_until_a_save_is_committed_a_failure_is_raised_at_the_next_call(
    pool: Path, call: str
) -> None:
    run = PoolCheckpointer(pool, max_bytes=8 << 20)
    run.save({"x": torch.ones(16 << 20)}, 1)
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: run.save({"x": torch.ones(10)}, 2),
        "wait": run.wait,
        "close": run.close,
    }
    with pytest.raises(MediumError, match="more bytes needed"):
        calls[call]()
    run.close()


def test_a_first_save_that_was_given_up_ends_no_training_that_saves_later(
    pool: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PoolCheckpointer(pool) as before:
        before.save({"x": 0}, 0).wait()
    for is_last in (True, False):
        run = PoolCheckpointer(pool)
        with monkeypatch.context() as patched:
            patched.setattr(ImageDraft, "commit", _give_up)
            run.save({"x": 1}, 1).join()
        if is_last:
            with pytest.raises(AbandonedError, match="somebody wrote to it"):
                run.close()
            continue
        run._saver.catch_up()
        run.save({"x": 2}, 2)
        assert "a save failed; training continues: somebody wrote to it" in caplog.text
        run.close()
    with portus.open(pool) as view:
        assert view.steps() == [0, 2]


def _give_up(*_: object) -> NoReturn:
    raise AbandonedError("somebody wrote to it")


def test_an_error_told_by_the_handle_is_not_told_again(pool: Path) -> None:
    with PoolCheckpointer(pool, on_error="raise", max_bytes=8 << 20) as checkpointer:
        with pytest.raises(MediumError):
            checkpointer.save({"x": torch.ones(16 << 20)}, 2).wait()
        checkpointer.save({"x": torch.ones(10)}, 3).wait()


def test_of_several_saves_that_failed_each_is_raised_once(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def fail(*_: object) -> NoReturn:
        assert go.wait(60)
        raise MediumError(5, "no")

    with PoolCheckpointer(pool, on_error="raise") as run:
        run.save({"step": 1}, 1).wait()
        monkeypatch.setattr(ImageDraft, "commit", fail)
        for step in (2, 3):
            run.save({"step": step}, step)
        go.set()
        for _ in range(2):
            with pytest.raises(MediumError):
                run.wait()
        run.wait()


def test_what_keep_wants_stays_over_a_restart_and_the_rest_goes(pool: Path) -> None:
    keep = portus.Keep(last=2, every=10, best=("loss", "min", 1))
    for steps in (range(1, 16), range(16, 28)):
        with PoolCheckpointer(pool, keep=keep) as run:
            for step in steps:
                loss = abs(step - 7.0) if step % 2 else float("nan")
                run.save({"x": torch.tensor([step])}, step, metrics={"loss": loss}).wait()
    with PoolCheckpointer(pool) as run:
        assert run.steps() == [7, 10, 20, 26, 27]
        assert [dict(info.metrics) for info in run.versions()[:2]] == [{"loss": 0.0}, {}]
    assert portus.check(pool) == []


def test_a_reader_in_this_process_sees_all_files_of_a_directory(pool: Path) -> None:
    for model in ("one", "two"):
        with PoolCheckpointer(pool.with_name(f"{model}.portus"), model) as checkpointer:
            checkpointer.save({"name": model}, 1).wait()
    with PoolView(pool.parent) as view:
        assert view.models() == ["one", "two"]
        assert view.load("two") == {"name": "two"}
        with pytest.raises(UsageError, match="no model 'three'"):
            view.load("three")


def test_the_pool_is_found_again_after_a_restart_and_shares_what_is_frozen(pool: Path) -> None:
    frozen = torch.randn(100_000)
    with PoolCheckpointer(pool) as checkpointer:
        checkpointer.save({"frozen": frozen, "x": torch.ones(1)}, 1).wait()
    with PoolCheckpointer(pool) as checkpointer:
        assert checkpointer.steps() == [1]
        handle = checkpointer.save({"frozen": frozen, "x": torch.zeros(1)}, 2)
        handle.wait()
        assert handle.stats.shared_bytes == frozen.nbytes
        assert handle.stats.copied_bytes < 1000
        assert same(checkpointer.load(), {"frozen": frozen, "x": torch.zeros(1)})


def test_saves_from_several_threads_are_all_kept(pool: Path) -> None:
    with PoolCheckpointer(pool, keep=None) as checkpointer:
        threads = [
            threading.Thread(
                target=lambda n=n: [
                    checkpointer.save({"x": torch.tensor([n, i])}, 100 * n + i) for i in range(10)
                ]
            )
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        checkpointer.wait()
        expected = sorted(100 * n + i for n in range(4) for i in range(10))
        assert sorted(checkpointer.steps()) == expected


@pytest.mark.parametrize(
    "arguments",
    [{"keep": 0}, {"model": ""}, {"on_error": "ignore"}, {"fence_timeout": 0}, {"snapshot": "x"}],
)
def test_senseless_arguments_are_refused(pool: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected"):
        PoolCheckpointer(pool, **arguments)


def test_a_file_that_is_no_pool_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.portus"
    path.write_bytes(bytes(100_000))
    with pytest.raises(CorruptionError, match="not a Portus pool"):
        PoolCheckpointer(path)
    assert path.read_bytes() == bytes(100_000)


def test_a_step_that_is_no_integer_is_refused(checkpointer: PoolCheckpointer) -> None:
    with pytest.raises(UsageError, match="step"):
        checkpointer.save({}, "one")  # type: ignore[arg-type]
    checkpointer.save({}, np.int64(3)).wait()
    assert checkpointer.steps() == [3]


@pytest.mark.long
def test_a_program_that_never_closes_still_gets_its_last_save(tmp_path: Path) -> None:
    script = (
        "import sys, torch, portus\n"
        "c = portus.PoolCheckpointer(sys.argv[1])\n"
        "c.save({'x': torch.ones(1 << 20)}, 1)\n"
    )
    pool = str(tmp_path / "run.portus")
    subprocess.run([sys.executable, "-c", script, pool], timeout=60, check=True)
    with PoolView(pool) as view:
        assert view.steps() == [1]


def _damage(pool: Path, step: int) -> None:
    """Flip a bit in the middle of the biggest storage of a version."""
    path = pool if pool.exists() else pool.with_name("default.portus")
    reader = open_reader(str(path))
    (entry,) = [e for e in reader.catalogue().entries() if e.info.step == step]
    record = reader.record(entry)
    reader.close()
    extent = record.storage_extents(int(np.argmax(record.storages["length"])))[0]
    with open(path, "r+b") as file:
        file.seek(extent.offset + extent.length // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def test_nothing_of_the_state_is_kept_alive_by_a_save_that_is_over(
    checkpointer: PoolCheckpointer, training: Training
) -> None:
    training.step()
    for step in range(3):
        own = torch.ones(1000)
        watched = weakref.ref(own)
        state = {**training.state(), "own": own}
        checkpointer.save(state, step).wait()
        del own, state
        assert watched() is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep": 0}, {"keep": "two"}, {"on_error": "ignore"}, {"snapshot": "later"}, {"verify": 1},
        {"fence_timeout": 0}, {"fence_timeout": None}, {"fence_timeout": "60"}, {"max_bytes": "1G"},
        {"max_bytes": 0}, {"model": ""}, {"model": None},
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named_before_anything_is_opened(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(wrong))}: expected .*found"):
        PoolCheckpointer(tmp_path / "pool.portus", **wrong)
    assert not (tmp_path / "pool.portus").exists()


def test_at_the_end_of_a_program_a_failed_save_keeps_no_other_from_being_finished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = [
        PoolCheckpointer(
            tmp_path / f"{number}.portus",
            f"run-{each}",
            on_error="raise",
            max_bytes=4 << 20 if each else None,
        )
        for number, each in enumerate((1, 0, 1))
    ]
    large = {"x": torch.zeros(2 << 20)}
    handles = [checkpointer.save(large, 1) for checkpointer in made]
    process._finish()
    assert [handle.done for handle in handles] == [True, True, True]
    assert [handle.committed for handle in handles] == [False, True, False]
    assert caplog.text.count("a save failed") == 2
    with PoolView(tmp_path) as view:
        assert view.models() == ["run-0"]


def test_what_ends_the_block_is_not_hidden_by_a_save_that_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def save(and_raise: Exception | None) -> None:
        with PoolCheckpointer(
            tmp_path / "run.portus", on_error="raise", max_bytes=4 << 20
        ) as checkpointer:
            checkpointer.save({"x": torch.zeros(2 << 20)}, 1)
            if and_raise is not None:
                raise and_raise

    with pytest.raises(KeyError, match="mine"):
        save(KeyError("mine"))
    assert "a save failed" in caplog.text
    with pytest.raises(MediumError):
        save(None)


def test_a_pool_may_be_in_the_home_directory_and_must_have_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with PoolCheckpointer("~/pools/run.portus", "run") as checkpointer:
        checkpointer.save({"a": 1}, 1).wait()
    assert checkpointer.path == str(tmp_path / "home/pools/run.portus")
    monkeypatch.setenv("PORTUS_POOL", "~/pools/run.portus")
    for pool in ("~/pools", None):
        with portus.open(pool) as view:
            assert view.steps("run") == [1]
    with PoolCheckpointer(model="run") as checkpointer:
        assert checkpointer.load() == {"a": 1}
    assert portus.check("~/pools/run.portus") == []
    assert os.listdir(tmp_path) == ["home"], "no directory that is called ~"
    calls: list[Callable[[str], object]] = [
        *(PoolCheckpointer, portus.open, portus.check, portus.allow)
    ]
    for refuses in calls:
        with pytest.raises(UsageError, match=r"(pool|directory): expected a path .* found ''"):
            refuses("")


@pytest.mark.parametrize(
    ("names", "near"),
    [
        ("modle.*", "near it are model"),
        (["number", "model.wieght"], r"near it are model\.weight"),
        ("typo", "paths begin with model, number, none"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_that_names_what_is_near(
    tmp_path: Path, names: str | list[str], near: str
) -> None:
    state = {"model": {"weight": torch.ones(3), "bias": torch.ones(2)}, "number": 7, "none": {}}
    with PoolCheckpointer(tmp_path / "a.portus") as checkpointer:
        checkpointer.save(state, 1).wait()
        found: Any = checkpointer.load(names=["number", "none", "model.b*"])
        assert (found["number"], found["none"], list(found["model"])) == (7, {}, ["bias"])
        with portus.open(checkpointer.path) as view:
            loads: list[Callable[[], object]] = [
                lambda: checkpointer.load(names=names),
                lambda: view.load(names=names),
                lambda: checkpointer.restore_into(state, names=names, strict=False),
                lambda: view.restore_into(state, names=names, strict=False),
            ]
            for load in loads:
                with pytest.raises(UsageError, match=rf"step 1 .*no key path matches.*{near}"):
                    load()


def test_a_pool_directory_is_checked_file_by_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no pool file in this directory"):
        portus.check(tmp_path)
    with pytest.raises(UsageError, match="portus verify --pool portus://there"):
        portus.check("portus://there")
    for model in ("one", "two"):
        with PoolCheckpointer(tmp_path / f"{model}.portus", model) as checkpointer:
            checkpointer.save({"x": torch.arange(5000)}, 1).wait()
    assert portus.check(tmp_path) == []
    damaged = tmp_path / "two.portus"
    data = bytearray(damaged.read_bytes())
    data[data.index(torch.arange(5000).numpy().tobytes()) + 9] ^= 1
    damaged.write_bytes(data)
    findings = portus.check(tmp_path)
    assert [each.where for each in findings] == [
        f"{damaged}: {each.where}" for each in portus.check(damaged)
    ]
    assert findings


@pytest.mark.parametrize("kind", [CorruptionError, MediumError, StaleError, TransportError])
def test_what_the_place_refuses_in_the_call_fails_the_save_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[PortusError]
) -> None:
    """Such as a storage host that learns in that moment that it does not lead any more."""

    def refuse(*arguments: object) -> NoReturn:
        raise kind(errno.EIO, "no") if kind is MediumError else kind("no")

    with portus.PoolCheckpointer(tmp_path / "run.portus", "net") as checkpointer:
        checkpointer.save({"w": torch.zeros(1000)}, 1).wait()
        with monkeypatch.context() as patched:
            patched.setattr(PoolDraft, "copy", refuse)
            handle = checkpointer.save({"w": torch.ones(1000)}, 2)
        with pytest.raises(kind, match="no"):
            handle.wait()
        checkpointer.save({"w": torch.ones(1000)}, 3).wait()
        assert checkpointer.steps() == [1, 3]


@pytest.mark.parametrize("contiguous", [False, True])
def test_a_full_pool_says_why_what_is_free_does_not_do(tmp_path: Path, contiguous: bool) -> None:
    path = tmp_path / "pool.portus"
    with PoolCheckpointer(path) as run:
        run.save({"x": torch.zeros(3)}, 1).wait()
    writer = WRITERS.open(str(path))
    try:
        writer.max_bytes = writer.medium.size
        held = []
        while writer.free_bytes() >= 72 << 10:
            held.append(writer.reserve(64 << 10))
        for each in held[::2]:
            writer.release(each)
        free, size = writer.free_bytes(), writer.medium.size
        with pytest.raises(MediumError) as caught:
            writer.reserve(128 << 10 if contiguous else size, contiguous=contiguous)
        for each in held[1::2]:
            writer.release(each)
    finally:
        WRITERS.close(writer)
    smaller = f"more bytes needed in one piece; {free} of {size} are free, in smaller pieces, max"
    short = f"more bytes needed than the {free} of {size} that are free, max"
    assert (smaller if contiguous else short) in str(caught.value)
