"""The architecture page has four walks of a tensor as they are, and no walk is long."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest

from tests import walks

FILES = {
    "portus.save": 10,
    "PortusIO.save_checkpoint": 11,
    "portus.load": 7,
    "Accelerator.save_state": 12,
}
"""How many files hand a tensor on: 12 at most. A number here may fall, and not rise."""

ENTERED = {
    "portus.save": 43,
    "PortusIO.save_checkpoint": 52,
    "portus.load": 30,
    "Accelerator.save_state": 72,
}
"""How many files of ours a walk enters at most, those included that are only called for an answer.
File systems, measured speeds, and what has to be waited for decide about a few."""


pytestmark = pytest.mark.timeout(300)  # imports two frameworks, in a process of its own


@pytest.fixture(scope="module")
def walked() -> dict[str, Any]:
    pytest.importorskip("lightning")
    pytest.importorskip("accelerate")
    return walks.walked()


@pytest.mark.long
def test_the_page_has_the_walks_as_they_are(walked: dict[str, Any]) -> None:
    """``python -m tests.walks`` writes them anew."""
    assert walks.on_the_page() == walks.section(walked)


@pytest.mark.long
def test_no_walk_passes_more_files(walked: dict[str, Any]) -> None:
    assert {name: len(walks.files_of(walk)) for name, walk in walked.items()} == FILES
    longer = {name: len(walk["entered"]) for name, walk in walked.items()}
    assert [name for name, count in longer.items() if count > ENTERED[name]] == []


@pytest.mark.long
def test_no_walk_climbs_back_up(walked: dict[str, Any]) -> None:
    assert [each for walk in walked.values() for each in walks.climbs(walk)] == []


@pytest.mark.long
def test_the_page_of_the_engine_names_functions_in_the_order_of_their_calls(
    walked: dict[str, Any],
) -> None:
    """The page has ``best_engine`` behind its helper in C, and ``_advance`` where it matters."""
    aside = {"engine/pipeline/run.Save._advance", "engine/copying/local.best_engine"}
    orders = [*walked["portus.save"]["order"], walked["portus.load"]["order"][0]]
    for heading, order in zip(("In the call", "On the worker", "Back"), orders, strict=True):
        named = [f"{module}.{name}" for name, module in functions_of("engine", heading)]
        steps = [each for each in named if each in order and each not in aside]
        assert len(steps) > 5
        assert sorted(steps, key=order.index) == steps


def test_a_file_that_comes_again_is_a_climb() -> None:
    down = [("a", "one"), ("a", "two"), ("b", "three")]
    assert walks.climbs({"caller": [down], "worker": []}) == []
    assert walks.climbs({"caller": [[*down, ("a", "four")]], "worker": []}) == ["a"]


def test_the_page_of_the_engine_names_all_steps_of_its_walks() -> None:
    named = functions_of("engine")
    told = {f"{module}.{name}" for name, module in named}
    calls, works = walks.STEPS["portus.save"]
    steps = [step for step in (*calls, *works, *walks.LOAD) if " or " not in step]
    assert [step for step in steps if step not in told] == []


@pytest.mark.parametrize("page", ["engine", "reach", "companions"])
def test_the_pages_of_the_rings_name_functions_that_there_are(page: str) -> None:
    named = functions_of(page)
    assert len(named) > 4
    assert [(name, module) for name, module in named if name not in names_in(module)] == []


def functions_of(page: str, heading: str = "") -> list[tuple[str, str]]:
    """Return the functions and classes that a page names, or one section of it, and their
    modules."""
    text = (walks.ROOT / "docs" / f"{page}.md").read_text()
    text = text.partition(f"\n## {heading}")[2].partition("\n## ")[0] if heading else text
    return re.findall(r"`([\w.]+)` \(`([\w/]+)`\)", text)


def names_in(module: str) -> set[str]:
    """Return the classes and functions of a module of the core, methods as ``Class.method``."""
    found = set()
    tree = ast.parse((walks.ROOT / "core" / "portus" / f"{module}.py").read_text())
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            below = (each for each in node.body if isinstance(each, ast.FunctionDef))
            found.update(f"{node.name}.{each.name}" for each in below)
    return found
