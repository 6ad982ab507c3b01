"""The documents lead somewhere, and name what there is."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import portus
from docs._site import modules
from portus.companions.journal import lines
from portus.engine.paths import process
from portus.engine.pipeline.handle import SaveStats
from portus.reach.format import layout, reference
from portus.reach.protocol.messages import VERSION
from tests.blocks import READ, RUN, blocks_of, is_heavy, read, stories
from tests.matrix import trainings
from tests.packages import ADAPTERS, FOLDERS, ROOT
from tests.unit.test_seams import classes

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "recipes" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")


def headings(document: Path) -> set[str]:
    """The anchors of a document, as code hosts make them."""
    found = re.findall(r"^#+\s+(.*)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(document.read_text()):
        path = (document.parent / target) if target else document
        if not path.exists() or (anchor and anchor not in headings(path)):
            broken.append(f"{target}#{anchor}")
    assert broken == []


def test_the_map_names_every_module_and_no_other() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    core = ROOT / "core" / "portus"
    rooms = [room for ring in ("engine", "reach", "companions") for room in core.glob(f"{ring}/*/")]
    assert len(rooms) > 30
    for room in rooms:
        files = [path for path in (*room.rglob("*.py"), *room.rglob("*.c")) if path.stem[0] != "_"]
        there = {".".join(path.relative_to(room).with_suffix("").parts) for path in files}
        name = ".".join(room.relative_to(core).parts)
        section = re.split(r"\n##+ ", text.partition(f"### `portus.{name}`")[2])[0]
        cells = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
        named = {each for cell in cells for each in re.findall(r"`([\w.]+?)(?:\.c)?`", cell)}
        assert named == there, name


def test_the_map_names_every_module_of_adapters_as_it_names_itself() -> None:
    made = modules.page()
    assert modules.PAGE.read_text() == made, "make it again: python -m docs._site.modules"
    assert all(f"| module of `{name}` | what |" in made for name in ADAPTERS)


def test_every_page_has_its_place_on_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    pages = {page for page in pages if not page.startswith("decisions/")}
    root = {"index.md", "changelog.md", "contributing.md", "recipes.md"}
    of_adapters = {f"{name.removeprefix('portus_')}.md" for name in ADAPTERS}
    of_adapters |= {f"reference/{page}" for page in of_adapters}
    assert of_adapters <= pages
    assert (
        set(re.findall(r"[\w/]+\.md", text.partition("\nnav:")[2])) == (pages - of_adapters) | root
    )


def test_the_code_cites_each_decision_beside_a_line_that_follows_it() -> None:
    folders = ("core", *ADAPTERS)
    sources = [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    cited = set(re.findall(r"\bdecisions? (\d{4})\b", "\n".join(sources)))
    pages = {path.name[:4] for path in (ROOT / "docs" / "decisions").glob("*.md")}
    assert 20 < len(pages) <= 30
    assert cited == pages


def test_lists_of_places_name_what_there_is() -> None:
    """Each item has files, and names that are in one of these."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.findall(r"^\d+\. (.*)$", text, flags=re.MULTILINE)
    wrong, named = [], 0
    for item in found:
        words = [word for word in re.findall("`([^`]+)`", item) if "NAME" not in word]
        paths = [ROOT / word for word in words if "/" in word or (ROOT / word).is_file()]
        wrong += [str(path) for path in paths if not path.exists()]
        texts = "".join(path.read_text() for path in paths if path.is_file())
        names = [word for word in words if texts and re.fullmatch(r"\w+", word)]
        wrong += [f"{name}: {item}" for name in names if name not in texts]
        named += len(names)
    assert wrong == []
    assert (len(found) > 30, named > 20) == (True, True)


def test_a_method_that_a_page_names_is_there() -> None:
    known = defaultdict[str, set[str]](set)
    for each in classes():
        known[each.name].update(each.members)
    named, wrong = 0, []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for owner, name in re.findall(r"`([A-Z]\w+)\.(\w+)", page.read_text()):
            named += owner in known
            if owner in known and name not in known[owner]:
                wrong.append(f"{page.name}: {owner}.{name}")
    assert wrong == []
    assert named > 100


METRIC = re.compile(r"portus/[a-z_]+")


def metrics() -> set[str]:
    """The name of each number that is logged for a save."""
    return {text for text in messages() if METRIC.fullmatch(text)}


def test_the_page_of_metrics_lists_those_of_the_code() -> None:
    text = (ROOT / "docs" / "statistics.md").read_text()
    listed = re.findall(r"^\| `(portus/[a-z_]+)` \|", text, flags=re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == metrics()
    stats = SaveStats(mirror_lag_s=1.0)
    assert set(listed) == stats.metrics().keys(), "all of them are those of a save"
    fields = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text, flags=re.MULTILINE)
    told = {name for row in fields for name in re.findall(r"`(\w+)`", row)}
    assert told == {field.name for field in dataclasses.fields(SaveStats)}


def test_the_page_of_compatibility_has_the_versions_of_the_code() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text()
    assert f"version {portus.__version__}" in text
    for what, number in (
        ("pool", layout.FORMAT_VERSION),
        ("pointer", reference.FORMAT),
        ("journal of a run", lines.FORMAT),
    ):
        assert re.search(rf"^\| {what} \| {number}\b", text, flags=re.MULTILINE), what
    assert f"speak version {VERSION} of" in text
    project = (ROOT / "pyproject.toml").read_text()
    for what, wanted in (
        ("Python", r'requires-python = ">=([\d.]+)"'),
        ("torch", r'"torch>=([\d.]+)"'),
        ("Lightning", r'lightning = \["lightning>=([\d.]+)"\]'),
        ("Accelerate", r'accelerate = \["accelerate>=([\d.]+),'),
    ):
        found = re.search(wanted, project)
        assert found is not None
        assert f"| {what} | {found[1]} |" in text


def test_the_page_of_compatibility_has_the_matrix_that_is_run() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text()
    table = text.partition("## With stock tools")[2].partition("\n## ")[0]
    rows = {
        found[1]: found[2].count("| yes")
        for found in re.finditer(r"^\| `([\w-]+)`(.*)", table, re.MULTILINE)
    }
    assert rows == {name: 4 if name in trainings.SHARDED else 3 for name in trainings.TRAININGS}
    for name in re.findall(r"`([\w/]+\.py)`", table):
        assert (ROOT / "tests" / name).exists(), name


def test_unit_tests_mirror_the_rooms() -> None:
    """A package has one folder for what it has in all rings."""
    core = ROOT / "core" / "portus"
    places = [core, *(core / ring for ring in ("engine", "reach", "companions"))]
    rooms = {path.name for place in places for path in place.iterdir() if path.is_dir()}
    folders = {path.name for path in (ROOT / "tests" / "unit").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} <= rooms


def test_what_the_documents_tell_to_make_can_be_made() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    told = {
        (document.name, word)
        for document in DOCUMENTS
        for word in re.findall(r"(?:^|`)make ([a-z0-9-]+)", document.read_text(), re.MULTILINE)
    }
    assert told
    assert {(name, word) for name, word in told if word not in targets} == set()


NOT_OURS = ("UnpicklingError: ", "ModuleNotFoundError: ")
"""What torch and Python say of a reference file."""

THE_SYSTEM = {
    "No space left on device",
    "No such device or address",
    "Cannot allocate memory (errno",
}

VARIABLE = re.compile(r"/dev/dax\.\.\.|PORTUS_[A-Z_]+|%[sd]|%\.\d+f|\d+(?:\.\d+)?|\.\.\.")


PACKAGES = tuple(FOLDERS)
"""Those whose messages users see."""


def messages(packages: tuple[str, ...] = PACKAGES) -> Iterator[str]:
    """Every text in the code, with ``...`` where something is filled in."""
    for package in packages:
        for path in FOLDERS[package].rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [getattr(part, "value", "...") for part in node.values]
                    yield "".join(part if isinstance(part, str) else "..." for part in parts)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def parts_of(message: str) -> list[str]:
    """The runs of three words or more that a message always has."""
    parts = re.split(r"[.,;:`]", VARIABLE.sub("...", message))
    words = [part.strip(" '`[]()") for part in parts]
    return [part for part in words if part.count(" ") >= 2]


def test_troubleshooting_quotes_what_the_code_says() -> None:
    code = "\n".join(VARIABLE.sub("...", message) for message in messages())
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = [line[2:] for line in text.splitlines() if line.startswith("> ")]
    ours = [each for each in quoted if not each.startswith(NOT_OURS) and parts_of(each)]
    assert len(ours) > 40
    parts = {part for each in ours for part in parts_of(each)} - THE_SYSTEM
    assert [part for part in parts if part not in code] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_troubleshooting_quotes_messages_of_each_package(package: str) -> None:
    texts = (VARIABLE.sub("...", message) for message in messages((package,)))
    own = {part for text in texts for part in parts_of(text)}
    others = tuple(each for each in PACKAGES if each != package)
    own -= {part for text in messages(others) for part in parts_of(VARIABLE.sub("...", text))}
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = [line[2:] for line in page.splitlines() if line.startswith("> ")]
    assert len(own & {part for each in quoted for part in parts_of(each)}) > 3


BLOCKS = {page: blocks_of(page) for page in DOCUMENTS}
STORIES = {
    f"{document.relative_to(ROOT)}{': ' if tab else ''}{tab}": story
    for document, blocks in BLOCKS.items()
    for tab, story in stories(blocks).items()
    if any(block.language in RUN and not block.why_not for block in story)
}
HEAVY = [name for name, story in STORIES.items() if is_heavy(story)]
"""Those that start programs, or import a framework: tests/unit/test_blocks.py runs them."""


def test_every_block_of_code_says_what_it_is() -> None:
    """So none is passed over because nobody said that it could be run."""
    known = {*RUN, *READ}
    every = [block for blocks in BLOCKS.values() for block in blocks]
    assert [str(block) for block in every if block.language not in known] == []
    assert len([block for block in every if block.language in RUN and not block.why_not]) > 40


def test_a_block_that_is_not_run_says_why() -> None:
    reasons = {block: block.why_not for blocks in BLOCKS.values() for block in blocks}
    assert [str(b) for b, why in reasons.items() if why and len(why.split()) < 4] == []


def test_a_file_that_a_remark_names_is_there() -> None:
    reasons = [block.why_not for blocks in BLOCKS.values() for block in blocks]
    named = {name for why in reasons for name in re.findall(r"\btests/[\w/]+\.py", why)}
    assert len(named) > 8
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


@pytest.mark.filterwarnings("default")  # as a reader's program has it
@pytest.mark.parametrize("name", [name for name in STORIES if name not in HEAVY])
def test_the_code_of_a_page_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "_savers", [])
    monkeypatch.setattr(process, "_writers", [])
    try:
        read(STORIES[name], tmp_path)
    finally:
        process._finish()  # as at the exit of the program
