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
from portus.reach.mirror.address import parse
from portus.reach.mirror.mirror import Mirror
from portus.reach.mirror.opening import open_store
from tests.s3.conftest import READER, STRANGER
from tests.simulation.proxy import ConnectionCut, RequestFault, RequestProxy

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
        found = {
            path: store.get(f"gpt/{file.name}")
            for each in state.added
            for path, file in each.paths.items()
        }
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
def test_a_request_that_fails_ends_no_training_and_loses_no_file(
    tmp_path: Path,
    url: str,
    proxy: RequestProxy,
    fault: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("portus.reach.mirror.background_copier._PAUSE_MIN_S", 0.05)
    saved(tmp_path / "gpt", url, range(1, 2))
    proxy.fail(FAULTS[fault], method="PUT", target="/gpt/step-", times=2)
    with caplog.at_level(logging.WARNING, "portus"):
        saved(tmp_path / "gpt", url, range(2, 4))
    assert read_plainly(url) == {"step-00000002.pt": 2, "step-00000003.pt": 3}
    shutil.rmtree(tmp_path / "gpt")
    with portus.Checkpointer(tmp_path / "gpt", mirror=url) as checkpointer:
        assert checkpointer.load()["step"] == 3
    if fault in ("403", "404"):
        assert "is behind; retrying" in caplog.text


def test_wrong_credentials_at_the_start_are_an_error_at_once(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "gpt", url, range(1, 2))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", STRANGER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", STRANGER[1])
    with pytest.raises(UsageError, match="denied") as raised:
        saved(tmp_path / "gpt", url, range(2, 3))
    for text in (str(raised.value), caplog.text):
        assert STRANGER[1] not in text


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
