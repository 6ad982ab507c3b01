"""The site: built without a warning, whole, asking nobody else for anything, and readable."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.packages import ROOT
from tests.unit.cli.test_report import close_to

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The static files, as `make site` makes them."""
    pytest.importorskip("mkdocs", reason="requirements/docs.txt is not installed: make setup")
    made = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(made)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, timeout=500, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return made


class Page(HTMLParser):
    """What a page of HTML leads to, asks for, and can be led to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.asked: list[str] = []
        self.anchors = {"", "__top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if value and name == "href" and tag == "a":
                self.links.append(value)
            elif value and name in ("href", "src", "srcset", "poster", "data") and tag != "a":
                self.asked.append(value)


def pages(site: Path) -> Iterator[tuple[Path, Page]]:
    for path in sorted(site.rglob("*.html")):
        if "source" not in path.relative_to(site).parts[:1]:
            yield path, Page(path.read_text())


def test_no_link_of_the_site_is_dead_and_nothing_is_asked_of_another_machine(site: Path) -> None:
    found = dict(pages(site))
    assert len(found) > 70
    wrong, followed = [], 0
    for path, page in found.items():
        for target in [*page.links, *page.asked]:
            parts = urlsplit(target)
            if parts.scheme in ("http", "https", "mailto"):
                if target in page.asked:
                    wrong.append(f"{path.name} asks for {target}")
                continue
            if path.name == "404.html":
                continue  # its links are those of a server's root
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = place / "index.html" if place.is_dir() else place
            followed += 1
            anchors = found[place].anchors if place in found else {unquote(parts.fragment)}
            if not place.is_file() or unquote(parts.fragment) not in anchors:
                wrong.append(f"{path.name}: {target}")
    assert sorted(set(wrong)) == []
    assert followed > 5000
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"url\(['\"]?https?:|@import", styles) == []


def test_no_remark_for_tests_is_on_a_page(site: Path) -> None:
    texts = {path.name: path.read_text() for path, _ in pages(site)}
    assert [name for name, text in texts.items() if re.search("<!-- (not run|before)", text)] == []


def test_no_parameter_is_taken_for_the_title_of_a_section(site: Path) -> None:
    found = list((site / "reference").glob("*.html"))
    assert len(found) == 7
    assert [path.name for path in found if "<details" in path.read_text()] == []


MEASURE = """<script>addEventListener("load", () => {
  const seen = [...document.querySelectorAll("article pre, article table, article img")];
  const out = seen.filter(e => !e.closest(
    ".md-typeset__scrollwrap, .highlight, .tabbed-block, pre")
    && e.getBoundingClientRect().right > innerWidth + 1);
  document.title = ["measured", document.documentElement.scrollWidth, innerWidth, out.length,
    getComputedStyle(document.body).backgroundColor.replaceAll(" ", ""),
    document.querySelectorAll("article h1").length].join(" ");
})</script></body>"""


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


LOOKS = [
    *(("index", 1280, False), ("tutorial", 1280, True), ("reference/portus", 1280, False)),
    *(("index", 390, True), ("tutorial", 390, False), ("statistics", 390, True)),
]


@pytest.mark.parametrize(("name", "width", "dark"), LOOKS)
def test_a_browser_shows_a_page(
    site: Path, tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    """The screenshots stay in the test's folder. A copy of the page measures itself."""
    from matplotlib import image

    page = site / f"{name}.html"
    measured = page.with_name(f"measured-{page.stem}-{width}.html")
    measured.write_text(page.read_text().replace("</body>", MEASURE))
    screenshot = tmp_path / f"{page.stem}-{width}.png"
    try:
        made = shot(measured, screenshot, width, dark=dark)
    finally:
        measured.unlink()
    found = re.search("<title>measured (.*?)</title>", made)
    assert found is not None, "its scripts ran"
    wide, room, out, color, titles = found[1].split()
    assert int(wide) <= int(room) == width, "nothing sticks out of the page"
    assert (out, titles) == ("0", "1")
    pixels = image.imread(screenshot)
    assert pixels.shape[1] == width
    red, green, blue = map(int, re.findall(r"\d+", color)[:3])
    assert (max(red, green, blue) < 90) == dark
    paper = f"#{red:02x}{green:02x}{blue:02x}"
    assert close_to(pixels, paper) > 0.3 * pixels.shape[0] * pixels.shape[1]
