"""Trainings with a mirror on a real S3 server: lost machines, and requests that fail."""

from __future__ import annotations

import io
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

import portus
from portus.errors import UsageError
from portus.mirror.address import parse
from portus.mirror.mirror import Mirror
from portus.mirror.opening import open_store
from portus.testing.proxy import ConnectionCut, RequestFault, RequestProxy
from tests.crash.saver import Training
from tests.s3.conftest import READER, STRANGER
from tests.unit.client.same import assert_same

pytestmark = pytest.mark.s3

FAULTS = {
    "500": RequestFault(status=500, code="InternalError"),
    "503": RequestFault(status=503, code="SlowDown"),
    "403": RequestFault(status=403, code="AccessDenied"),
    "404": RequestFault(status=404, code="NoSuchBucket"),
    "cut before": RequestFault(cut=ConnectionCut.BEFORE),
    "cut within": RequestFault(cut=ConnectionCut.WITHIN),
    "cut after": RequestFault(cut=ConnectionCut.AFTER),
    "cut answer": RequestFault(cut=ConnectionCut.ANSWER),
}


def started(run: Path, url: str) -> portus.PoolCheckpointer:
    return portus.PoolCheckpointer(run / ".portus", "net", mirror=url, mirror_wait=60)


def train(run: Path, url: str, steps: int) -> None:
    """From where the run is, as many steps more."""
    with started(run, url) as saver:
        training = Training(max(saver.steps(), default=0))
        for _ in range(steps):
            training.advance()
            path = run / "ckpt" / "last.ckpt"
            saver.save(training.state(), training.step, reference=path).wait()


def counted(url: str) -> list[int]:
    store = open_store(parse(url))
    try:
        state = Mirror(store, "net").read()
    finally:
        store.close()
    return sorted(each.step for each in state.versions)


def test_a_run_goes_on_from_a_bucket_alone(tmp_path: Path, url: str) -> None:
    for machine in range(3):
        run = tmp_path / f"machine {machine}"
        train(run, url, 3)
        shutil.rmtree(run)
    with started(tmp_path / "last", url) as saver:
        assert saver.steps() == [9]
        assert_same(saver.load(), Training(9).state())
        last = tmp_path / "last" / "ckpt" / "last.ckpt"
        assert_same(portus.load_reference(last), Training(9).state())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_that_fails_ends_no_training_and_the_mirror_catches_up(
    tmp_path: Path,
    url: str,
    proxy: RequestProxy,
    fault: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("portus.mirror.behind._PAUSE_MIN_S", 0.05)
    with caplog.at_level(logging.WARNING, "portus"):
        train(tmp_path, url, 1)
        # What is refused at the start is an error; what is to be copied, later.
        target = "/packs/" if fault in ("403", "404") else ""
        proxy.fail(FAULTS[fault], method="PUT", target=target, times=2)
        train(tmp_path, url, 2)
    assert counted(url)[-1] == 3
    shutil.rmtree(tmp_path / ".portus")
    with started(tmp_path, url) as saver:
        assert_same(saver.load(), Training(3).state())
    if fault in ("403", "404"):
        assert "is behind; retrying" in caplog.text
    assert ("it may be read, not written" in caplog.text) == (fault == "403")


def test_wrong_credentials_at_the_start_are_an_error_at_once(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, url, 1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", STRANGER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", STRANGER[1])
    with pytest.raises(UsageError, match="denied") as raised:
        train(tmp_path, url, 1)
    for text in (str(raised.value), caplog.text):
        assert STRANGER[1] not in text


def test_who_may_read_and_not_write_is_told_at_the_start_and_may_load(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, url, 1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER[1])
    refused = r"may be read, not written: .*403 AccessDenied.*s3:PutObject on portus.*'none'"
    for _ in range(2):
        with pytest.raises(UsageError, match=refused):
            train(tmp_path, url, 1)
        shutil.rmtree(tmp_path / ".portus")  # a fresh node
    assert_same(portus.load(f"{url}/net"), Training(1).state())
    with pytest.raises(UsageError, match=refused):
        train(tmp_path / "new", f"{url}-new", 1)
    assert not (tmp_path / "new" / ".portus").exists(), "and no pool was made"


# Runs that save files.


def saved(run: Path, url: str, steps: range) -> None:
    with portus.Checkpointer(run, mirror=url, keep=2) as checkpointer:
        for step in steps:
            state = {"step": step, "w": torch.full((5 << 20,), float(step))}
            checkpointer.save(state, step).wait()


def read_plainly(url: str) -> dict[str, int]:
    """The names of the files in the bucket, and their steps, as ``torch.load`` reads them."""
    store = open_store(parse(url))
    try:
        state = Mirror(store, "gpt").read()
        found = {each.path: store.get(f"gpt/{each.name}") for each in state.files}
    finally:
        store.close()
    return {path: torch.load(io.BytesIO(data))["step"] for path, data in found.items()}


def test_files_in_a_bucket_load_plainly_and_a_machine_goes_on_from_them(
    tmp_path: Path, url: str
) -> None:
    run = tmp_path / "gpt"
    for first in (1, 4, 7):
        saved(run, url, range(first, first + 3))
        expected = {f"step-{step:08d}.pt": step for step in (first + 1, first + 2)}
        assert read_plainly(url) == expected
        shutil.rmtree(run)
        with portus.Checkpointer(run, mirror=url) as checkpointer:
            assert checkpointer.load()["step"] == first + 2
            assert sorted(name for name in os.listdir(run) if name != ".portus") == list(expected)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_of_an_upload_that_fails_loses_no_file(
    tmp_path: Path,
    url: str,
    proxy: RequestProxy,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("portus.mirror.behind._PAUSE_MIN_S", 0.05)
    saved(tmp_path / "gpt", url, range(1, 2))
    proxy.fail(FAULTS[fault], method="PUT", target="/files/", times=2)
    saved(tmp_path / "gpt", url, range(2, 4))
    assert read_plainly(url) == {"step-00000002.pt": 2, "step-00000003.pt": 3}


def test_who_may_only_read_the_files_of_a_run_is_told_and_may_load(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "gpt", url, range(1, 2))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER[1])
    for run in (tmp_path / "gpt", tmp_path / "fresh" / "gpt"):
        with portus.Checkpointer(run, mirror=url) as checkpointer:
            assert checkpointer.load()["step"] == 1
            with pytest.raises(UsageError, match=r"may be read, not written: .*s3:PutObject"):
                checkpointer.save({}, 2)
