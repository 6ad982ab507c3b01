"""What the next commit retires is what ``keep`` does not want once it is made."""

from __future__ import annotations

from pathlib import Path

import pytest

import portus
from portus.client.files.surplus import beyond
from portus.index.keep import Keep
from portus.spec import VersionInfo
from tests.unit.client.stuck import until


def infos(*steps: int, scores: dict[int, float] | None = None) -> list[VersionInfo]:
    found = scores or {}
    return [
        VersionInfo(
            "m", number, number, step, bytes([number]) * 16, number, 1,
            metrics={"loss": found[step]} if step in found else {},
        )
        for number, step in enumerate(steps, 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("keep", "there", "coming", "gone"),
    [
        (Keep(last=2), (10, 20), 30, [1]),
        (Keep(last=1), (10, 20), 30, [1, 2]),
        (Keep(last=3), (10, 20), 30, []),
        (Keep(last=1, every=20), (10, 20, 30), 40, [1, 3]),
        (Keep(last=1), (), 10, []),
    ],
)
def test_the_version_that_comes_counts_as_the_newest(
    keep: Keep, there: tuple[int, ...], coming: int, gone: list[int]
) -> None:
    assert beyond(keep, infos(*there), coming, {}) == gone


def test_the_score_of_the_version_that_comes_decides_who_stays_the_best() -> None:
    keep = Keep(last=1, best=("loss", "min", 1))
    there = infos(10, 20, scores={10: 0.5, 20: 0.9})
    assert beyond(keep, there, 30, {"loss": 0.7}) == [2]
    assert beyond(keep, there, 30, {"loss": 0.1}) == [1, 2]


def test_a_version_of_a_file_is_outside_of_the_count(tmp_path: Path) -> None:
    file = str(tmp_path / "1.ckpt")
    with portus.PoolCheckpointer(tmp_path / "m.portus", "m", keep=1) as run:
        run.save({"x": 1}, 1, reference=file).wait()
        for step in (2, 3):
            run.save({"x": step}, step).wait()
        assert run.steps() == [1, 3]


def test_who_decides_in_the_place_of_keep_retires_nothing_that_a_file_leads_to(
    tmp_path: Path,
) -> None:
    file = str(tmp_path / "1.ckpt")
    with portus.PoolCheckpointer(tmp_path / "m.portus", "m", keep=9) as run:
        run.part.surplus = lambda there: [info.id for info in there]
        run.save({"x": 1}, 1, reference=file).wait()
        for step in (2, 3):
            run.save({"x": step}, step).wait()
        assert run.steps() == [1, 3]
        until(lambda: run._versions.await_saves(None, b"") is False)
        assert portus.load_reference(file) == {"x": 1}
