"""Threads that look below the root of a run at once: one saves, another one copies to a mirror."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from portus.client.files.survey import Survey
from portus.format.reference import encode, pin_of
from portus.spec import VersionInfo


def test_what_is_asked_while_another_thread_looks_is_answered_by_a_new_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = VersionInfo("net", 1, 1, 1, bytes(16), 0, 0)
    reference = pin_of(info, bytes(16), str(tmp_path), "a" * 32, 0)
    survey = Survey(str(tmp_path), "net.portus", None)
    reached, go = threading.Event(), threading.Event()
    stock = Survey._listing

    def slow(self: Survey, *args: Any) -> Any:
        found = stock(self, *args)
        if threading.current_thread() is looking:
            reached.set()
            assert go.wait(60)
        return found

    monkeypatch.setattr(Survey, "_listing", slow)
    looking = threading.Thread(target=survey.references)
    looking.start()
    assert reached.wait(60)
    (tmp_path / "last.ckpt").write_bytes(encode(reference))  # behind the back of that look
    renewing = threading.Thread(target=survey.renew)
    renewing.start()
    renewing.join(0.2)  # without the lock it is over by now, and what comes next is of before
    go.set()
    looking.join(60)
    renewing.join(60)
    assert survey.copies(reference) == [str(tmp_path / "last.ckpt")]
