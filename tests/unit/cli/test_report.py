"""``portus report``: of real runs and of replayed ones, for people, machines and browsers."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from portus.cli.output import Output
from portus.cli.report import sparks
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


def polylines(page: str, title: str) -> list[list[float]]:
    """The moments, in thousandths of the width, of each line of the chart with this title."""
    section = page[page.index(f"<h2>{title}</h2>") :].split("</section>", 1)[0]
    return [
        [float(point.split(",")[0]) for point in line.split()]
        for line in re.findall('points="([^"]*)"', section)
    ]


def test_nothing_is_drawn_where_nothing_ran(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    place = example(tmp_path)
    assert portus("report", place, "--html", page).code == 0
    seen = training_of(str(place), None, Output(as_json=True)).account
    scale = 1000 / seen.wall_s
    gaps = [
        (before.end_s * scale, after.begin_s * scale)
        for before, after in itertools.pairwise(seen.sessions)
    ]
    assert all(end - begin > 1 for begin, end in gaps)
    for title in (
        "Steps over time, and what restarts lost", "What a save took",
        "Steps from one save to the next",
    ):  # fmt: skip
        lines = polylines(page.read_text(), title)
        assert len(lines) >= len(seen.sessions)
        for begin, end in gaps:
            middle = (begin + end) / 2
            assert not any(min(line) < middle < max(line) for line in lines), title


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
    assert found["restarts"][0]["went_on_from_step"] == found["versions"][19]["step"]
    assert len(found["versions"]) == found["saves"]["committed"] == 273
    assert found["saves"]["written_bytes"] == 273 * (3 << 30)
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


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    from matplotlib import image

    said = portus("report", example(tmp_path), "--png", tmp_path / "a.png")
    assert said.code == 0
    assert "written:" in said.err
    pixels = image.imread(tmp_path / "a.png")
    assert pixels.shape[:2] == (630, 990)
    assert close_to(pixels, "#1f8a5b") > 1000


def browser() -> str:
    """A headless browser of this machine, or a skip that says why."""
    for name in ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    reason = "no Chromium on this machine (Debian: chromium-headless-shell)"
    if os.environ.get("PORTUS_BROWSER") == "required":
        pytest.fail(f"PORTUS_BROWSER=required, and there is {reason}")
    pytest.skip(reason)


def shot(page: Path, picture: Path, width: int, *, dark: bool) -> str:
    """Look at a page; what became of its document, as text."""
    ended = subprocess.run(
        [
            browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={picture}.profile",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--window-size={width},1600", f"--screenshot={picture}", "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    return ended.stdout


def close_to(pixels: object, color: str) -> int:
    """How many pixels have this colour."""
    import numpy as np

    wanted = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    return int((np.abs(np.asarray(pixels)[..., :3] - wanted).max(axis=-1) < 0.02).sum())


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["wide", "narrow"])
def test_a_browser_shows_the_page(tmp_path: Path, width: int, dark: bool) -> None:
    """The screenshots stay in the test's folder. A copy of the page measures itself: the page has
    no script, and its own policy would run none."""
    from matplotlib import image

    page = tmp_path / "report.html"
    assert portus("report", example(tmp_path), "--html", page).code == 0
    text = page.read_text()
    assert not re.search(r"https?:|url\(|src=|@import|<link", text)
    measure = (
        "<script>document.title = [document.documentElement.scrollWidth, innerWidth, "
        "document.querySelectorAll('polyline').length, "
        "document.getElementById('goodput').textContent, "
        "JSON.parse(document.getElementById('report').textContent).steps.kept].join(' ')</script>"
    )
    measured = tmp_path / "measured.html"
    measured.write_text(re.sub("<meta http-equiv[^>]*>", "", text).replace("</body>", measure))
    screenshot = tmp_path / f"report-{width}.png"
    made = shot(measured, screenshot, width, dark=dark)
    found = re.search("<title>(.*?)</title>", made)
    assert found is not None
    wide, room, lines, goodput, steps = found[1].split()
    assert int(wide) <= int(room) == width, "nothing sticks out of the page"
    assert int(lines) > 10
    assert (goodput, steps) == ("94.3%", str(STEPS))
    pixels = image.imread(screenshot)
    assert pixels.shape[1] == width
    paper, kept = ("#14181c", "#46b881") if dark else ("#ffffff", "#1f8a5b")
    assert close_to(pixels, paper) > 0.1 * pixels.shape[0] * pixels.shape[1]
    assert close_to(pixels, kept) > 2000, "the bar of the time"


def test_help_says_what_there_is() -> None:
    said = portus("report", "--help")
    assert said.code == 0
    for part in ("--html", "--png", "--json", "--pool", "which steps each restart lost"):
        assert part in said.out
