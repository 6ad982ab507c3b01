"""``portus rm``."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from portus.client.loading.resolve import load_reference
from portus.errors import UsageError
from portus.index.directory import Writers
from tests.moments import at
from tests.unit.cli.scene import Run, portus, portus_json


def steps(run: Run) -> list[int]:
    models = portus_json("ls", run.net)["pools"][0]["models"]
    return [each["step"] for model in models for each in model["versions"]]


def pin_10(_: Run) -> None:
    assert portus("pin", "net@10").code == 0


def lead_to_10(run: Run) -> None:
    with run.trainer() as trainer:
        keeper = trainer._pool.open_or_create()[1]
        keeper.place(str(run.root / "best.ckpt"), trainer.versions()[0].token, 10, "net")


def make_anew(run: Run, tokens: Sequence[bytes | None] = (None, None)) -> None:
    """As ``Run`` does, with the same ids."""
    shutil.rmtree(run.pool)
    with run.trainer() as trainer:
        for step, token in zip((10, 20), tokens, strict=True):
            trainer.save({"x": torch.zeros(1)}, step, token=token).wait()


def fill_anew(run: Run) -> None:
    """As from a mirror: the versions are the same ones."""
    with run.trainer() as trainer:
        tokens = [info.token for info in trainer.versions()[:2]]
    make_anew(run, tokens)


def remove_10(_: Run) -> None:
    assert portus("rm", "net@10", "--force").code == 0


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
    assert steps(run) == [20]
    assert portus("verify").code == 0


def test_all_versions_of_a_step_are_let_go_of(run: Run) -> None:
    with run.trainer() as trainer:
        trainer.save({"x": torch.zeros(1)}, 10).wait()
    assert [each["id"] for each in portus_json("rm", "net@10")["removed"]] == [1, 3]
    assert steps(run) == [20]


def test_what_a_reference_file_leads_to_is_kept_unless_forced(run: Run) -> None:
    said = portus("rm", "net@20")
    assert said.code == 2
    assert "held by last.ckpt" in said.err
    assert steps(run) == [10, 20]
    assert portus("rm", "net@20", "--force").code == 0
    assert steps(run) == [10]
    assert portus("rm", "net@10", "--force").code == 0
    with pytest.raises(UsageError, match="retired since"):
        load_reference(run.last)


def test_a_version_whose_reference_file_was_deleted_is_let_go_of(run: Run) -> None:
    run.last.unlink()
    assert portus("rm", "net@20").code == 0
    assert steps(run) == [10]
    assert os.listdir(run.pool / "net.references") == []


def test_a_whole_model_is_removed_only_when_said(run: Run) -> None:
    run.last.unlink()
    said = portus("rm", "net")
    assert said.code == 2
    assert "use --yes" in said.err
    assert steps(run) == [10, 20]
    assert portus("rm", "net", "--yes").code == 0
    assert steps(run) == []


def test_a_reference_file_is_removed_with_its_version(run: Run) -> None:
    document = portus_json("rm", run.last)
    assert [each["step"] for each in document["removed"]] == [20]
    assert not run.last.exists()
    assert steps(run) == [10]
    assert os.listdir(run.pool / "net.references") == []


def test_a_version_that_two_reference_files_lead_to_stays_with_the_second(run: Run) -> None:
    other = run.root / "best.ckpt"
    with run.trainer() as trainer:
        trainer._pool.open_or_create()[1].place(str(other), trainer.versions()[-1].token, 20, "net")
    assert portus_json("rm", run.last)["removed"] == []
    assert steps(run) == [10, 20]
    assert [each["step"] for each in portus_json("rm", other)["removed"]] == [20]


def test_a_reference_into_an_unknown_pool_is_left(run: Run) -> None:
    said = portus("rm", run.last, "--pool", run.pool / "other.portus")
    assert said.code == 2
    assert "give it with --pool" in said.err
    assert run.last.exists()


def test_all_but_the_newest_are_let_go_of_and_what_files_hold_stays(run: Run) -> None:
    with run.trainer() as trainer:
        for step in (30, 40, 50):
            trainer.save({"x": torch.zeros(1)}, step).wait()
    before = steps(run)
    said = portus("rm", "net", "--keep", "1")
    assert said.code == 0, said.err
    assert "held by files, and kept: 1 version, steps 20" in said.out
    assert before == [10, 20, 30, 40, 50]
    assert steps(run) == [20, 50]
    assert portus("rm", "net", "--keep", "1").code == 0
    assert portus("rm", "net", "--keep", "1", "--force").code == 0
    assert steps(run) == [50]


def test_the_newest_is_the_one_that_was_committed_last_also_if_the_clock_went_back(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.last.unlink()
    with run.trainer() as trainer:
        trainer.save({"x": torch.zeros(1)}, 30).wait()
        with monkeypatch.context() as patch:
            hour_ago = time.time_ns() - 3600 * 10**9
            patch.setattr(time, "time_ns", lambda: hour_ago)
            trainer.save({"x": torch.zeros(1)}, 40).wait()
    assert portus("rm", "net", "--keep", "1").code == 0
    assert steps(run) == [40]


def test_keep_may_say_more_than_a_number(run: Run) -> None:
    run.last.unlink()
    with run.trainer() as trainer:
        for step in (25, 30):
            trainer.save({"x": torch.zeros(1)}, step, metrics={"loss": step / 10}).wait()
    portus("gc")
    assert portus("rm", "net", "--keep", "last=1,best=loss:min:1").code == 0
    assert steps(run) == [25, 30]
    assert "metrics loss 2.5" in portus("show", "net@25").out
    assert portus("rm", "net", "--keep", "last=1,best=loss").code == 2


def test_keep_is_for_a_model(run: Run) -> None:
    for target, why in (("net@10", "--keep is for a model"), (str(run.last), "--keep is for a")):
        said = portus("rm", target, "--keep", "1")
        assert (said.code, why in said.err) == (2, True)
    assert portus("rm", "net", "--keep", "0").code == 2
    assert steps(run) == [10, 20]


@pytest.mark.parametrize(
    ("act", "why"),
    [(pin_10, "net@10 is pinned"), (make_anew, "changed meanwhile")],
)
def test_what_changed_while_the_question_was_open_is_heeded(
    run: Run, act: Callable[[Run], object], why: str
) -> None:
    run.last.unlink()
    code, shown = while_asked(run, act)
    assert (code, why in " ".join(shown.split())) == (2, True), shown
    assert steps(run) == [10, 20]


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (pin_10, "net@10 is pinned"),
        (lead_to_10, "held by best.ckpt"),
        (make_anew, "changed meanwhile"),
        (fill_anew, "changed meanwhile"),
    ],
)
@pytest.mark.parametrize("arguments", [["net@10"], ["net", "--yes"], ["net", "--keep", "1"]])
def test_what_changed_before_the_pool_was_its_own_is_heeded(
    run: Run, arguments: list[str], act: Callable[[Run], object], why: str
) -> None:
    with run.trainer() as trainer:
        trainer.remove(run.last)
        trainer.save({"x": torch.zeros(1)}, 20).wait()
    with at("call", Writers.open, partial(act, run)):
        said = portus("rm", *arguments)
    assert (said.code, why in said.err) == (2, True), said
    assert steps(run)[:2] == [10, 20]


def test_a_pin_that_came_meanwhile_counts_also_if_forced_and_a_file_does_not(run: Run) -> None:
    for act, code in ((pin_10, 2), (lead_to_10, 0)):
        with at("call", Writers.open, partial(act, run)):
            assert portus("rm", "net@10", "--force").code == code
        portus("unpin", "net@10")
    assert steps(run) == [20]


def test_what_another_removed_meanwhile_is_not_said_to_be_removed(run: Run) -> None:
    run.last.unlink()
    with at("call", Writers.open, partial(remove_10, run)):
        said = portus("rm", "net", "--yes")
    assert (said.code, said.out, "changed meanwhile" in said.err) == (2, "", True)
    assert steps(run) == [20]


def test_a_reference_file_that_leads_elsewhere_meanwhile_is_left(run: Run) -> None:
    def replace_it() -> None:
        with run.trainer() as trainer:
            trainer.save({"x": torch.zeros(1)}, 30, reference=run.last).wait()

    with at("call", Writers.open, replace_it):
        said = portus("rm", run.last)
    assert (said.code, "changed meanwhile" in said.err) == (2, True)
    assert run.last.exists()
    assert 30 in steps(run)
