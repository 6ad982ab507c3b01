"""The engines and the media that copying is tried with."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from portus.engine.copying import native
from portus.engine.copying.local import Engine, PurePython
from portus.engine.media.base import Medium
from portus.reach.media.local import LocalFiles
from portus.reach.media.space import Memory

BUILD = Path(__file__).resolve().parents[3] / "core" / "build_native.py"
SIZE = 10 << 20

Compile = Callable[[str], Path]
"""Given the text of a helper, where it lies compiled."""


@pytest.fixture(scope="session")
def build() -> ModuleType:
    """The build hook, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("build_native", BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def compiled(build: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compiles as the build does, but elsewhere; skips where that cannot be."""

    def of_text(text: str) -> Path:
        folder = tmp_path_factory.mktemp("helper")
        (folder / "native.c").write_text(text)
        problem = build.compile_helper(folder / "native.c", folder / "_native.so")
        if problem:
            pytest.skip(f"no native helper: {problem}")
        return folder / "_native.so"

    return of_text


@pytest.fixture(scope="session")
def native_text() -> str:
    return Path(native.PATH).with_name("native.c").read_text()


@pytest.fixture(scope="session", params=["pure Python", "native"])
def engine(request: pytest.FixtureRequest, compiled: Compile, native_text: str) -> Engine:
    """Each engine. The native one is compiled from the source of today."""
    if request.param == "pure Python":
        return PurePython()
    helper = native.load(str(compiled(native_text)))
    assert helper is not None
    return helper


@pytest.fixture(scope="module", params=["memory", "mapped", "stored"])
def medium(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Medium]:
    """A medium with addresses, a file that may have some, and a file that has none."""
    path = str(tmp_path_factory.mktemp("medium") / "file")
    found: Medium
    if request.param == "memory":
        found = Memory(SIZE)
    else:
        found = LocalFiles(mapped=request.param == "mapped").create(path, SIZE)
    yield found
    found.close()
