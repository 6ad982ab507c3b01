"""``portus rm``."""

from __future__ import annotations

import os
import time

import pytest
import torch

from portus.client.loading.resolve import load_reference
from portus.errors import UsageError
from tests.unit.cli.scene import Run, portus, portus_json


def steps(run: Run) -> list[int]:
    models = portus_json("ls", run.net)["pools"][0]["models"]
    return [each["step"] for model in models for each in model["versions"]]


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


def test_a_file_that_is_no_reference_is_left(run: Run) -> None:
    torch.save({}, run.root / "own.ckpt")
    said = portus("rm", "own.ckpt")
    assert said.code == 2
    assert "not a Portus reference file" in said.err
    assert (run.root / "own.ckpt").exists()


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
    for target in ("net@10", str(run.last)):
        said = portus("rm", target, "--keep", "1")
        assert (said.code, "--keep is for a model" in said.err) == (2, True)
    assert portus("rm", "net", "--keep", "0").code == 2
    assert steps(run) == [10, 20]
