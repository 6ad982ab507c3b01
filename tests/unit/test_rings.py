"""The three rings: the table of the architecture page, and the contract that holds it."""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from portus.engine import extensions
from tests.packages import ADAPTERS, FOLDERS, ROOT

CONTRACT: Final = "The engine imports neither reach nor companions"
ENGINE_LINES_MAX: Final = 15_000
ENGINE_WORDS_MAX: Final = 35


def modules() -> dict[str, Path]:
    """Every module that is shipped, by its name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = path
    return found


def table() -> dict[str, str]:
    """The ring of each package or module that the table names."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    text = page[page.index("## The rings") : page.index("## The floors")]
    rows = re.findall(r"^\| (engine|reach|companions|face) \| (.*) \|$", text, re.MULTILINE)
    named = [(name, ring) for ring, cell in rows for name in re.findall(r"`([\w.]+)`", cell)]
    assert len(dict(named)) == len(named), "something is in the table twice"
    assert len(rows) == 4
    return dict(named)


def rings_of_modules() -> dict[str, str]:
    """The ring of each module: that of the nearest of its parents in the table."""
    rows, found = {**table(), **dict.fromkeys(ADAPTERS, "reach")}, {}
    for module in modules():
        parents = [module.rsplit(".", cut)[0] for cut in range(module.count(".") + 1)]
        own = [each for each in parents if each in rows and (each != "portus" or each == module)]
        assert own, f"{module} is in no ring of the page"
        found[module] = rows[own[0]]
    return found


def listed(name: str) -> set[str]:
    """A list of the contract, as modules."""
    text = (ROOT / "pyproject.toml").read_text()
    contract = text[text.index(f'name = "{CONTRACT}"') :].split("[[tool", 1)[0]
    body = re.search(rf"^{name} = \[(.*?)\]", contract, re.MULTILINE | re.DOTALL)
    assert body is not None
    named = set(re.findall(r'"([\w.]+)"', body[1]))
    known = rings_of_modules()
    return {each for each in known if any(f"{each}.".startswith(f"{one}.") for one in named)}


def imports(path: Path) -> set[str]:
    """What a module imports, anywhere in it: modules, and names in them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def imports_of(package: str) -> dict[str, set[str]]:
    """What each module of a package imports."""
    own = {name: path for name, path in modules().items() if name.split(".")[0] == package}
    return {name: imports(path) for name, path in own.items()}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_stands_on_the_face_alone(adapter: str) -> None:
    others = modules().keys() - {"portus", "portus.dcp"} - imports_of(adapter).keys()
    below = {name: sorted(found & others) for name, found in imports_of(adapter).items()}
    assert {name: found for name, found in below.items() if found} == {}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_no_modules_of_an_adapter_import_each_other_in_a_circle(adapter: str) -> None:
    def child(module: str) -> str:
        return module.removeprefix(f"{adapter}.").split(".")[0]

    graph: dict[str, set[str]] = {}
    for name, found in imports_of(adapter).items():
        below = {child(each) for each in found & modules().keys() if each.startswith(f"{adapter}.")}
        if name != adapter:
            graph.setdefault(child(name), set()).update(below - {child(name)})
    graphlib.TopologicalSorter(graph).prepare()  # or CycleError


STRANGERS = {"lightning_fabric", "pytorch_lightning", "transformers", "deepspeed", "torchtitan"}
"""Frameworks besides those that adapters are named after."""


def test_the_core_knows_neither_adapters_nor_their_frameworks() -> None:
    frameworks = {name.removeprefix("portus_") for name in ADAPTERS}
    strangers = {*ADAPTERS, *frameworks, *STRANGERS}
    for name, found in imports_of("portus").items():
        assert {each.split(".")[0] for each in found} & strangers == set(), name


@pytest.mark.parametrize("package", FOLDERS)
def test_a_package_stands_without_its_repository(package: str) -> None:
    for name, found in imports_of(package).items():
        assert {each.split(".")[0] for each in found} & {"core", "recipes", "tests"} == set(), name


def test_the_table_names_nothing_that_is_not_there() -> None:
    assert sorted(set(table()) - set(modules())) == []


def test_the_contract_is_about_the_modules_of_the_table() -> None:
    rings = rings_of_modules()
    engine = {name for name, ring in rings.items() if ring == "engine"}
    assert listed("source_modules") == engine
    others = {name for name in rings.keys() - engine if name.startswith("portus.")}
    assert listed("forbidden_modules") == others


def test_every_package_of_the_rings_is_on_a_floor() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    contract = text[text.index('name = "Imports go down only') :].split("[[tool", 1)[0]
    floors = set(re.findall(r"portus[\w.]+", contract))
    known = rings_of_modules()
    deep = [each for each, ring in known.items() if ring != "face" and each.count(".") > 1]
    assert len(deep) > 200
    stray = [n for n in deep if not any(f"{n}.".startswith(f"{f}.") for f in floors)]
    assert stray == []


def test_the_engine_is_small_enough_to_be_read() -> None:
    rings, files = rings_of_modules(), modules()
    lines = [
        len(files[name].read_text().splitlines())
        for name, ring in rings.items()
        if ring == "engine"
    ]
    assert sum(lines) <= ENGINE_LINES_MAX


NAMED: Final = {
    name: value
    for name, value in vars(extensions).items()
    if name.isupper() and isinstance(value, str)
}


@pytest.mark.parametrize("name", NAMED)
def test_what_the_engine_calls_by_name_is_there_and_outside_of_it(name: str) -> None:
    module = NAMED[name].partition(":")[0]
    assert rings_of_modules()[module] in ("reach", "companions")
    importlib.import_module(module)
    assert callable(extensions.extension(NAMED[name]))


USE = """
import sys, torch, portus
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters())
portus.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "x.pt")
optimizer.step()
portus.load("x.pt")
print(*(each for each in sys.modules if each.startswith("portus.")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="files are written on Linux only")
def test_a_save_and_a_load_of_a_file_import_the_engine_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    rings = rings_of_modules()
    found = {name: rings[name] for name in done.stdout.split() if name in rings}
    others = [name for name, ring in found.items() if ring != "engine"]
    assert others in ([], ["portus._autoload"])  # that is for `torch.load` of pointers
    assert "portus.engine.writer.image_file" in found


def test_the_engine_has_few_words_of_its_own() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    text = page[page.index("### Words of the engine") : page.index("### Words of the reach")]
    words = re.findall(r"^\| (?!word \|)([^|-]+) \|", text, re.MULTILINE)
    assert 20 < len(words) <= ENGINE_WORDS_MAX
