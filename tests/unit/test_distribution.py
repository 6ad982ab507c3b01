"""What is shipped: the right files, once, in the wheel and in the source archive."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.packages import ADAPTERS, FOLDERS, ROOT

BUILD_S_MAX = 60


def build(tree: Path, kind: str) -> Path:
    """The one archive that ``tree`` builds into; ``kind`` is wheel or sdist."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", "made"],
        cwd=tree,
        check=True,
        capture_output=True,
        timeout=BUILD_S_MAX,
    )
    (made,) = (tree / "made").iterdir()
    return made.rename(tree / made.name)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, built from a copy of this tree."""
    pytest.importorskip("hatchling")
    tree = tmp_path_factory.mktemp("tree") / "portus"
    unwanted = shutil.ignore_patterns(".*_cache", ".git", ".venv", ".hypothesis", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=unwanted)
    return build(tree, "sdist")


ENTRY = "portus_in_torch.py"


@pytest.fixture(scope="module")
def wheel(source: Path) -> list[str]:
    """The names in the wheel that the source archive builds into, as a user's pip would."""
    with tarfile.open(source) as archive:
        archive.extractall(source.parent, filter="data")
    tree = source.with_name(source.name.removesuffix(".tar.gz"))
    with zipfile.ZipFile(build(tree, "wheel")) as archive:
        return archive.namelist()


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {*FOLDERS, ENTRY}
    assert {f"{package}/py.typed" for package in FOLDERS} <= {*wheel}


def test_the_wheel_holds_every_module_once(wheel: list[str]) -> None:
    expected = [
        path.relative_to(folder.parent)
        for folder in FOLDERS.values()
        for path in folder.rglob("*.py")
    ]
    assert sorted(n for n in wheel if n.endswith(".py")) == sorted([ENTRY, *map(str, expected)])
    assert len(wheel) == len(set(wheel))


def test_the_source_archive_can_be_tested(source: Path) -> None:
    with tarfile.open(source) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    assert tops >= {"core", *ADAPTERS, "recipes", "tests", "docs", "requirements"}
    assert tops >= {"pyproject.toml", "Makefile", "LICENSE", "README.md", "CHANGELOG.md"}
    assert ".ci" not in tops
