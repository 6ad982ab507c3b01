"""The documents lead somewhere, and name what there is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
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


def test_the_map_names_every_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    missing = []
    for path in sorted((ROOT / "core" / "portus").glob("*/*.py")):
        room = path.parent.name
        if room in {"cli", "testing"} or path.stem == "__init__":
            continue
        section = text.partition(f"### `portus.{room}`")[2].partition("\n### ")[0]
        if f"`{path.stem}`" not in section:
            missing.append(f"{room}/{path.stem}")
    assert missing == []


def test_unit_tests_mirror_the_rooms() -> None:
    rooms = {path.name for path in (ROOT / "core" / "portus").iterdir() if path.is_dir()}
    folders = {path.name for path in (ROOT / "tests" / "unit").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} <= rooms


def test_what_the_documents_tell_to_make_can_be_made() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    told = {
        (document.name, word)
        for document in DOCUMENTS
        for word in re.findall(r"(?:^|`)make ([a-z]+)", document.read_text(), re.MULTILINE)
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


def messages() -> Iterator[str]:
    """Every text in the code, with ``...`` where something is filled in."""
    for package in ("core/portus", "portus_lightning"):
        for path in (ROOT / package).rglob("*.py"):
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
