"""Failures of saves, as ranks tell them to each other."""

from __future__ import annotations

import logging
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from portus.engine.job.settings import Settings
from portus.engine.pipeline.handle import EndedSave, SaveHandle, SaveStats
from portus.errors import AbandonedError, MediumError, PortusError, UsageError
from portus.reach.dcp import rank_files
from portus.reach.dcp.rank_files import RankFiles, RankSave, RankSaves


def failed(error: PortusError) -> SaveHandle:
    return SaveHandle(EndedSave(error, SaveStats()))


def test_a_failure_is_told_once_and_says_whether_it_only_followed_from_another() -> None:
    saves = RankSaves(Settings())
    saves.asked[:] = [
        RankSave(1, ["a"], failed(MediumError(28, "the disk is full"))),
        RankSave(1, (), failed(AbandonedError("its files are not there"))),
        RankSave(2, ["b"], failed(AbandonedError("another rank ended"))),
        RankSave(3, ["c"]),
    ]
    told = saves.take_failures()
    assert {save: is_given_up for save, (is_given_up, _) in told.items()} == {
        1: False,
        2: True,
        3: False,
    }
    assert "the disk is full" in told[1][1]
    assert "not begun on all ranks" in told[3][1]
    assert (saves.take_failures(), saves.asked) == ({}, [])


def test_of_a_save_that_failed_elsewhere_the_files_go_and_its_cause_is_raised() -> None:
    saves, removed = RankSaves(Settings(on_error="raise")), list[str]()
    saves.asked[:] = [RankSave(7, ["a", "b"]), RankSave(8, ["c"])]
    said = [{7: (True, "its other part is missing")}, {7: (False, "the disk is full")}]
    with pytest.raises(AbandonedError, match=r"given up: rank 1: the disk is full"):
        saves.hear(said, removed.append, is_first=False)
    assert removed == ["a", "b"]
    assert [each.save for each in saves.asked] == [8]
    assert saves.given_up == {7}


def test_where_errors_are_only_warned_of_the_first_rank_logs_each_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = [{}, {7: (False, "the disk is full")}]
    with caplog.at_level(logging.ERROR, "portus"):
        for is_first in (False, True):
            saves = RankSaves(Settings(on_error="warn"))
            saves.hear(said, lambda path: None, is_first=is_first)
    assert [each.getMessage() for each in caplog.records] == [
        "portus: a save was given up: rank 1: the disk is full"
    ]


def test_of_a_save_that_another_rank_could_not_begin_nothing_becomes_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: Any = (("b.pt",), UsageError("it cannot be pickled"), False)

    def gather(own: Any) -> list[Any]:
        return [own, refused if own[0] == ("a.pt",) else own]

    with closing(RankFiles(Settings(journal=False))) as files:
        monkeypatch.setattr(rank_files, "gather", gather)
        with pytest.raises(UsageError, match="it cannot be pickled"):
            files.save_ranks(str(tmp_path / "1"), lambda: ({"a.pt": [1]}, ()), 1)
        monkeypatch.undo()
        assert os.listdir(tmp_path / "1") == []
        [handle] = files.save_ranks(str(tmp_path / "2"), lambda: ({"a.pt": [1]}, ()), 2)
        handle.wait()
    assert os.listdir(tmp_path / "2") == ["a.pt"]
