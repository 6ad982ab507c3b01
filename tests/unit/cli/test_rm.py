"""``portus rm``."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import portus as library
from portus.errors import UsageError
from portus.reach.index.directory import Writers
from portus.reach.index.place import Place
from portus.reach.pools.checkpointer import PoolCheckpointer
from tests.moments import at
from tests.unit.cli.scene import Run, pointing, portus, portus_json, state


def steps(pool: Path) -> list[int]:
    models = portus_json("ls", pool)["pools"][0]["models"]
    return [each["step"] for model in models for each in model["versions"]]


def make_anew(run: Run) -> None:
    """As ``Run`` does, with the same ids."""
    run.net.unlink()
    with run.trainer() as trainer:
        for step in (10, 20):
            trainer.save({"x": torch.zeros(1)}, step).wait()


def remove_10(_: Run) -> None:
    assert portus("rm", "net@10").code == 0


def while_asked(run: Run, act: Callable[[Run], object]) -> tuple[int, str]:
    """``portus rm net`` at a terminal, where yes is said after ``act``; its exit code, and all
    that it shows."""
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "portus", "rm", "net"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=run.root,
    ) as command:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while b"[y/N]" not in shown:
                shown += os.read(ours, 1 << 16)
            act(run)
            os.write(ours, b"y\n")
            while True:
                shown += os.read(ours, 1 << 16)
    os.close(ours)
    return command.returncode, shown.decode()


def test_a_version_is_let_go_of(run: Run) -> None:
    said = portus("rm", "net@10")
    assert said.code == 0
    assert "removed net@10 (version 1)" in said.out
    assert steps(run.net) == [20]
    assert portus("verify").code == 0


def test_all_versions_of_a_step_are_let_go_of(run: Run) -> None:
    with run.trainer() as trainer:
        trainer.save({"x": torch.zeros(1)}, 10).wait()
    [removed] = portus_json("rm", "net@10")["removed"]
    assert removed["step"] == 10
    assert steps(run.net) == [20]


def test_a_whole_model_is_removed_only_if_that_is_said(run: Run) -> None:
    said = portus("rm", "net")
    assert said.code == 2
    assert "use --yes for all of net" in said.err
    assert steps(run.net) == [10, 20]
    assert portus("rm", "net", "--yes").code == 0
    assert steps(run.net) == []


def test_the_pointers_to_a_version_are_removed_with_it(run: Run) -> None:
    first, second = run.point(1, 2)
    said = portus("rm", "led@1")
    assert said.code == 0
    assert "removed 1 pointer" in said.out
    assert not first.exists()
    assert steps(run.led) == [2]
    assert library.load(second)["epoch"] == 2


def test_what_is_no_pointer_to_it_stays_where_one_was(run: Run) -> None:
    first, second = run.point(1, 2)
    os.replace(second, first)
    assert "pointer" not in portus("rm", "led@1").out
    assert library.load(first)["epoch"] == 2
    first.write_bytes(b"mine")
    assert portus("rm", "led@2").code == 0
    assert first.read_bytes() == b"mine"
    assert steps(run.led) == []


def test_the_pointers_of_all_files_of_a_version_go(run: Run) -> None:
    directory = run.root / "ckpt" / "checkpoint-7"
    with pointing(run.led, "led") as files:
        files.save_directory(str(directory), {"a.pt": state(1), "b.pt": state(2)}, 7).wait()
    assert sorted(os.listdir(directory))[-2:] == ["a.pt", "b.pt"]
    said = portus("rm", directory / "a.pt")
    assert "led@7 stays: 1 pointer refers to it" in said.out
    assert steps(run.led) == [7]
    assert portus("rm", "led@7").code == 0
    assert not (directory / "b.pt").exists()


def test_a_pointer_is_removed_with_its_version(run: Run) -> None:
    first, second = run.point(1, 2)
    document = portus_json("rm", first)
    assert [each["step"] for each in document["removed"]] == [1]
    assert not first.exists()
    assert steps(run.led) == [2]
    moved = run.root / "moved.pt"
    os.rename(second, moved)
    assert portus("rm", moved, "--pool", run.led).code == 0
    assert steps(run.led) == []


def test_a_pointer_that_is_reached_through_a_link_is_the_same_one(run: Run) -> None:
    first, second = run.point(1, 2)
    (run.root / "link").symlink_to(run.root / "ckpt")
    assert portus("rm", run.root / "link" / first.name).code == 0
    assert steps(run.led) == [2]
    newest = run.root / "newest.pt"
    newest.symlink_to(second)
    assert "stays: 1 pointer" in portus("rm", newest).out
    assert second.exists()


def test_several_targets_are_removed_one_after_another(run: Run) -> None:
    first, _ = run.point(1, 2)
    stock = run.root / "stock.pt"
    torch.save({}, stock)
    document = portus_json("rm", "net@10", first, stock, "led@2")
    assert [each["step"] for each in document["removed"]] == [10, 1, None, 2]
    assert (steps(run.net), steps(run.led)) == ([20], [])
    said = portus("rm", "net@20", "net@30")
    assert (said.code, "there is no net@30" in said.err) == (2, True)
    assert steps(run.net) == []


def test_a_pointer_is_not_a_model_to_keep_some_of(run: Run) -> None:
    [path] = run.point(1)
    for target, why in (("net@10", "--keep is for a model"), (path, "expected a directory")):
        said = portus("rm", target, "--keep", "1")
        assert (said.code, why in said.err) == (2, True), said
    assert portus("rm", "net", "--keep", "0").code == 2
    assert steps(run.net) == [10, 20]
    assert path.exists()


def test_a_pointer_whose_version_is_gone_is_an_error_that_says_so(run: Run) -> None:
    [path] = run.point(1)
    data = path.read_bytes()
    assert portus("rm", "led@1").code == 0
    path.write_bytes(data)
    said = portus("rm", path)
    assert said.code == 2
    assert "is not in" in said.err
    with pytest.raises(UsageError):
        library.load(path)


def test_all_but_the_newest_are_let_go_of(run: Run) -> None:
    with run.trainer() as trainer:
        for step in (30, 40, 50):
            trainer.save({"x": torch.zeros(1)}, step).wait()
    said = portus("rm", "net", "--keep", "2")
    assert said.code == 0, said.err
    assert steps(run.net) == [40, 50]
    assert "0 versions removed" in portus("rm", "net", "--keep", "2").out


def test_the_newest_is_the_one_that_was_committed_last_also_if_the_clock_went_back(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run.trainer() as trainer:
        trainer.save({"x": torch.zeros(1)}, 30).wait()
        with monkeypatch.context() as patch:
            hour_ago = time.time_ns() - 3600 * 10**9
            patch.setattr(time, "time_ns", lambda: hour_ago)
            trainer.save({"x": torch.zeros(1)}, 40).wait()
    assert portus("rm", "net", "--keep", "1").code == 0
    assert steps(run.net) == [40]


def test_keep_may_say_more_than_a_number(run: Run) -> None:
    with run.trainer() as trainer:
        for step in (25, 30):
            trainer.save({"x": torch.zeros(1)}, step, metrics={"loss": step / 10}).wait()
    assert portus("rm", "net", "--keep", "last=1,best=loss:min:1").code == 0
    assert steps(run.net) == [25, 30]
    assert "metrics loss 2.5" in portus("show", "net@25").out
    assert portus("rm", "net", "--keep", "last=1,best=loss").code == 2


def test_what_changed_while_the_question_was_open_is_heeded(run: Run) -> None:
    code, shown = while_asked(run, make_anew)
    assert (code, "changed meanwhile" in " ".join(shown.split())) == (2, True), shown
    assert steps(run.net) == [10, 20]


@pytest.mark.parametrize("arguments", [["net@10"], ["net", "--yes"], ["net", "--keep", "1"]])
@pytest.mark.parametrize("act", [make_anew, remove_10])
def test_what_changed_before_the_pool_was_its_own_is_heeded(
    run: Run, arguments: list[str], act: Callable[[Run], object]
) -> None:
    with at("call", Writers.open, partial(act, run)):
        said = portus("rm", *arguments)
    assert (said.code, said.out, "changed meanwhile" in said.err) == (2, "", True), said
    assert 20 in steps(run.net)


def test_a_pointer_that_leads_elsewhere_meanwhile_is_left(run: Run) -> None:
    first, second = run.point(1, 2)
    with at("call", Writers.open, lambda: os.replace(second, first)):
        said = portus("rm", first)
    assert (said.code, "changed meanwhile" in said.err) == (2, True)
    assert first.exists()
    assert steps(run.led) == [1, 2]


def test_a_pool_that_a_trainer_writes_keeps_its_versions_and_pointers(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portus.reach.places.pool.WAIT_S", 0.0)
    [path] = run.point(1)
    code = (
        "import sys\n"
        "from portus.reach.index.directory import WRITERS\n"
        "writer = WRITERS.open(sys.argv[1])\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, run.led],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        for target in ("led@1", path):
            assert portus("rm", target).code == 75
        holder.communicate("")
    assert path.exists()
    assert steps(run.led) == [1]


def test_versions_of_two_pools_go_together(run: Run) -> None:
    with PoolCheckpointer(run.pool / "again.portus", "net") as trainer:
        trainer.save({"x": torch.zeros(1)}, 10).wait()
    assert {each["step"] for each in portus_json("rm", "net@10")["removed"]} == {10}
    assert steps(run.net) == [20]
    assert steps(Path(Place.parse(run.pool / "again.portus").path)) == []
