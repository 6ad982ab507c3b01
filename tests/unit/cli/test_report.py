"""``portus report``: of real runs and of replayed ones, for people, machines and browsers."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from portus.cli.output import Output
from portus.cli.report import sparks
from portus.cli.report_charts import figure
from portus.cli.training import training_of
from portus.companions.journal.lines import Head, encode
from portus.engine.job.settings import Settings
from portus.reach.index.place import Place
from portus.reach.pools.checkpointer import PoolCheckpointer
from portus.reach.training.training_files import TrainingFiles
from tests.bench.journal import example
from tests.unit.cli.scene import portus, portus_json

STEPS = 30501
"""Kept in the example, of which 439 were lost; seven restarts."""


def trained(root: Path, name: str = "run", steps: int = 7) -> Path:
    """A run that saved at steps 3 and 6 to a pool, and ended."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with PoolCheckpointer(root / ".portus" / f"{name}.portus", name, keep=None) as checkpointer:
        checkpointer.save({"model": model.state_dict()}, 0).wait()
        for step in range(1, steps + 1):
            optimizer.step()
            if step % 3 == 0:
                checkpointer.save({"model": model.state_dict()}, step).wait()
    return root


def test_a_run_is_found_by_all_that_it_may_be_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    for names in (
        (), ("run",), (tmp_path,), (tmp_path / ".portus",), (tmp_path / ".portus/run.portus",),
        (tmp_path / ".portus/run.journal",),
        (tmp_path / "checkpoints",), ("run", "--pool", ".portus"),
    ):  # fmt: skip
        found = portus_json("report", *names)
        assert found["run"] == "run"
        assert found["steps"]["kept"] == 7
        assert [each["step"] for each in found["versions"]] == [0, 3, 6]
        assert not found["running"]


def test_what_cannot_be_reported_is_said_with_what_to_do(tmp_path: Path) -> None:
    nothing = portus("report", tmp_path / "nowhere")
    assert (nothing.code, "there is no run here" in nothing.err) == (2, True)
    (tmp_path / ".portus").mkdir()
    none = portus("report", tmp_path)
    assert none.code == 2
    assert "no journal yet. One begins with the first step" in none.err
    trained(tmp_path, "a")
    trained(tmp_path, "b")
    several = portus("report", tmp_path)
    assert several.code == 2
    assert "expected one run, found ['a', 'b']. Name one: portus report a --pool" in several.err
    other = portus("report", "c", "--pool", tmp_path / ".portus")
    assert "no journal of a run 'c'; there are ['a', 'b']" in other.err
    lines = tmp_path / ".portus/a.journal/a.lines"
    lines.write_bytes(encode(Head(format=2, model="a")))
    newer = portus("report", lines.parent)
    assert newer.code == 2
    assert "written by a newer one. Upgrade Portus here" in newer.err
    lines.write_bytes(b"something else\n")
    assert portus("report", lines.parent).code == 1
    whole = portus("report", "b", "--pool", tmp_path / ".portus")
    assert (whole.code, "skipped" in whole.err) == (0, True)
    assert portus("report", "b", "--pool", tmp_path / ".portus", "--html", tmp_path).code == 74


def by_project(root: Path, pool: Path | None, *names: str) -> None:
    """Runs whose names are the directories of their checkpoints, as adapters name them. pool: at
    their paths are pointers."""
    for name in names:
        checkpoints = root / name / "checkpoints"
        checkpoints.mkdir(parents=True)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        place = None if pool is None else Place.parse(pool)
        with contextlib.closing(TrainingFiles(Settings(), pool=place)) as files:
            files.begin(name, str(root / ".portus"), str(checkpoints))
            optimizer.step()
            files.save({"model": model.state_dict()}, str(checkpoints / "last.ckpt"), 1).wait()


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("is_real", [False, True], ids=["pointers", "files"])
def test_every_run_is_found_by_the_name_that_is_printed_and_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, is_real: bool
) -> None:
    names = [f"lightning_logs/version {number}" for number in range(count)]
    by_project(tmp_path, None if is_real else tmp_path / "pool.portus", *names)
    monkeypatch.chdir(tmp_path)
    asked = portus("report").err
    assert all(repr(name) in asked for name in names)
    command = shlex.split(asked[asked.index("portus report") :])
    assert portus_json(*command[1:])["run"] == names[0]
    for name in names:
        for said in (name, f"{name}/checkpoints", f"{name}/checkpoints/last.ckpt"):
            found = portus_json("report", said)
            assert (found["run"], found["title"]) == (name, f"{tmp_path.name}/{name}")
            assert portus_json("report", said, "--pool", ".portus")["run"] == name
    monkeypatch.chdir(tmp_path / "lightning_logs")
    assert portus_json("report", names[-1])["run"] == names[-1]


def test_a_run_that_saves_to_the_projects_checkpoints_is_titled_by_the_project(
    tmp_path: Path,
) -> None:
    """As Accelerate does with ``project_dir`` and automatic names."""
    (tmp_path / "checkpoints").mkdir()
    assert portus_json("report", trained(tmp_path, "checkpoints"))["title"] == tmp_path.name


def test_nothing_is_drawn_where_nothing_ran(tmp_path: Path) -> None:
    seen = training_of(str(example(tmp_path)), None, Output(as_json=True))
    its = seen.account
    middles = [
        (before.end_s + after.begin_s) / 2 / 3600
        for before, after in itertools.pairwise(its.sessions)
    ]
    assert len(middles) == 7
    for panel in figure(seen).axes[1:]:
        lines = [np.asarray(line.get_xdata(), float) for line in panel.lines]
        assert len(lines) >= len(its.sessions)
        for middle in middles:
            assert not any(min(line) < middle < max(line) for line in lines), panel.get_title()


def test_bars_of_a_session_are_apart_from_the_next_ones() -> None:
    assert sparks([[1, 2], [4]]) == "▂▄ █"
    assert " " not in sparks([[1.0]] * 40)


def test_the_document_has_all_that_the_journal_says(tmp_path: Path) -> None:
    found = portus_json("report", example(tmp_path))
    assert (found["steps"]["kept"], found["steps"]["lost"]) == (STEPS, 439)
    assert 0.93 < found["goodput"] < found["goodput_while_running"] < 0.96
    seconds = found["seconds"]
    assert seconds.pop("wall") == pytest.approx(36_000)
    assert sum(seconds.values()) == pytest.approx(36_000, rel=0.01)
    assert len(found["restarts"]) == 7
    assert found["restarts"][0]["lost_steps"] == 85
    assert found["restarts"][0]["resumed_step"] == found["versions"][19]["step"]
    assert len(found["versions"]) == found["saves"]["committed"] == 273
    assert found["saves"]["copied_bytes"] == 273 * (3 << 30)
    assert {each["reason"] for each in found["intervals"]} == {"bound"}


def test_people_get_a_summary_with_a_chart(tmp_path: Path) -> None:
    said = portus("report", example(tmp_path))
    assert said.code == 0
    assert re.search(r"goodput +94\.3% of 10 h; 95\.4% of the time in which it ran", said.out)
    assert re.search(r"steps that are kept +█{40,}.? +94\.3% +9\.43 h", said.out)
    assert "steps between saves: 29 to 289\n  ▃▃▃" in said.out
    assert re.search(r"1 .*step \d+ +85 steps +85.3 s +60 s", said.out)


def test_a_page_holds_nothing_that_a_name_could_make_it_run(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x>"
    folder = tmp_path / ".portus" / "x.journal"
    folder.mkdir(parents=True)
    (source,) = (example(tmp_path / "e") / ".portus").glob("*/*.lines")
    rest = source.read_bytes().split(b"\n", 1)[1]
    (folder / "x.lines").write_bytes(encode(Head(format=1, model=evil)) + rest)
    assert portus("report", tmp_path, "--html", tmp_path / "a.html").code == 0
    text = (tmp_path / "a.html").read_text()
    assert "<script>" not in text
    assert "<img" not in text
    assert text.count("</script>") == 1


def test_a_page_has_the_text_the_picture_and_the_data_and_loads_nothing(tmp_path: Path) -> None:
    place, page = example(tmp_path), tmp_path / "report.html"
    assert portus("report", place, "--html", page).code == 0
    text = page.read_text()
    assert not re.search(r"""src=|@import|<link|href=["'][^#]|url\([^#]""", text)
    assert "goodput  94.3% of 10 h" in text
    assert "the bound on overhead" in text
    assert text.count("<svg") == 1
    [data] = re.findall('id="report">(.*?)</script>', text)
    assert json.loads(data) == portus_json("report", place)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    from matplotlib import image

    said = portus("report", example(tmp_path), "--png", tmp_path / "a.png")
    assert said.code == 0
    assert "written:" in said.err
    pixels = image.imread(tmp_path / "a.png")
    assert pixels.shape[:2] == (630, 990)
    assert close_to(pixels, "#1f8a5b") > 1000


def close_to(pixels: object, color: str) -> int:
    """How many pixels have this colour."""
    wanted = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    return int((np.abs(np.asarray(pixels)[..., :3] - wanted).max(axis=-1) < 0.02).sum())


def test_help_says_what_there_is() -> None:
    said = portus("report", "--help")
    assert said.code == 0
    for part in ("--html", "--png", "--json", "--pool", "which steps each restart lost"):
        assert part in said.out
