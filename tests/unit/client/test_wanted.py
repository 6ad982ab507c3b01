"""What makes no sense in a call of save is refused before anything is done."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import portus
from portus.client.wanted import WantedSave, check_model
from portus.errors import UsageError


def wanted(state: object = None, step: Any = 1, **given: Any) -> WantedSave:
    defaults = {"reference": None, "synchronous": False, "token": None, "metrics": None}
    return WantedSave.of(state, step, **(defaults | given))


def test_paths_are_absolute_whatever_the_directory_is_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = wanted(reference="a.ckpt")
    several = wanted({"model": 1}, reference={"b/c.ckpt": "model"})
    os.chdir("/")
    assert one.references == {str(tmp_path / "a.ckpt"): None}
    assert several.references == {str(tmp_path / "b" / "c.ckpt"): "model"}


def test_whatever_is_an_integer_is_a_step() -> None:
    assert wanted(step=np.int64(7)).step == 7
    assert wanted(step=-(1 << 63)).step == -(1 << 63)


def test_no_reference_replaces_a_pool_or_a_device(tmp_path: Path) -> None:
    with portus.PoolCheckpointer(tmp_path, "net", journal=False) as run:
        run.save({"a": 1}, 1).wait()
        pool = tmp_path / "net.portus"
        link = tmp_path / "link"
        link.symlink_to(pool)
        for each in (pool, link):
            with pytest.raises(UsageError, match="is a pool, which a file would replace"):
                run.save({"a": 1}, 2, reference=each)
        assert run.load() == {"a": 1}
    os.mkfifo(tmp_path / "pipe")
    for reference in (tmp_path / "pipe", {str(tmp_path / "pipe"): "a"}):
        with pytest.raises(UsageError, match="pipe is not a regular file"):
            wanted({"a": 1}, reference=reference)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"step": 1.5}, "step: expected an integer, found 1.5"),
        ({"step": "3"}, "step: expected an integer, found '3'"),
        ({"step": 1 << 63}, "step: expected 64 bits"),
        ({"token": b"short"}, "token: expected 16 bytes, found 5"),
        (
            {"reference": {"a": "model"}, "state": {}},
            "a should lead to 'model', which is not a key",
        ),
        (
            {"reference": {"a": "model"}, "state": [1]},
            "a should lead to 'model', which is not a key",
        ),
        ({"metrics": {"loss": "low"}}, "loss"),
    ],
)
def test_nonsense_in_a_save_is_refused_with_what_was_found(
    given: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        wanted(**given)


@pytest.mark.parametrize("name", ["", "x" * 201, "ä" * 101, None, 7])
def test_no_name_of_a_model_is_refused(name: Any) -> None:
    with pytest.raises(UsageError, match="1 to 200 bytes"):
        check_model(name)
